/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of one vector level as a table. Each level compiles the same sources once. */
#ifndef STATESCAN_KERNELS_H
#define STATESCAN_KERNELS_H

#include "pool.h"

/* Channels of a task of the decode ops. */
#define DECODE_CHANNELS 64

/* A struct assignment would become a call of memcpy, which this library does not link to. */
static inline void copy_words(void *target, const void *source, size_t bytes) {
    /* Pointers are copied too, which a plain int64_t may not be taken for. */
    typedef int64_t __attribute__((may_alias)) word;
    for (size_t i = 0; i < bytes / sizeof(word); i++) {
        ((word *)target)[i] = ((const word *)source)[i];
    }
}

struct statescan_kernels {
    int vector_bytes;
    void (*selective_scan_fwd)(const struct statescan_selective_scan_fwd *params);
    void (*selective_scan_bwd)(const struct statescan_selective_scan_bwd *params);
    void (*causal_conv1d_fwd)(const struct statescan_causal_conv1d_fwd *params);
    void (*causal_conv1d_bwd)(const struct statescan_causal_conv1d_bwd *params);
    void (*selective_state_update)(const struct statescan_selective_state_update *form,
                                   void *const *addresses);
    void (*causal_conv1d_update)(const struct statescan_causal_conv1d_update *form,
                                 void *const *addresses);
    void (*vector_linear)(const struct statescan_vector_linear *form, void *const *addresses);
    void (*mamba_step)(const struct statescan_mamba_step *form, void *const *addresses);
    void (*mamba_stack)(const struct statescan_mamba_stack *form, void *const *addresses);
};

#define STATESCAN_JOIN_(name, level) name##_##level
#define STATESCAN_JOIN(name, level)  STATESCAN_JOIN_(name, level)

/* The name of a function at the level that this file is compiled for, such as name_avx2. */
#if defined(STATESCAN_LEVEL)
#define AT_LEVEL(name) STATESCAN_JOIN(name, STATESCAN_LEVEL)

void AT_LEVEL(selective_scan_fwd)(const struct statescan_selective_scan_fwd *params);
void AT_LEVEL(selective_scan_bwd)(const struct statescan_selective_scan_bwd *params);
void AT_LEVEL(causal_conv1d_fwd)(const struct statescan_causal_conv1d_fwd *params);
void AT_LEVEL(causal_conv1d_bwd)(const struct statescan_causal_conv1d_bwd *params);
void AT_LEVEL(selective_state_update)(const struct statescan_selective_state_update *form,
                                      void *const *addresses);
void AT_LEVEL(causal_conv1d_update)(const struct statescan_causal_conv1d_update *form,
                                    void *const *addresses);
void AT_LEVEL(vector_linear)(const struct statescan_vector_linear *form, void *const *addresses);
void AT_LEVEL(mamba_step)(const struct statescan_mamba_step *form, void *const *addresses);
void AT_LEVEL(mamba_stack)(const struct statescan_mamba_stack *form, void *const *addresses);

/* The rounds of a mixer's step for one member of a team, which mamba_stack runs for each layer. */
void AT_LEVEL(mamba_step_rounds)(struct team_member *member,
                                 const struct statescan_mamba_step *form, void *const *addresses);

/* Tasks of the two decode ops, which mamba_step runs among its own: a row and DECODE_CHANNELS
 * channels each, numbered row by row. */
void AT_LEVEL(causal_conv1d_update_task)(const void *params, int64_t number, char *scratch);
void AT_LEVEL(selective_state_update_task)(const void *params, int64_t number, char *scratch);
#endif

extern const struct statescan_kernels kernels_baseline;
#if defined(__x86_64__)
extern const struct statescan_kernels kernels_avx2;
extern const struct statescan_kernels kernels_avx512;
#endif

#endif
