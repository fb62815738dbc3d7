# SPDX-License-Identifier: Apache-2.0
"""The public functions; importing this package registers them with torch.library.

Each op has a file of its own: signature, docstring and checks. No arithmetic here.
"""

from statescan.ops._explain import explain
from statescan.ops._flops import register_flop_formulas
from statescan.ops._prepare import prepare
from statescan.ops.causal_conv1d import causal_conv1d
from statescan.ops.causal_conv1d_update import causal_conv1d_update
from statescan.ops.mamba_inner import mamba_inner
from statescan.ops.selective_scan import selective_scan
from statescan.ops.selective_state_update import selective_state_update

__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "explain",
    "mamba_inner",
    "prepare",
    "selective_scan",
    "selective_state_update",
]

register_flop_formulas()
