# SPDX-License-Identifier: Apache-2.0
"""Finds the commands that a log of a session or of a build script shows, and what they do.

One line at a time; what came of a command is not looked at.
"""

from __future__ import annotations

import re

PROGRAMS = (
    r"(?:sudo |time |!)?(?:\w{1,40}=\S{0,120} ){0,6}(?:\S{0,80}/)?"
    r"(?:python[\d.]{0,5}|pip[\d.]{0,4}|uv|conda|mamba|micromamba|poetry|pdm|pixi|torchrun"
    r"|accelerate|nvcc|nvidia-smi|gcc|g\+\+|ls|cat|tail|head|grep|echo|export|set|git|cd|which|where"
    r"|ldd|nm|uname|apt|apt-get|yum|dnf|module|make|bash|sh|docker|dir|type|objdump|readelf"
    r"|cuobjdump|ninja|source|activate|rm|unset|wget|curl|df|free|jupyter)(?:\s|$)"
)
_PROMPTS = (
    re.compile(r"^(?:\([\w./-]{1,60}\)\s?)?[^\s$]{0,120}\s?\$ (?P<command>\S.{0,1500})"),
    re.compile(
        r"^(?:\([\w./-]{1,60}\)\s?)?[^\s#%>]{0,120}(?: [^\s#%>]{1,80})?\s?[#%>❯➜]\s?"
        rf"(?P<command>{PROGRAMS}.{{0,1500}})"
    ),
    re.compile(r"^(?:\([\w./-]{1,60}\)\s?)?PS [^>\n]{1,160}>\s?(?P<command>\S.{0,1500})"),
    re.compile(r"^(?:\([\w./-]{1,60}\)\s?)?[A-Za-z]:\\[^>\n]{0,160}>\s?(?P<command>\S.{0,1500})"),
    re.compile(rf"^[!%](?P<command>{PROGRAMS}.{{0,1500}})"),
    re.compile(rf"^\+{{1,3}} (?P<command>{PROGRAMS}.{{0,1500}})"),
    re.compile(r"^(?:\[[^\]\n]{1,40}\] |Step \d{1,3}/\d{1,3} : )?RUN (?P<command>\S.{0,1500})"),
    re.compile(rf"^(?:##\[group\])?Run (?P<command>{PROGRAMS}.{{0,1500}})"),
)
_BARE = re.compile(
    r"^(?:sudo )?(?:\w{1,40}=\S{0,120} ){0,6}(?:(?:python[\d.]{0,5} -m )?pip[\d.]{0,4} install"
    r"|uv (?:pip install|sync|add)|conda (?:install|env create)|mamba install"
    r"|poetry (?:install|add)|python[\d.]{0,5} setup\.py)\s?[^:]{0,1500}$"
)
_INSTALL = re.compile(
    r"\b(?:pip[\d.]{0,4}|uv|conda|mamba|micromamba|poetry|pdm|pixi)\b[^|;&]{0,400}?"
    r"\b(?:install|add|sync|create|update|wheel)\b"
    r"|setup\.py\b|\bdocker (?:compose )?build|^make\b|\b(?:ba)?sh \S{0,80}make\S{0,20}\.sh"
)
_PROBE = re.compile(
    r"\b(?:pip[\d.]{0,4}|conda|uv pip) (?:list|show|freeze|check|debug|cache|uninstall|config)\b"
    r"|^(?:nvcc|nvidia-smi|gcc|g\+\+|c\+\+|ls|dir|echo|uname|which|where|conda (?:info|list)|git|cd"
    r"|export|set|unset|nm|ldd|readelf|objdump|cuobjdump|df|free|module|source|activate|rm|LD_DEBUG)\b"
    r"|\bpython[\d.]{0,5} (?:-V|--version|-m (?:torch\.utils\.collect_env|platform|site))"
)
_PRINT = re.compile(r"\bpython[\d.]{0,5} -c\b.{0,300}\bprint\(")
_MODULES = re.compile(
    r"mamba_ssm|causal_conv1d|selective_scan|mamba-ssm|causal-conv1d|import (?:\w+, ?)*mamba"
)
_QUOTED = re.compile(r"\"[^\"\n]{0,400}\"|'[^'\n]{0,400}'")
_REDIRECT = re.compile(
    r"\b(?P<package>[A-Za-z][\w.-]{0,60}(?:\[[\w,.-]{1,60}\])?)"
    r"(?P<sign>>=?|<=?)(?P<version>=?\d[\w.]{0,20})(?:\s|$|[,;|&])"
)


def command_of(line: str, indented: bool) -> str:
    """The command that the line shows after a prompt or alone; empty when it shows none."""
    for pattern in _PROMPTS:
        match = pattern.match(line)
        if match:
            return match["command"].strip()
    return line.strip() if not indented and _BARE.match(line) else ""


def kind_of(command: str) -> str:
    """What a command does: "install", "run", or "probe" for one that only shows something."""
    if _PROBE.search(command) and not re.search(r"\binstall\b", command):
        return "probe"
    if _INSTALL.search(command):
        return "install"
    if _PRINT.search(command) and not _MODULES.search(command):
        return "probe"
    return "run"


def is_about_modules(command: str) -> bool:
    """Whether it installs or imports one of the packages that this is about."""
    return _MODULES.search(command) is not None


def asks_for_torch(command: str) -> bool:
    """Whether the user named torch in an install, so that a change of it was wanted."""
    return re.search(r"[\s'\"]torch(?:==|>=|<|\s|$|['\"\[])", command) is not None


def redirect(command: str) -> dict[str, str]:
    """The requirement whose ``>`` or ``<`` the shell takes for itself; empty when there is none."""
    if not re.search(r"\b(?:install|add)\b", command):
        return {}
    match = _REDIRECT.search(_QUOTED.sub("''", command))
    if match is None:
        return {}
    requirement = f"{match['package']}{match['sign']}{match['version']}"
    file = ("=" if match["sign"].endswith("=") else "") + match["version"]
    return {"found": requirement, "file": file, "package": match["package"].partition("[")[0]}
