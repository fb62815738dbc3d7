/* SPDX-License-Identifier: Apache-2.0 */
/* One decode step of all layers of a Mamba-1 language model, for a few rows.
 *
 *     for each layer: residual += mixer(norm(residual))        out = final norm(residual)
 *
 * with RMS norms. One team of threads runs the rounds of all mixers; what lies between two of them,
 * d_model numbers a row, is a round of one task. Residual, norms and what passes between layers are
 * float32. Workspace, after that of the mixers: residual, normed and mixed, each
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

struct stack {
    struct statescan_mamba_stack p;
    void *const *addresses;
    float *residual, *normed, *mixed;
};

struct layer {
    const struct stack *stack;
    int64_t number;
};

/* Addresses of a layer, or of the final norm after the last one. */
static void *const *addresses_of(const struct layer *layer) {
    if (layer->number == layer->stack->p.num_layers) {
        return layer->stack->addresses + 2;
    }
    return layer->stack->addresses + 3 + layer->number * LAYER_ADDRESSES;
}

/* What lies between two mixers: the last one's result joins the residual, which is normed. */
static void run_norm(const void *params, int64_t number, char *scratch) {
    const struct layer *layer = params;
    const struct stack *stack = layer->stack;
    const struct statescan_mamba_stack *p = &stack->p;
    const int64_t width = p->step.d_model, count = p->step.batch * width;
    const int is_last = layer->number == p->num_layers;
    (void)number;
    (void)scratch;
    if (layer->number == 0) {
        load_matrix(stack->residual, width, &p->hidden, p->step.batch, width);
    } else {
        for (int64_t i = 0; i < count; i++) {
            stack->residual[i] += stack->mixed[i];
        }
    }
    norm_rows(stack->normed, stack->residual, is_last ? &p->final_norm : &p->norm,
              addresses_of(layer)[0], p);
    if (is_last) {
        store_matrix(&p->out, stack->normed, width, p->step.batch, 0, width);
    }
}

static void run_script(struct team_member *member, const void *params) {
    const struct stack *stack = params;
    struct layer layer = {stack, 0};
    for (; layer.number < stack->p.num_layers; layer.number++) {
        void *const *own = addresses_of(&layer);
        void *step_addresses[LAYER_ADDRESSES + 1] = {stack->normed, stack->mixed};
        for (int i = 1; i < LAYER_ADDRESSES; i++) {
            step_addresses[i + 1] = own[i];
        }
        team_round(member, run_norm, &layer, 1);
        AT_LEVEL(mamba_step_rounds)(member, &stack->p.step, step_addresses);
    }
    team_round(member, run_norm, &layer, 1);
}

void AT_LEVEL(mamba_stack)(const struct statescan_mamba_stack *form, void *const *addresses) {
    struct stack stack;
    copy_words(&stack.p, form, sizeof(stack.p));
    stack.p.hidden.data = addresses[0];
    stack.p.out.data = addresses[1];
    const int64_t count = form->step.batch * form->step.d_model;
    stack.addresses = addresses;
    stack.residual = (float *)form->workspace;
    stack.normed = stack.residual + count;
    stack.mixed = stack.normed + count;
    team_run(&form->step.workers, run_script, &stack);
}
