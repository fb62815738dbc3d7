# SPDX-License-Identifier: Apache-2.0
"""The truth for numerics: every op once more in plain torch, to be read against its formula.

Nothing here is optimised or chooses a backend; speed belongs in `statescan.backends`.
"""

from statescan.reference.causal_conv1d import causal_conv1d_ref
from statescan.reference.causal_conv1d_update import causal_conv1d_update_ref
from statescan.reference.mamba_inner import mamba_inner_ref
from statescan.reference.selective_scan import selective_scan_ref
from statescan.reference.selective_state_update import selective_state_update_ref

__all__ = [
    "causal_conv1d_ref",
    "causal_conv1d_update_ref",
    "mamba_inner_ref",
    "selective_scan_ref",
    "selective_state_update_ref",
]
