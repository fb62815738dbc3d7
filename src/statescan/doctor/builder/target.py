# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a build is for: what the user names, else the GPUs of the facts.

Whether nvcc can make code for them is judged in ``before``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from statescan.doctor.model import Facts
from statescan.errors import ArgumentError

_CODE = re.compile(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)(\+ptx)?", re.IGNORECASE)


@dataclass(frozen=True)
class Targets:
    """GPU code to make.

    Attributes:
        codes: "90", "90a", "120", each once; none for what the release itself names.
        ptx: Codes of which PTX is made as well, for GPUs that come later.
        why: Where they were taken from, on one line.
    """

    codes: tuple[str, ...]
    ptx: tuple[str, ...]
    why: str

    @property
    def names(self) -> tuple[str, ...]:
        """As they are written: "sm_90", "compute_90" for PTX."""
        return (
            *(f"sm_{code}" for code in self.codes),
            *(f"compute_{code}" for code in self.ptx),
        )

    @property
    def pairs(self) -> tuple[str, ...]:
        """Values of nvcc's ``-gencode``."""
        return (
            *(f"arch=compute_{code},code=sm_{code}" for code in self.codes),
            *(f"arch=compute_{code},code=compute_{code}" for code in self.ptx),
        )


def choose(asked: Sequence[str], facts: Facts) -> Targets:
    """The targets of a build.

    Args:
        asked: Words of ``--arch``; they come first.
        facts: After them the variable TORCH_CUDA_ARCH_LIST, which the originals' own setup ignores,
            and then the GPUs of the machine.

    Raises:
        ArgumentError: A word of ``--arch`` that names no GPU code.
    """
    words = [word for given in asked for word in re.split(r"[,;\s]+", given) if word]
    if words:
        return _targets([_parsed(word) for word in words], "as --arch asks")
    variable = str(facts.get("environment.variables", {}).get("TORCH_CUDA_ARCH_LIST", ""))
    listed = [_match(word) for word in re.split(r"[;\s]+", variable) if word]
    if listed and all(listed):
        return _targets([row for row in listed if row], "as TORCH_CUDA_ARCH_LIST asks")
    found = facts.get("driver.gpus") or facts.get("torch.devices") or []
    rows = [(str(gpu["capability"]).replace(".", ""), False) for gpu in found]
    if rows:
        return _targets(rows, ", ".join(dict.fromkeys(str(gpu["name"]) for gpu in found)))
    return Targets((), (), "no GPU is visible here: all that the release names")


def as_gpus(targets: Targets) -> list[dict[str, object]]:
    """Facts of GPUs that the targets are for, so that checks judge the build for them."""
    numbers = [code.rstrip("af") for code in targets.codes]
    return [
        {"name": f"sm_{code}", "capability": f"{code[:-1]}.{code[-1]}", "memory_gb": None}
        for code in numbers
    ]


def _targets(rows: Iterable[tuple[str, bool]], why: str) -> Targets:
    rows = list(rows)
    codes = tuple(dict.fromkeys(code for code, _ in rows))
    return Targets(codes, tuple(dict.fromkeys(code for code, ptx in rows if ptx)), why)


def _parsed(word: str) -> tuple[str, bool]:
    found = _match(word)
    if found is None:
        raise ArgumentError(
            f"--arch: {word!r} is no GPU code.\n"
            "It must be like sm_90, 90 or 9.0; with +PTX behind it PTX is made as well.\n"
            "The compute capability of a GPU is what `nvidia-smi --query-gpu=compute_cap` prints."
        )
    return found


def _match(word: str) -> tuple[str, bool] | None:
    match = _CODE.fullmatch(word)
    return (match[1] + match[2] + match[3].lower(), bool(match[4])) if match else None
