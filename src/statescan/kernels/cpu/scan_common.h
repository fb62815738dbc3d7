/* SPDX-License-Identifier: Apache-2.0 */
/* What both directions of the selective scan share: blocks of channels, states, B and C.
 *
 * Channels that share B and C form a unit; a block is up to VEC_LANES neighbours within one. */
#ifndef STATESCAN_SCAN_COMMON_H
#define STATESCAN_SCAN_COMMON_H

#include "sequences.h"

#define TILE_FLOATS (TILE_STEPS * VEC_LANES)

/* B or C as one block and stretch sees it. Constant: [dstate][VEC_LANES]. Per token: one number for
 * all lanes at data[step * step_stride + state]. */
struct block_weights {
    const float *data;
    int64_t step_stride;
    int constant;
};

VEC_INLINE vec weight_at(const struct block_weights *weights, int64_t step, int64_t state) {
    if (weights->constant) {
        return vec_load(weights->data + state * VEC_LANES);
    }
    return vec_all(weights->data[step * weights->step_stride + state]);
}

/* [state][lane] from (dim, dstate) rows; the lanes without a channel become 0. */
static inline void load_states(float *target, const float *source, int64_t dstate, int lanes) {
    for (int64_t state = 0; state < dstate; state++) {
        for (int lane = 0; lane < VEC_LANES; lane++) {
            target[state * VEC_LANES + lane] = lane < lanes ? source[lane * dstate + state] : 0.0f;
        }
    }
}

/* The decay rates of a block from A. */
static inline void load_rates(float *target, const float *A, int64_t dstate, int lanes) {
    load_states(target, A, dstate, lanes);
    for (int64_t state = 0; state < dstate; state++) {
        float *row = target + state * VEC_LANES;
        vec_store(row, vec_rate(vec_load(row)));
    }
}

static inline void store_states(float *target, const float *source, int64_t dstate, int lanes) {
    for (int lane = 0; lane < lanes; lane++) {
        for (int64_t state = 0; state < dstate; state++) {
            target[lane * dstate + state] = source[state * VEC_LANES + lane];
        }
    }
}

VEC_INLINE void fill(float *target, int64_t count, float value) {
    for (int64_t i = 0; i < count; i++) {
        target[i] = value;
    }
}

/* B or C for a stretch. `constant` is the block's [dstate][VEC_LANES] if the weights are constant.
 */
VEC_INLINE struct block_weights stretch_weights(const struct statescan_weights *weights,
                                                const float *constant, int64_t row, int64_t channel,
                                                int64_t dim, const struct tile_span *span) {
    if (weights->ngroups == 0) {
        return (struct block_weights){constant, 0, 1};
    }
    const int64_t group = channel / (dim / weights->ngroups);
    const int64_t token = span->reverse ? span->token + span->steps - 1 : span->token;
    const float *data = weights->data + row * weights->batch_stride +
                        group * weights->group_stride + token * weights->token_stride;
    const int64_t stride = span->reverse ? -weights->token_stride : weights->token_stride;
    return (struct block_weights){data, stride, 0};
}

/* dt from its raw tile, in place: bias, then softplus. */
VEC_INLINE void finish_dt(float *dt, vec bias, int steps, int softplus) {
    for (int step = 0; step < steps; step++) {
        const vec value = vec_load(dt + step * VEC_LANES) + bias;
        vec_store(dt + step * VEC_LANES, softplus ? vec_softplus(value) : value);
    }
}

#endif
