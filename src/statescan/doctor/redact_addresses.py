# SPDX-License-Identifier: Apache-2.0
"""The forms of addresses of machines in a piece of text, told from versions of four parts.

Works on one string, in linear time as ``redact_patterns`` does.
"""

from __future__ import annotations

import re

from statescan.doctor.redact_patterns import HIDDEN

_QUAD = re.compile(
    r"(?<![\w.-])(?!127\.|0\.0\.0\.0|255\.255\.)(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.(\d{1,3})"
    r"(?![\w+-]|\.\w)(?P<port>:\d{2,5}(?![\w.:]))?"
)
# Global, unique local and link-local ones; a name of C++ does not begin so.
_IPV6 = re.compile(
    r"(?i)(?<![\w:.])(?:fe80|f[cd][0-9a-f]{2}|2[0-9a-f]{3})(?::[0-9a-f]{0,4}){2,7}(?![\w:])"
)
_CLOUD_HOST = re.compile(r"\bip(?:-\d{1,3}){4}\b")
_REQUIREMENT = re.compile(r"(?:[=~!<>]=|[\w\])][<>]) ?$")
_VERSIONED = re.compile(
    r"(?i)(?:v|ver|versions?|release|tag|driver|kernel|runtime|toolkit|build|wsl|package|wheel)$"
    r"|[\w.\[-]*(?:version|release)$|(?:nv|cu|lib|nccl|tensor|trt|torch|python|triton|mkl|magma)"
)
_UPGRADE = re.compile(
    r"(?i)version|upgrad|downgrad|updating|update|pinned|built|compiled|install|replac|nvidia"
    r"|cuda|cu1\d"
)
_PLACE = re.compile(
    r"(?i)(?:\w*[_-])?(?:host|hostname|ip|addr|address|inet|peer|server|proxy|nameserver|gateway)$"
    r"|(?:bind|listen(?:ing)?|dns|ping|trying|resolved?|from|at|via|connect|ssh|endpoint)$"
)
_TOWARDS = re.compile(r"(?i)(?:connect|rout|sen[dt]|forward|bound|listen|resolv)")


def hide_addresses(text: str, label: str = "") -> str:
    """``text`` with ``IP`` for the addresses of machines; versions of four parts stay.

    Args:
        text: Any.
        label: By what name the text goes, such as "version".
    """
    if "::" in text or text.count(":") > 6:
        text = _IPV6.sub("IP", text)
    if text.count(".") < 3 and "ip-" not in text:
        return text

    def hidden(match: re.Match[str]) -> str:
        start = match.start()
        before = text[max(0, start - 48) : start] if start else f"{label}: "
        if max(map(int, match.group(1, 2, 3, 4))) > 255 or not _is_address(match, before):
            return match[0]
        return f"IP{match['port'] or ''}"

    return _CLOUD_HOST.sub("HOST", _QUAD.sub(hidden, text))


def _is_address(match: re.Match[str], before: str) -> bool:
    """By what stands around it: four numbers alone may be a version too."""
    if before.endswith(("://", "\\\\", f"{HIDDEN}@", "|")) or match["port"]:
        return True
    if before.endswith("/") or (before[-2:].strip(" \t") and _REQUIREMENT.search(before)):
        return False
    words = before.replace("=", " ").replace(":", " ").replace("(", " ").split()[-2:]
    last = words[-1].strip("\"'`,[]{}|") if words else ""
    if _VERSIONED.match(last):
        return False
    if _is_private(int(match[1]), int(match[2])):
        return not (last.lower() in ("from", "to", "at") and _UPGRADE.search(before))
    if before.endswith("("):
        # ping writes host.name (1.2.3.4).
        return last.rpartition(".")[2].isalpha() and "." in last
    if last.lower() == "to":
        return len(words) == 2 and _TOWARDS.match(words[0]) is not None
    return _PLACE.match(last) is not None and not _UPGRADE.search(before)


def _is_private(first: int, second: int) -> bool:
    return (
        first == 10
        or (first == 192 and second == 168)
        or (first == 172 and 16 <= second <= 31)
        or (first == 169 and second == 254)
    )
