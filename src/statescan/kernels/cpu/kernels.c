/* SPDX-License-Identifier: Apache-2.0 */
/* The table of one vector level; compiled once for each. */
#include "kernels.h"
#include "vec.h"

const struct statescan_kernels AT_LEVEL(kernels) = {
    .vector_bytes = VEC_BYTES,
    .selective_scan_fwd = AT_LEVEL(selective_scan_fwd),
    .selective_scan_bwd = AT_LEVEL(selective_scan_bwd),
    .causal_conv1d_fwd = AT_LEVEL(causal_conv1d_fwd),
    .causal_conv1d_bwd = AT_LEVEL(causal_conv1d_bwd),
    .selective_state_update = AT_LEVEL(selective_state_update),
    .causal_conv1d_update = AT_LEVEL(causal_conv1d_update),
    .vector_linear = AT_LEVEL(vector_linear),
    .mamba_step = AT_LEVEL(mamba_step),
    .mamba_stack = AT_LEVEL(mamba_stack),
};
