# SPDX-License-Identifier: Apache-2.0
"""Times the torch backend of selective_scan against the naive algorithm, in one run.

Also the growth of memory in a fresh process and the cost against seqlen. Backends with kernels
are measured elsewhere.

    python benchmarks/scan_torch.py                      both, forward, and forward + backward
    python benchmarks/scan_torch.py --no-naive-backward  without the part that takes a minute
    python benchmarks/scan_torch.py memory               growth of memory over the data
    python benchmarks/scan_torch.py scaling              time a token from seqlen 1024 to 262144

The naive algorithm materialises exp(dt A) and dt B x as (batch, dim, seqlen, dstate), then walks
time one step after the other, under autograd. Its results are compared with the backend's before
anything is timed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from statescan import selective_scan

Inputs = dict[str, Tensor]


def make_inputs(batch: int, dim: int, seqlen: int, dstate: int, grad: bool = False) -> Inputs:
    """Random inputs in the ranges of a trained model."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    inputs = {
        "x": normal(batch, dim, seqlen),
        "dt": normal(batch, dim, seqlen).mul_(0.5).sub_(2),
        "A": -8 * torch.rand((dim, dstate), generator=generator),
        "B": normal(batch, dstate, seqlen),
        "C": normal(batch, dstate, seqlen),
        "D": normal(dim),
        "z": normal(batch, dim, seqlen),
        "dt_bias": normal(dim).mul_(0.1),
    }
    return {name: tensor.requires_grad_(grad) for name, tensor in inputs.items()}


def naive(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, dt_bias: Tensor
) -> Tensor:
    """The algorithm that everybody writes first."""
    dt = F.softplus(dt + dt_bias[:, None])
    decay = torch.exp(torch.einsum("bdl,dn->bdln", dt, A))
    inject = torch.einsum("bdl,bnl,bdl->bdln", dt, B, x)
    state = x.new_zeros(decay[:, :, 0].shape)
    outputs = []
    for t in range(x.shape[2]):
        state = decay[:, :, t] * state + inject[:, :, t]
        outputs.append(torch.einsum("bdn,bn->bd", state, C[:, :, t]))
    return (torch.stack(outputs, dim=2) + D[:, None] * x) * F.silu(z)


def backend(**inputs: Tensor) -> Tensor:
    """The op, on the torch backend."""
    out = selective_scan(**inputs, dt_softplus=True, backend="torch")
    assert isinstance(out, Tensor)
    return out


def backward(function: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
    """Forward and all gradients of the sum."""
    return torch.autograd.grad(function(**inputs).sum(), list(inputs.values()))


def timed(repeats: int, *runs: Callable[[], object]) -> list[list[float]]:
    """Milliseconds of each repetition of each run, turn by turn, after one turn more.

    With one thread it is the time of the processor, which other load disturbs less.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 1 if repeats > 1 else 1):
        for run, found in zip(runs, times, strict=True):
            start = clock()
            run()
            if turn > 0 or repeats == 1:
                found.append(1e3 * (clock() - start))
    return times


def difference(result: Tensor, expected: Tensor) -> float:
    """Largest difference in units of the largest value."""
    return float((result - expected).abs().max() / expected.abs().max())


def report(**row: object) -> None:
    """One JSON line with what the numbers depend on."""
    environment = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(row | environment))


def compare(shape: tuple[int, int, int, int], repeats: int, naive_backward: bool) -> None:
    """Forward, then forward + backward, of both."""
    inputs = make_inputs(*shape)
    with torch.no_grad():
        error = difference(backend(**inputs), naive(**inputs))
        if not error < 1e-5:
            raise SystemExit(f"outputs differ by {error:.1e}: nothing was timed")
        ours, theirs = timed(repeats, partial(backend, **inputs), partial(naive, **inputs))
    _report_pair("forward", shape, ours, theirs, error)
    leaves = make_inputs(*shape, grad=True)
    (ours,) = timed(repeats, partial(backward, backend, leaves))
    error = float("nan")
    theirs = [float("nan")]
    if naive_backward:
        gradients: list[tuple[Tensor, ...]] = []
        (theirs,) = timed(1, lambda: gradients.append(backward(naive, leaves)))
        found = backward(backend, leaves)
        error = max(difference(*pair) for pair in zip(found, gradients[0], strict=True))
    _report_pair("forward+backward", shape, ours, theirs, error)


def _report_pair(
    direction: str,
    shape: tuple[int, ...],
    ours: list[float],
    theirs: list[float],
    error: float,
) -> None:
    report(
        direction=direction,
        shape=shape,
        torch_backend_ms=round(statistics.median(ours), 1),
        best_ms=round(min(ours), 1),
        naive_ms=round(statistics.median(theirs), 1),
        naive_best_ms=round(min(theirs), 1),
        ratio=round(statistics.median(theirs) / statistics.median(ours), 1),
        difference=error,
    )


def memory(shape: tuple[int, int, int, int]) -> None:
    """Growth of the process over forward and backward, against inputs, outputs and gradients."""
    # A small run first, so that neither torch's own start nor threads count.
    backward(backend, make_inputs(1, 8, 8, 4, grad=True))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    leaves = make_inputs(*shape, grad=True)
    out = backend(**leaves)
    gradients = torch.autograd.grad(out.sum(), list(leaves.values()))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    tensors = [*leaves.values(), out, *gradients]
    data = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    states = shape[0] * shape[1] * shape[2] * shape[3] * 4
    report(
        shape=shape,
        grown_mib=round(grown / 2**20),
        data_mib=round(data / 2**20),
        all_states_mib=round(states / 2**20),
        ratio=round(grown / data, 2),
    )


def scaling(dim: int, dstate: int) -> None:
    """Nanoseconds a state and token, over seqlen."""
    for seqlen in (1024, 4096, 16384, 65536, 262144):
        leaves = make_inputs(1, dim, seqlen, dstate, grad=True)
        repeats = max(1, 16384 // seqlen)
        with torch.no_grad():
            forward_ms = min(timed(repeats, partial(backend, **leaves))[0])
        both_ms = min(timed(repeats, partial(backward, backend, leaves))[0])
        per_state = 1e6 / (dim * seqlen * dstate)
        report(
            shape=(1, dim, seqlen, dstate),
            forward_ns=round(forward_ms * per_state, 2),
            forward_backward_ns=round(both_ms * per_state, 2),
        )


def main() -> None:
    """Parse the command line and run one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "part", nargs="?", default="compare", choices=["compare", "memory", "scaling"]
    )
    for name, default in (("batch", 1), ("dim", None), ("seqlen", None), ("dstate", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-naive-backward", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dim = args.dim or (64 if args.part == "scaling" else 1536)
    seqlen = args.seqlen or (8192 if args.part == "memory" else 512)
    shape = (args.batch, dim, seqlen, args.dstate)
    if args.part == "memory":
        memory(shape)
    elif args.part == "scaling":
        scaling(dim, args.dstate)
    else:
        compare(shape, args.repeats, not args.no_naive_backward)


if __name__ == "__main__":
    main()
