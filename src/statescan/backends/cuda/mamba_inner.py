# SPDX-License-Identifier: Apache-2.0
"""The body of a Mamba-1 mixer on CUDA devices: this backend's convolution and scan, joined.

The composition is in ``backends/_mamba_inner.py``; nothing of it is repeated here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from statescan.backends._mamba_inner import Functions, Inputs, Options, compose_bwd, compose_fwd
from statescan.backends.cuda.causal_conv1d import causal_conv1d_bwd, causal_conv1d_fwd
from statescan.backends.cuda.selective_scan import selective_scan_bwd, selective_scan_fwd

_FUNCTIONS = Functions(causal_conv1d_fwd, causal_conv1d_bwd, selective_scan_fwd, selective_scan_bwd)
_NUM_TENSORS = len(Inputs._fields)


def mamba_inner_fwd(*args: Any) -> tuple[Tensor, ...]:
    """out, conv_final_states, final_states, x_dbl, chunk_states and gated.

    Args:
        args: The tensors of ``Inputs``, the options of ``Options``, save_states.
    """
    inputs, options = Inputs(*args[:_NUM_TENSORS]), Options(*args[_NUM_TENSORS:-1])
    return compose_fwd(_FUNCTIONS, inputs, options, args[-1])


def mamba_inner_bwd(*args: Any) -> tuple[Tensor, ...]:
    """Gradients of the tensors from xz to initial_states; 0 elements where one is absent.

    Args:
        args: Gradients of the 3 results, the tensors of ``Inputs``, x_dbl, chunk_states and gated,
            the options of ``Options``.
    """
    rest = args[3 + _NUM_TENSORS :]
    inputs, options = Inputs(*args[3 : 3 + _NUM_TENSORS]), Options(*rest[3:])
    return compose_bwd(_FUNCTIONS, args[:3], inputs, rest[:3], options)
