# SPDX-License-Identifier: Apache-2.0
"""What a fix needs to know from a log: package, versions, GPU, paths, and the shell to write for.

The names are those of ``catalog.PLACEHOLDERS``; how a fix uses them is in ``fixes``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from statescan.doctor.logs import commands
from statescan.doctor.logs.evidence import Evidence, cuda_of, normal
from statescan.doctor.logs.verdict import Verdict

FORCE = {"mamba-ssm": "MAMBA_FORCE_BUILD", "causal-conv1d": "CAUSAL_CONV1D_FORCE_BUILD"}
_SAFE = re.compile(r"[\w.+:/\\@=<>,\[\]~%&?# -]{1,300}")
"""A value from a log goes into command lines that people copy: no quote, no $, no separator."""

_NAMED = re.compile(
    r"\b(mamba[-_]ssm|causal[-_]conv1d)\b(?:(?:==|-)v?(\d[\w.]{0,20}?)(?=$|[\s+'\",;)-]|\.tar))?"
)


def collect(verdict: Verdict, evidence: Evidence) -> dict[str, str]:
    """The values of a log for the fix of its cause; only those that the log shows."""
    hit, opinion = verdict.hit, verdict.opinion
    given = {**(hit.values if hit is not None else {}), **opinion.values}
    package = _package(verdict, given)
    torch, _, _ = evidence.torch.partition("+")
    cuda = evidence.torch_cuda if evidence.torch_cuda != "none" else ""
    home = evidence.cuda_home
    found = {
        "package": package,
        "force": FORCE[package],
        "version": _version(verdict, evidence, package),
        "mamba": _version(verdict, evidence, "mamba-ssm"),
        "python": evidence.python,
        "torch": torch,
        "cuda": cuda,
        "nvcc": evidence.nvcc_version,
        "gcc": evidence.gcc_version,
        "cuda_home": home if home and ":" not in home and home not in ("/usr", "None") else "",
        "sm": _sm(evidence),
    }
    for name in ("file", "path", "needed", "found", "sm", "cuda", "cuda_home", "url", "version"):
        value = given.get(name) or given.get(f"{name}2") or ""
        if value:
            found[name] = value
    module = evidence.last("module-file")
    if module is not None:
        found.setdefault("file", module.values["file"])
    if opinion.slug == "shell-redirect":
        lost = [commands.redirect(attempt.command) for attempt in evidence.log.attempts]
        found.update(next((row for row in reversed(lost) if row), {}))
    if opinion.slug == "torch-changed-by-pip":
        old = given.get("needed", "")
        found["torch"], found["cuda"] = old.partition("+")[0], cuda_of(old)
    if opinion.slug == "wheel-download-failed":
        found.update(_address(verdict, evidence))
    return {name: value for name, value in found.items() if value and _SAFE.fullmatch(value)}


def _package(verdict: Verdict, given: dict[str, str]) -> str:
    """Which of the two packages the attempt is about."""
    named = normal(given.get("package", ""))
    if named in FORCE:
        return named
    attempt = verdict.attempt
    if attempt is not None:
        lines = [
            hit
            for hit in attempt.hits
            if hit.id in ("failed-building", "building-wheel", "guessing", "torch-build")
        ]
        texts = [given.get("file", ""), given.get("module", "")]
        texts += [hit.text for hit in reversed(lines)] + [attempt.command]
        texts += [hit.text for hit in attempt.hits]
        for text in texts:
            match = _NAMED.search(text)
            if match:
                return normal(match[1])
            if "causal_conv1d" in text:
                return "causal-conv1d"
            if "selective_scan" in text or "mamba_ssm" in text:
                return "mamba-ssm"
    return "mamba-ssm"


def _version(verdict: Verdict, evidence: Evidence, package: str) -> str:
    """The release that the attempt was to install, or that is installed."""
    attempt = verdict.attempt
    texts = [attempt.command, *(hit.text for hit in attempt.hits)] if attempt is not None else []
    for text in texts:
        for match in _NAMED.finditer(text):
            if normal(match[1]) == package and match[2]:
                return match[2]
    return evidence.version(package)


_GPUS: Mapping[str, str] = {
    r"K80": "37",
    r"P100": "60",
    r"GTX 10[5-8]0|TITAN Xp?\b|P40\b|P4\b": "61",
    r"V100|TITAN V\b": "70",
    r"RTX 20[678]0|Tesla T4|\bT4\b|GTX 16[56]0": "75",
    r"A100|A30\b": "80",
    r"RTX 30[5-9]0|\bA10G?\b|A40\b|RTX A[4-6]000": "86",
    r"RTX 40[5-9]0|\bL40S?\b|\bL4\b": "89",
    r"\bH[12]00|GH200": "90",
    r"\bG?B200": "100",
    r"RTX 50[5-9]0": "120",
}
_NEAR_TUPLE = re.compile(
    r"(?i:capability|nvidia|geforce|tesla|gpu).{0,120}?\((?P<major>\d{1,2}), ?(?P<minor>\d)\)"
)


def _sm(evidence: Evidence) -> str:
    """The GPU's capability, by number or else by the GPU's name."""
    if evidence.capability:
        return "{}{}".format(*evidence.capability)
    hits = [hit for attempt in evidence.log.attempts for hit in attempt.hits]
    texts = [text for hit in hits for text in (hit.text, *hit.follow)]
    texts += [text for _, text in evidence.log.tail]
    for text in texts:
        match = _NEAR_TUPLE.search(text)
        if match:
            return match["major"] + match["minor"]
    for hit in evidence.log.of("gpu-name"):
        for name, sm in _GPUS.items():
            if re.search(name, hit.text):
                return sm
    return ""


def _address(verdict: Verdict, evidence: Evidence) -> dict[str, str]:
    """The wheel that setup.py guessed."""
    attempts = [verdict.attempt] if verdict.attempt else evidence.log.attempts
    for attempt in attempts:
        for hit in attempt.of("guessing"):
            if "wheel" in hit.values:
                return {"url": hit.values.get("url", ""), "file": hit.values["wheel"]}
    return {}


def shell_of(evidence: Evidence, usual: str = "bash") -> str:
    """The shell that the log shows, else the usual one of its system or of the cause."""
    for attempt in reversed(evidence.log.attempts):
        line = next((hit.text for hit in attempt.hits if hit.number == attempt.first), "")
        if re.match(r"(?:\(\S+\)\s?)?PS [^>]{1,200}>", line):
            return "powershell"
        if re.match(r"(?:\(\S+\)\s?)?[A-Za-z]:\\[^>]{0,200}>", line):
            return "cmd"
        if re.match(r"(?:\(\S+\)\s?)?\S{0,80}\$ ", line):
            return "bash"
    return "powershell" if evidence.windows else usual
