# SPDX-License-Identifier: Apache-2.0
"""The rows that are compared on a GPU: op, sizes, dtype, layout, and the times aimed at.

Data and the arithmetic of floors only; no torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

UPDATES = ("selective_state_update", "causal_conv1d_update")
"""The ops of decode: one token a call, no gradients."""

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Ceilings:
    """What one GPU can do at most, as measured on it.

    Attributes:
        copy: Bytes a second of a large copy on the device, read and written.
        exponentials: Results a second of the exponential unit.
    """

    copy: float
    exponentials: float


CEILINGS = {"NVIDIA H200": Ceilings(copy=4.25e12, exponentials=4.16e12)}
"""By the name that torch gives a GPU. Another one has no floors until it is measured."""


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: How ``--rows`` calls it.
        op: Name of the op.
        sizes: By canonical name.
        dtype: Of the activations: bf16, fp16 or fp32. Parameters are float32, but for the
            weights of a decode step's convolution, which a bf16 model has in bf16.
        layout: channel-first or channel-last.
        targets: Milliseconds aimed at, by fwd and bwd; of updates device_ms, and host_us.
    """

    name: str
    op: str
    sizes: Mapping[str, int]
    dtype: str = "bf16"
    layout: str = "channel-first"
    targets: Mapping[str, float] = field(default_factory=dict)

    @property
    def directions(self) -> tuple[str, ...]:
        return ("fwd",) if self.op in UPDATES else ("fwd", "bwd")

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation tensor."""
        count = BYTES[self.dtype]
        for name in ("batch", "dim", "nheads", "headdim", "seqlen"):
            count *= self.sizes.get(name, 1)
        return count

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of an update."""
        sizes = self.sizes
        channels = sizes["batch"] * sizes.get("dim", 1)
        channels *= sizes.get("nheads", 1) * sizes.get("headdim", 1)
        if self.op == "causal_conv1d_update":
            return channels * sizes["state_len"] * BYTES[self.dtype]
        return channels * sizes["dstate"] * 4

    def floor_ms(self, direction: str, ceilings: Ceilings) -> float:
        """The least time: each byte once at copy speed, each exponential once, the larger of both.

        A scan needs one exponential a state and about four more a token and channel (softplus and
        silu); its backward two a state, since states are computed anew, and about eight.
        """
        if self.op in UPDATES:
            moved = 2 * self.state_bytes
            moved += (2 if self.op == "causal_conv1d_update" else 4) * self.activation_bytes
            return 1e3 * moved / ceilings.copy
        if self.op == "causal_conv1d":
            return 1e3 * (2 if direction == "fwd" else 3) * self.activation_bytes / ceilings.copy
        tensors, each, more = (4, 1, 4) if direction == "fwd" else (7, 2, 8)
        tokens = self.activation_bytes // BYTES[self.dtype]
        exponentials = tokens * (each * self.sizes["dstate"] + more)
        bytes_ms = 1e3 * tensors * self.activation_bytes / ceilings.copy
        return max(bytes_ms, 1e3 * exponentials / ceilings.exponentials)


def _sizes(names: str, values: Iterable[int]) -> Mapping[str, int]:
    return MappingProxyType(dict(zip(names.split(), values, strict=True)))


def _scan(name: str, shape: tuple[int, ...], fwd: float, bwd: float, **given: Any) -> Row:
    sizes = _sizes("batch dim seqlen dstate", shape)
    targets = {"fwd": fwd, "bwd": bwd} if fwd else {}
    return Row(name, "selective_scan", sizes, targets=targets, **given)


def _conv(name: str, shape: tuple[int, ...], fwd: float, bwd: float, **given: Any) -> Row:
    sizes = _sizes("batch dim seqlen width", (*shape, 4))
    targets = {"fwd": fwd, "bwd": bwd}
    return Row(name, "causal_conv1d", sizes, targets=targets, **given)


def _update(name: str, op: str, names: str, shape: tuple[int, ...], device_ms: float) -> Row:
    targets = {"host_us": 15.0} | ({"device_ms": device_ms} if device_ms else {})
    return Row(name, op, _sizes(names, shape), targets=targets)


_LAST = "channel-last"
_TAPS = ("causal_conv1d_update", "batch dim width state_len")
_STATE = ("selective_state_update", "batch dim dstate")
_HEADS = ("selective_state_update", "batch nheads headdim dstate")

ROWS = (
    _scan("scan1", (8, 2048, 2048, 16), 0.22, 0.75),
    _scan("scan2", (8, 2048, 2048, 16), 0.28, 0.90, dtype="fp32"),
    _scan("scan3", (1, 4096, 8192, 16), 0.28, 0.90),
    _scan("scan4", (1, 1536, 65536, 16), 1.0, 3.0),
    _scan("scan5", (64, 1536, 512, 16), 0.32, 1.1),
    _scan("scan6", (128, 384, 197, 16), 0.09, 0.30),
    _scan("scan7", (8, 2048, 2048, 64), 0.85, 2.8),
    _scan("scan8", (1, 2048, 131072, 16), 2.2, 7.5),
    # Beside the table: the other layout, an odd length and small states must cost little more.
    _scan("extra1", (8, 2048, 2048, 16), 0.286, 0.975, layout=_LAST),
    _scan("extra2", (8, 2048, 2047, 16), 0.264, 0.90),
    _scan("extra3", (8, 2048, 2048, 8), 0, 0),
    _scan("extra4", (8, 2048, 2048, 1), 0, 0),
    _scan("extra5", (8, 2048, 2048, 128), 0, 0),
    _conv("conv1", (8, 4096, 2048), 0.072, 0.12),
    _conv("conv2", (8, 4096, 2048), 0.072, 0.12, layout=_LAST),
    _conv("conv3", (1, 4096, 65536), 0.28, 0.44),
    _conv("conv4", (1, 4096, 65536), 0.28, 0.44, layout=_LAST),
    _conv("conv5", (64, 1536, 512), 0.058, 0.10),
    _conv("conv6", (64, 1536, 512), 0.058, 0.10, layout=_LAST),
    _update("decode1", *_TAPS, (1, 5120, 4, 4), 0),
    _update("decode2", *_TAPS, (128, 5120, 4, 4), 0),
    _update("decode3", *_TAPS, (512, 5120, 4, 4), 0.018),
    _update("decode4", *_STATE, (1, 5120, 16), 0),
    _update("decode5", *_STATE, (128, 5120, 16), 0),
    _update("decode6", *_STATE, (512, 5120, 16), 0.104),
    _update("decode7", *_HEADS, (1, 80, 64, 128), 0),
    _update("decode8", *_HEADS, (128, 80, 64, 128), 0),
    _update("decode9", *_HEADS, (512, 80, 64, 128), 0.82),
)
"""Every row; the numbers count the lines of their table."""

MEMORY = "memory"
"""The name of the row of peak memory: forward and backward of ``scan1``."""


def chosen(words: Iterable[str]) -> tuple[list[Row], bool]:
    """The rows of these names, or whose names begin with one, and whether memory is among them.

    Raises:
        ValueError: a word fits no row; the message lists the names.
    """
    wanted = [word for word in words if word]
    if not wanted:
        return list(ROWS), True
    names = [*(row.name for row in ROWS), MEMORY]
    for word in wanted:
        if not any(name.startswith(word) for name in names):
            raise ValueError(
                f"--rows: {word!r} is not the name of a row, nor the beginning of one.\n"
                f"There are: {', '.join(names)}.\n"
                "Leave --rows out for all of them."
            )
    # A whole name means that row alone: extra1 is not extra10.
    exact = {word for word in wanted if word in names}
    begins = tuple(word for word in wanted if word not in exact)
    found = [r for r in ROWS if r.name in exact or (begins and r.name.startswith(begins))]
    return found, MEMORY in exact or (bool(begins) and MEMORY.startswith(begins))


def describe(row: Row) -> dict[str, Any]:
    """The fields of a result that say what was run."""
    sizes = dict(row.sizes)
    return {"op": row.op, **sizes, "layout": row.layout, "dtype": row.dtype}
