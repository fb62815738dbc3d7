# SPDX-License-Identifier: Apache-2.0
"""Launches an instance of a kernel on a tensor's device, on torch's current stream.

Which instance, which grid and which values is decided by the launchers of the ops; where the code
comes from by ``loading``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from statescan.backends.cuda import loading
from statescan.backends.cuda.tables.base import packer

_loaded = loading.LOADED
_thread = loading.THREAD
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _slow_raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _slow_raw_stream
)
"""Handle of torch's current stream on a device, in 0.1 us where torch has the short road."""


def launch(
    stem: str,
    suffix: str,
    device: torch.device,
    grid: tuple[int, int, int],
    values: Sequence[int],
    shared_bytes: int | None = None,
    rest: bytes = b"",
) -> None:
    """Launch ``suffix`` of the kernel ``stem``.

    Args:
        stem: The kernel's name in ``tables``.
        suffix: The instance's name.
        device: The device of the tensors; need not be the current one.
        grid: Blocks in x, y and z, each at least 1; at most 2^31-1, 65535 and 65535.
        values: The fields of the kernel's struct, in the order of its table.
        rest: The fields after ``values``, packed: plans pack once what stays (98 fields take 3 us).
        shared_bytes: Dynamic shared memory of a block where the call decides; else the table's.

    Raises:
        BackendUnavailableError: the code cannot be loaded here or now; the message says why.
        DriverError: the driver refuses the launch.
    """
    index = device.index
    if index != current_device():
        with torch.cuda.device(device):
            here = torch.device("cuda", current_device())
            launch(stem, suffix, here, grid, values, shared_bytes, rest)
        return
    stream = current_stream(index)
    if index not in _thread.seen and not loading.first_look(stem, suffix, index, stream):
        return
    entry = _loaded.get((stem, suffix, index)) or loading.load(stem, suffix, index, stream)
    if shared_bytes is None:
        shared_bytes = entry.shared_bytes
    elif shared_bytes > entry.shared_allowed:
        entry.allow(shared_bytes)
    head = entry.head
    if head[0] != stream or head[1] != grid or head[2] != shared_bytes:
        head = entry.new_head(stream, grid, shared_bytes)
    pack = entry.pack if not rest else packer(len(values)).pack
    request = head[3] + pack(*values) + rest
    result = entry.call(request)
    if result and loading.make_context_current(index):
        # Another library has changed this thread's context since the first look at it.
        result = entry.call(request)
    if result:
        entry.fail(result, grid, shared_bytes)
