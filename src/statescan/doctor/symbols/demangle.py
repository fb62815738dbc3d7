# SPDX-License-Identifier: Apache-2.0
"""Writes C++ names as people write them, with what this machine has for it.

A program or the C++ library does the work; where there is neither, names stay as they are.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence

_MOST = 2000
_FORM = "_Z"
_STRINGS = re.compile(
    r"std::(__cxx11::)?basic_string<char, std::char_traits<char>, std::allocator<char> ?>"
)


def demangle(names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Readable forms of mangled names, and what made them: "c++filt", "libstdc++" or "none"."""
    mangled = [name for name in dict.fromkeys(names) if name.startswith(_FORM)][:_MOST]
    if not mangled:
        return {}, "none needed"
    for tool, method in (("c++filt", _by_program), ("libstdc++", _by_library)):
        found = method(mangled)
        if found:
            return {
                name: _STRINGS.sub(r"std::\1string", text) for name, text in found.items()
            }, tool
    return {}, "none"


def _by_program(names: Sequence[str]) -> dict[str, str]:
    program = shutil.which("c++filt") or shutil.which("llvm-cxxfilt")
    if program is None:
        return {}
    try:
        done = subprocess.run(
            [program],
            input="\n".join(names) + "\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.splitlines()
    return dict(zip(names, lines)) if done.returncode == 0 and len(lines) == len(names) else {}


def _by_library(names: Sequence[str]) -> dict[str, str]:
    """Through ``__cxa_demangle``; the library is the one that every C++ program here loads."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        convert, free = library.__cxa_demangle, ctypes.CDLL(None).free
    except (OSError, AttributeError, TypeError):
        return {}
    convert.restype = ctypes.c_void_p
    convert.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    free.argtypes = [ctypes.c_void_p]
    found = {}
    for name in names:
        status = ctypes.c_int(-1)
        text = convert(name.encode(), None, None, ctypes.addressof(status))
        if text and status.value == 0:
            found[name] = ctypes.string_at(text).decode(errors="replace")
        if text:
            free(text)
    return found
