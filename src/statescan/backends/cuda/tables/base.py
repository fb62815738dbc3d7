# SPDX-License-Identifier: Apache-2.0
"""What is known of a CUDA kernel before it is compiled: its parameters and its instances.

Data only: no torch, no driver, so that a build machine needs neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from struct import Struct

POINTER, INTEGER = "ptr", "i64"


@lru_cache(maxsize=256)
def packer(count: int) -> Struct:
    """Packs so many neighbouring fields of a struct."""
    return Struct(f"<{count}q")


@dataclass(frozen=True)
class Instance:
    """One compiled form of a kernel.

    Attributes:
        suffix: What tells it from the others, as in ``bf16_states16``.
        template: Arguments of the C++ template, without the angle brackets.
        threads: Threads a block has, always this many.
        min_blocks: Blocks that must fit on a multiprocessor, which bounds the registers.
        shared_bytes: Dynamic shared memory of a block, where it does not depend on the call.
    """

    suffix: str
    template: str
    threads: int
    min_blocks: int = 1
    shared_bytes: int = 0


@dataclass(frozen=True)
class Kernel:
    """A kernel file: the struct that its kernels take by value, and its instances.

    Every field has 8 bytes, a pointer or an integer, so that Python packs a struct in one call
    and no padding can differ between the two sides.
    """

    stem: str
    fields: tuple[tuple[str, str], ...]
    instances: tuple[Instance, ...]
    headers: tuple[str, ...] = ()

    @cached_property
    def packer(self) -> Struct:
        """Packs the fields' values, in their order."""
        return packer(len(self.fields))

    @cached_property
    def by_suffix(self) -> dict[str, Instance]:
        """The instances by their suffix."""
        return {instance.suffix: instance for instance in self.instances}

    @property
    def struct_name(self) -> str:
        """Name of the struct in C++."""
        return "".join(word.capitalize() for word in self.stem.split("_")) + "Params"

    def symbol(self, instance: Instance) -> str:
        """Name of the instance in the cubin."""
        return f"statescan_{self.stem}__{instance.suffix}"
