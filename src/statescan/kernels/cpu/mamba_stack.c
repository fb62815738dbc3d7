/* SPDX-License-Identifier: Apache-2.0 */
/* One decode step of all layers of a Mamba-1 language model, for a few rows.
 *
 *     for each layer: residual += mixer(norm(residual))        out = final norm(residual)
 *
 * with RMS norms. Each mixer is a call of mamba_step on the pool's threads; what lies between two
 * of them, d_model numbers a row, is done by the calling thread. Residual, norms and what passes
 * between layers are float32. Workspace, after that of the mixers: residual, normed and mixed, each
 * (batch, d_model). */
#include "kernels.h"
#include "matvec.h"

/* Addresses of a layer: its norm's weight, then mamba_step's own without hidden and out. */
#define LAYER_ADDRESSES 14

/* target[i] = source[i] weight[i] / sqrt(mean of source^2 + eps), i up to count */
static void rms_norm(float *target, const float *source, const struct statescan_tensor *weight,
                     int64_t count, float eps) {
    vec squares = vec_all(0.0f);
    int64_t i = 0;
    for (; i + VEC_LANES <= count; i += VEC_LANES) {
        const vec value = vec_load(source + i);
        squares = value * value + squares;
    }
    float sum = vec_sum(squares);
    for (; i < count; i++) {
        sum += source[i] * source[i];
    }
    const float scale = 1.0f / root(sum / (float)count + eps);
    const struct tile_view view = tile_view_of(weight, 0);
    for (i = 0; i < count; i++) {
        target[i] = source[i] * scale * load_one(tile_address(&view, i, 0), view.dtype);
    }
}

static void norm_rows(float *target, const float *source, const struct statescan_tensor *norm,
                      void *weight, const struct statescan_mamba_stack *p) {
    struct statescan_tensor tensor = {weight, 0, norm->channel_stride, 0, norm->dtype};
    const int64_t width = p->step.d_model;
    for (int64_t b = 0; b < p->step.batch; b++) {
        rms_norm(target + b * width, source + b * width, &tensor, width, *p->eps);
    }
}

void AT_LEVEL(mamba_stack)(const struct statescan_mamba_stack *form, void *const *addresses) {
    struct statescan_mamba_stack p;
    copy_words(&p, form, sizeof(p));
    p.hidden.data = addresses[0];
    p.out.data = addresses[1];
    const int64_t width = p.step.d_model, count = p.step.batch * width;
    float *residual = (float *)p.workspace, *normed = residual + count, *mixed = normed + count;
    load_matrix(residual, width, &p.hidden, p.step.batch, width);
    for (int64_t layer = 0; layer < p.num_layers; layer++) {
        void *const *own = addresses + 3 + layer * LAYER_ADDRESSES;
        void *step_addresses[LAYER_ADDRESSES + 1] = {normed, mixed};
        for (int i = 1; i < LAYER_ADDRESSES; i++) {
            step_addresses[i + 1] = own[i];
        }
        norm_rows(normed, residual, &p.norm, own[0], &p);
        AT_LEVEL(mamba_step)(&p.step, step_addresses);
        for (int64_t i = 0; i < count; i++) {
            residual[i] += mixed[i];
        }
    }
    norm_rows(normed, residual, &p.final_norm, addresses[2], &p);
    store_matrix(&p.out, normed, width, p.step.batch, 0, width);
}
