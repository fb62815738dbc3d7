/* SPDX-License-Identifier: Apache-2.0 */
/* The exported kernels: each call goes to the table of the vector level in use. */
#include "kernels.h"

static const struct statescan_kernels *kernels_of(int level) {
#if defined(__x86_64__)
    if (level == STATESCAN_ISA_AVX512) {
        return &kernels_avx512;
    }
    if (level == STATESCAN_ISA_AVX2) {
        return &kernels_avx2;
    }
#endif
    (void)level;
    return &kernels_baseline;
}

static const struct statescan_kernels *chosen;

static const struct statescan_kernels *kernels(void) {
    if (chosen == NULL) {
        chosen = kernels_of(statescan_isa_level());
    }
    return chosen;
}

int statescan_use_isa(int level) {
    const int own = statescan_isa_level();
    const int exists = level == own || level == STATESCAN_ISA_BASELINE ||
                       (level < own && own != STATESCAN_ISA_NEON);
    if (level < 0 || !exists) {
        level = own;
    }
    chosen = kernels_of(level);
    return level;
}

int statescan_vector_bytes(void) {
    return kernels()->vector_bytes;
}

void statescan_selective_scan_fwd(const struct statescan_selective_scan_fwd *params) {
    kernels()->selective_scan_fwd(params);
}

void statescan_selective_scan_bwd(const struct statescan_selective_scan_bwd *params) {
    kernels()->selective_scan_bwd(params);
}

void statescan_causal_conv1d_fwd(const struct statescan_causal_conv1d_fwd *params) {
    kernels()->causal_conv1d_fwd(params);
}

void statescan_causal_conv1d_bwd(const struct statescan_causal_conv1d_bwd *params) {
    kernels()->causal_conv1d_bwd(params);
}

void statescan_selective_state_update(const struct statescan_selective_state_update *form,
                                      void *const *addresses) {
    kernels()->selective_state_update(form, addresses);
}

void statescan_causal_conv1d_update(const struct statescan_causal_conv1d_update *form,
                                    void *const *addresses) {
    kernels()->causal_conv1d_update(form, addresses);
}

void statescan_vector_linear(const struct statescan_vector_linear *form, void *const *addresses) {
    kernels()->vector_linear(form, addresses);
}

void statescan_mamba_step(const struct statescan_mamba_step *form, void *const *addresses) {
    kernels()->mamba_step(form, addresses);
}

void statescan_mamba_stack(const struct statescan_mamba_stack *form, void *const *addresses) {
    kernels()->mamba_stack(form, addresses);
}
