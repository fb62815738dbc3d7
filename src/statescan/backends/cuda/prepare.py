# SPDX-License-Identifier: Apache-2.0
"""Loads what calls would launch, without launching: for captures, where nothing may be loaded.

Which calls, and with which tensors, is for ``statescan.prepare`` to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from statescan.backends.cuda import launch, loading


@contextmanager
def preparing() -> Iterator[None]:
    """In this block and thread, launches load their code and nothing else happens.

    At its end every instance that lies in the same files is loaded too, since another size or
    alignment may select another one and they are there at no cost. Where code is compiled on this
    machine, only what was asked for is.
    """
    with loading.only_loading() as asked_for:
        yield
    for stem, index in sorted(asked_for):
        with torch.cuda.device(torch.device("cuda", index)):
            loading.make_context_current(index)
            loading.load_siblings(stem, index, launch.current_stream(index))
