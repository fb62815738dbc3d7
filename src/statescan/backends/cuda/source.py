# SPDX-License-Identifier: Apache-2.0
"""Joins the text that is compiled for some instances of a kernel, and names it by its hash.

Text only: nothing is compiled here, and neither torch nor a driver is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from statescan.backends.cuda.tables.base import INTEGER, POINTER, Instance, Kernel

FOLDER = Path(__file__).parents[2] / "kernels" / "cuda"
"""Where the sources are, and ``cubins/<architecture>`` beside them."""

_TYPES = {POINTER: "void*", INTEGER: "i64"}
WORD = 8
"""Bytes of every field of a parameter struct."""

_HASH_DIGITS = 32
_SHARED = ("ptx.cuh", "common.cuh")


def unit(kernel: Kernel, instances: Sequence[Instance] | None = None) -> str:
    """The whole text of a compilation: shared code, parameter struct, kernel, instances.

    Args:
        kernel: The kernel.
        instances: Those to compile, all by default.
    """
    chosen = kernel.instances if instances is None else instances
    parts = [*map(_read, _SHARED), parameter_struct(kernel)]
    parts += [_read(name) for name in (*kernel.headers, f"{kernel.stem}.cu")]
    parts += [_entry(kernel, instance) for instance in chosen]
    return "\n".join(parts)


def parameter_struct(kernel: Kernel) -> str:
    """The struct that the kernel takes by value, written from the table that Python packs by.

    Its size says that there is no padding, since each field takes 8 bytes; so the fields lie
    where Python puts them.
    """
    lines = [f"struct {kernel.struct_name} {{"]
    lines += [f"    {_TYPES.get(kind, kind)} {name};" for name, kind in kernel.fields]
    lines += ["};", _asserted(f"sizeof({kernel.struct_name})", WORD * len(kernel.fields))]
    return "\n".join(lines) + "\n"


def layout_check(kernel: Kernel) -> str:
    """A text that compiles only if each field lies where Python packs it; for builds, not users.

    NVRTC has no offsetof. What stands in its place here is an operator of its front end that is
    written down nowhere, so kernels that must compile with any NVRTC do without.
    """
    name = kernel.struct_name
    checks = [
        _asserted(f"__INTADDR__(&((({name}*)0)->{field}))", WORD * place)
        for place, (field, _) in enumerate(kernel.fields)
    ]
    return "\n".join((*map(_read, _SHARED), parameter_struct(kernel), *checks)) + "\n"


def text_hash(text: str) -> str:
    """Name of a text in manifests and caches."""
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


@lru_cache(maxsize=32)
def unit_hash(kernel: Kernel) -> str:
    """Hash of the text with all instances of a kernel, which a shipped cubin must match."""
    return text_hash(unit(kernel))


def _asserted(what: str, value: int) -> str:
    return f'static_assert({what} == {value}, "layout");'


def _entry(kernel: Kernel, instance: Instance) -> str:
    """The function in the cubin: fixed name, fixed launch bounds, one parameter."""
    template = f"<{instance.template}>" if instance.template else ""
    return (
        f'extern "C" __global__ void __launch_bounds__({instance.threads}, {instance.min_blocks})\n'
        f"{kernel.symbol(instance)}(const __grid_constant__ {kernel.struct_name} p) {{\n"
        f"    {kernel.stem}{template}(p);\n"
        "}\n"
    )


def _read(name: str) -> str:
    return _read_file(FOLDER / name)


@lru_cache(maxsize=32)
def _read_file(path: Path) -> str:
    # Line ends of a checkout must not change the hash.
    return path.read_text(encoding="utf-8").replace("\r\n", "\n")
