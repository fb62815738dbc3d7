# SPDX-License-Identifier: Apache-2.0
"""Times of versions taken in turns, so that a change of clock or heat reaches all alike.

On CUDA by events, with the host ahead of the device; elsewhere by the clock. Nothing is printed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from statescan.cli._timing import Timing, summarise

Work = Callable[[], object]
Versions = Mapping[str, Sequence[Work]]
"""Each version as the same call on several sets of inputs, which are taken in turn."""

SAMPLE_MS = 1.0
"""A sample repeats a shorter call until it takes about this long."""
MOST_CALLS = 50
"""Calls of a sample: a queue of launches holds about a thousand."""
SPIN_CYCLES_PER_MS = 1.9e6
"""Cycles of a GPU's clock; exact is not needed, the spin only keeps the device waiting."""
LONGEST_SPIN_MS = 50.0
HOST_CALLS = 1000


def time_in_turns(
    versions: Versions,
    device: torch.device,
    seconds: float,
    least: int = 5,
    most: int = 40,
    wall: bool = False,
) -> dict[str, Timing]:
    """Milliseconds of one call of each version.

    Args:
        versions: What to time, by name.
        device: Where it runs.
        seconds: Stop after about this long, all versions together.
        least, most: Samples of each version.
        wall: Time as a user waits, the host's part included.
    """
    clock: DeviceClock | HostClock = HostClock(device)
    if device.type == "cuda" and not wall:
        clock = DeviceClock(device)
    loops = {name: itertools.cycle(works) for name, works in versions.items()}
    for name, works in versions.items():
        clock.prepare(name, loops[name], len(works))
    samples: dict[str, list[float]] = {name: [] for name in versions}
    begin = time.perf_counter()
    for turn in range(most):
        if turn >= least and time.perf_counter() - begin > seconds:
            break
        for name, loop in loops.items():
            samples[name].append(clock.sample(name, loop))
    return {name: summarise(values) for name, values in samples.items()}


class HostClock:
    """Samples by the clock of the host, from an idle device to an idle device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: dict[str, int] = {}

    def prepare(self, name: str, works: itertools.cycle[Work], sets: int) -> None:
        """Warm a version up and choose how often a sample calls it."""
        for _ in range(sets):
            next(works)()
        self._calls[name] = 1
        took = self.sample(name, works)
        self._calls[name] = max(1, min(MOST_CALLS, round(SAMPLE_MS / max(took, 1e-3))))

    def sample(self, name: str, works: itertools.cycle[Work]) -> float:
        """Milliseconds of a call."""
        _wait(self._device)
        begin = time.perf_counter()
        for _ in range(self._calls[name]):
            next(works)()
        _wait(self._device)
        return 1e3 * (time.perf_counter() - begin) / self._calls[name]


class DeviceClock:
    """Samples by CUDA events.

    Before the first event the device spins until the host has queued the whole sample; without
    that a call whose launch takes longer than its kernels would be timed on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: dict[str, int] = {}
        self._spin: dict[str, int] = {}

    def prepare(self, name: str, works: itertools.cycle[Work], sets: int) -> None:
        """Warm a version up and choose its calls and its spin."""
        for _ in range(max(2, sets)):
            next(works)()
        torch.cuda.synchronize(self._device)
        begin = time.perf_counter()
        for _ in range(3):
            next(works)()
        host_ms = 1e3 * (time.perf_counter() - begin) / 3
        torch.cuda.synchronize(self._device)
        self._calls[name], self._spin[name] = 1, _cycles(host_ms)
        took = min(self.sample(name, works) for _ in range(2))
        self._calls[name] = max(1, min(MOST_CALLS, round(SAMPLE_MS / max(took, 1e-3))))
        self._spin[name] = _cycles(host_ms * self._calls[name])

    def sample(self, name: str, works: itertools.cycle[Work]) -> float:
        """Milliseconds of a call on the device."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(self._spin[name])
        start.record()
        for _ in range(self._calls[name]):
            next(works)()
        end.record()
        torch.cuda.synchronize(self._device)
        return float(start.elapsed_time(end)) / self._calls[name]


def _cycles(host_ms: float) -> int:
    return int(min(LONGEST_SPIN_MS, 1.5 * host_ms + 0.05) * SPIN_CYCLES_PER_MS)


def host_us(versions: Versions, device: torch.device, rounds: int = 3) -> dict[str, float]:
    """Microseconds of the host for a call: back-to-back calls without waiting, least of rounds."""
    found = {name: float("inf") for name in versions}
    loops = {name: itertools.cycle(works) for name, works in versions.items()}
    for _ in range(rounds):
        for name, works in loops.items():
            _wait(device)
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                next(works)()
            found[name] = min(found[name], 1e6 * (time.perf_counter() - begin) / HOST_CALLS)
            _wait(device)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
