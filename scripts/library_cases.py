# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of `statescan.testing` on the cpu backend with the C library of a given folder.

For libraries built apart from the package: with a sanitizer, by another compiler, for another
processor. What a case is and how it is judged lies in `statescan.testing`; no tests here.

    PYTHONPATH=src python scripts/library_cases.py FOLDER --dtypes float32 bfloat16 --threads 2
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import statescan
from statescan.backends import native
from statescan.models import MambaConfig, MambaLM
from statescan.nn import Mamba
from statescan.ops import _plans
from statescan.testing.cases import OPS
from statescan.testing.compare import Comparison, compare
from statescan.testing.runner import run_op
from statescan.testing.tolerances import tolerance


def use_library(folder: Path) -> native.NativeLibrary:
    """Load the library of `folder`, put in front of the folders where the loader looks."""
    statescan.__path__ = [str(folder), *statescan.__path__]
    library = native.require()
    if library.path.parent != folder:
        raise SystemExit(f"{folder} has no {native.file_name()}; {library.path} was found instead")
    return library


def vector_levels(library: native.NativeLibrary) -> list[int]:
    """The levels that this processor can run; aarch64 has one."""
    own: int = library.handle.statescan_isa_level()
    return [own] if library.isa == "neon" else list(range(own + 1))


def check_op(op: str, dtype: torch.dtype) -> bool:
    """Run all cases of one op and print the verdict."""
    verdict = run_op(op, dtype, "cpu", "cpu")
    told = f"  {op} {dtype}: {verdict.num_cases} cases, {len(verdict.refused)} not offered"
    if verdict.worst is not None:
        told += f", worst error {verdict.worst.severity:.2f} of the tolerance"
    print(told if verdict.passed else f"{told}\n  FAILED: {verdict.worst_case}: {verdict.worst}")
    return verdict.passed


def check_decode(dtype: torch.dtype) -> bool:
    """Run the kernels that no case reaches, by decode steps of mixers and models, and print."""
    # Plans hold scratch memory of one vector level, and tell here which kernels were reached.
    _plans._plans.forget()
    results = [*mixer_steps(dtype), *model_steps(dtype)]
    worst = max(results, key=lambda item: item.severity)
    print(
        f"  decode steps {dtype}: {len(results)} results, "
        f"worst error {worst.severity:.2f} of the tolerance"
    )
    reached = {key[0] for key, plan in _plans._plans.found.items() if plan is not None}
    fused = {kernel for kernel in native.KERNELS if not kernel.endswith(("_fwd", "_bwd"))}
    unreached = sorted(fused - set(OPS) - reached)
    if not worst.passed:
        print(f"  FAILED: {worst}")
    if unreached:
        print(f"  FAILED: no decode step has run {', '.join(unreached)}")
    return worst.passed and not unreached


def mixer_steps(dtype: torch.dtype) -> Iterator[Comparison]:
    """Three steps of mixers of odd sizes against the same mixers in float64."""
    allowed = tolerance("mamba_inner", dtype)
    sizes = itertools.product((9, 33), (1, 20), (2, 4), (False, True), (1, 3))
    for d_model, dstate, width, bias, batch in sizes:
        mixer = Mamba(d_model, d_state=dstate, d_conv=width, bias=bias).to(dtype)
        exact = copy.deepcopy(mixer).double()
        states, exact_states = (m.allocate_inference_cache(batch) for m in (mixer, exact))
        for step in range(3):
            hidden = torch.randn(batch, 1, d_model).to(dtype)
            expected = exact.step(hidden.double(), *exact_states)[0]
            name = f"mixer {d_model} x {dstate}, width {width}, batch {batch}, step {step}"
            yield compare(name, mixer.step(hidden, *states)[0], expected, allowed)


def model_steps(dtype: torch.dtype) -> Iterator[Comparison]:
    """Three steps of models of odd sizes against the same models in float64."""
    allowed = tolerance("mamba_inner", dtype)
    for d_model, vocab_size, batch in itertools.product((9, 33), (67, 130), (1, 3)):
        model = MambaLM(MambaConfig(d_model=d_model, n_layer=2, vocab_size=vocab_size)).to(dtype)
        exact = copy.deepcopy(model).double()
        caches = [m.allocate_inference_cache(batch) for m in (model, exact)]
        for step in range(3):
            tokens = torch.randint(vocab_size, (batch, 1))
            logits, expected = (
                m(tokens, cache=cache).logits
                for m, cache in zip((model, exact), caches, strict=True)
            )
            name = f"model {d_model}, vocabulary {vocab_size}, batch {batch}, step {step}"
            yield compare(name, logits, expected, allowed)


def check_all(library: native.NativeLibrary, dtypes: list[torch.dtype], ops: list[str]) -> bool:
    """Every level, dtype and op; True if all are right."""
    right = True
    for level in vector_levels(library):
        library.handle.statescan_use_isa(level)
        print(f"{native.ISA_NAMES[level]}, {torch.get_num_threads()} threads", flush=True)
        for dtype in dtypes:
            torch.manual_seed(0)
            with torch.no_grad():
                right &= check_decode(dtype)
            for op in ops:
                right &= check_op(op, dtype)
                sys.stdout.flush()
    return right


def main() -> int:
    """Parse the command line; exit status 1 if a verdict is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help=f"folder that holds {native.file_name()}")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    library = use_library(arguments.folder.resolve())
    dtypes = [getattr(torch, name) for name in arguments.dtypes]
    return 0 if check_all(library, dtypes, arguments.ops) else 1


if __name__ == "__main__":
    raise SystemExit(main())
