# SPDX-License-Identifier: Apache-2.0
"""Medians of repeated runs, versions taken in turns so that a busy machine disturbs all alike.

What is run is not known here, and nothing is printed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SAMPLE_SECONDS = 0.005
"""A sample repeats its call until it takes about this long, far above the clock's resolution."""

_SLOW_SECONDS = 2.0
"""From here on a first call counts as a sample: what it pays for pages and caches is little."""
_ONCE_SECONDS = 15.0
"""From here on the first call is the only sample: more would take minutes and change little."""

Work = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes:
        median: Of the samples.
        spread: Half the distance from the first to the third quartile, over the median.
        samples: Their number.
    """

    median: float
    spread: float
    samples: int


def time_in_turns(
    versions: Mapping[str, Work],
    seconds: float,
    least: int = 3,
    most: int = 100,
    device: torch.device | None = None,
) -> dict[str, Timing]:
    """Time each version, one sample of each in turn.

    On a GPU a sample is a queue of calls, from an idle device to an idle device: the larger of
    what the host and what the device takes for one.

    Args:
        versions: The work by name.
        seconds: Stop after about this long, all versions together.
        least, most: Samples of each version; a very slow one has only one.
        device: Where the work runs, None for the CPU.
    """
    wait = _wait_for(device)
    start = time.perf_counter()
    first = {name: _sample(work, 1, wait) for name, work in versions.items()}
    samples = {name: [took] if took > _SLOW_SECONDS else [] for name, took in first.items()}
    calls = {
        name: 1 if samples[name] else _calls_in_a_sample(work, wait)
        for name, work in versions.items()
    }
    repeated = [name for name, took in first.items() if took <= _ONCE_SECONDS]
    for turn in range(most if repeated else 0):
        if turn >= least and time.perf_counter() - start > seconds:
            break
        for name in repeated:
            samples[name].append(_sample(versions[name], calls[name], wait))
    return {name: summarise(values) for name, values in samples.items()}


def summarise(samples: list[float]) -> Timing:
    """Median and spread of at least one sample."""
    median = statistics.median(samples)
    if len(samples) < 2:
        return Timing(median, 0.0, len(samples))
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, (high - low) / 2 / median if median else 0.0, len(samples))


def _wait_for(device: torch.device | None) -> Work:
    """What returns when the device has done all its work."""
    if device is None or device.type != "cuda":
        return lambda: None
    from torch.cuda import synchronize

    return lambda: synchronize(device)


def _calls_in_a_sample(work: Work, wait: Work) -> int:
    return max(1, round(_SAMPLE_SECONDS / max(_sample(work, 1, wait), 1e-7)))


def _sample(work: Work, calls: int, wait: Work) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    wait()
    return (time.perf_counter() - start) / calls
