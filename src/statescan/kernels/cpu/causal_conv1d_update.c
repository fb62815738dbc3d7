/* SPDX-License-Identifier: Apache-2.0 */
/* One or a few new tokens of the causal convolution, states in place.
 *
 * Work: a task is a row and up to 64 channels, VEC_LANES at a time. The state's columns and the new
 * tokens stand behind each other as rows of one tile (lane = channel), so a result is a sum over
 * neighbouring rows and a new state is a window of rows. A row of the batch reads all that it
 * needs of a channel before it writes. Scratch: state_len + num_tokens + 2 width tile rows. */
#include "decode.h"
#include "kernels.h"
#include "tile.h"

#define TASK_CHANNELS DECODE_CHANNELS

struct step {
    const struct statescan_causal_conv1d_update *p;
    int64_t row;
    struct row_slots slots;
    float *weight; /* [width][VEC_LANES], and so the others: columns, tokens, inputs before them */
    float *columns;
    float *tokens;
    float *before;
};

static struct tile_view kept_view(const struct step *step, int64_t token) {
    struct tile_view view = tile_view_of(&step->p->kept, step->row);
    view.data += token * step->p->kept_stride * dtype_bytes(view.dtype);
    return view;
}

static struct tile_span span_of(int64_t channel, int lanes, int64_t steps) {
    return (struct tile_span){channel, lanes, 0, (int)steps, 0};
}

/* The row of a tile that the input `age` tokens after the first new one lies in; ages below 0 are
 * in the state. */
static const float *input_at(const struct step *step, int64_t age) {
    return (age < 0 ? step->before + (step->p->width - 1 + age) * VEC_LANES
                    : step->tokens + age * VEC_LANES);
}

/* The column of a ring where its token number `number` lies. */
static int64_t ring_column(int64_t number, int64_t state_len) {
    const int64_t column = number % state_len;
    return column < 0 ? column + state_len : column;
}

static void load_window(const struct step *step, int64_t channel, int lanes) {
    const struct statescan_causal_conv1d_update *p = step->p;
    const int64_t halo = p->width - 1;
    struct tile_view state = tile_view_of(&p->start, step->slots.read);
    if (step->slots.accepted > 0) {
        state = kept_view(step, step->slots.accepted - 1);
    }
    const struct tile_view x = tile_view_of(&p->x, step->row);
    const struct tile_span columns = span_of(channel, lanes, p->state_len);
    const struct tile_span tokens = span_of(channel, lanes, p->num_tokens);
    tile_load(step->columns, &state, &columns);
    tile_load(step->tokens, &x, &tokens);
    for (int64_t i = 0; i < halo; i++) {
        int64_t column = p->state_len - halo + i;
        if (p->positions != NULL) {
            column = ring_column(p->positions[step->row] - halo + i, p->state_len);
        }
        vec_store(step->before + i * VEC_LANES, vec_load(step->columns + column * VEC_LANES));
    }
}

static void store_results(const struct step *step, int64_t channel, int lanes) {
    const struct statescan_causal_conv1d_update *p = step->p;
    const struct tile_view out = tile_view_of(&p->out, step->row);
    const struct tile_view bias_view = tile_view_of(&p->bias, 0);
    float bias[VEC_LANES] = {0};
    if (p->bias.data != NULL) {
        const struct tile_span one = span_of(channel, lanes, 1);
        tile_load(bias, &bias_view, &one);
    }
    for (int64_t token = 0; token < p->num_tokens; token++) {
        vec sum = vec_load(bias);
        for (int64_t tap = 0; tap < p->width; tap++) {
            const vec input = vec_load(input_at(step, token - (p->width - 1) + tap));
            sum = input * vec_load(step->weight + tap * VEC_LANES) + sum;
        }
        float result[VEC_LANES];
        vec_store(result, p->silu ? sum * vec_sigmoid(sum) : sum);
        const struct tile_span here = {channel, lanes, token, 1, 0};
        tile_store(result, &out, &here);
    }
}

/* The state after `count` tokens, whose last one has just been put into a ring by the caller. */
static void store_state(const struct step *step, const struct tile_view *target, int64_t channel,
                        int lanes, int64_t count) {
    const struct statescan_causal_conv1d_update *p = step->p;
    const struct tile_span columns = span_of(channel, lanes, p->state_len);
    /* Without a ring the tokens follow the columns in memory, so a later state begins later. */
    const int64_t first = p->positions == NULL ? count : 0;
    tile_store(step->columns + first * VEC_LANES, target, &columns);
}

static void store_states(const struct step *step, int64_t channel, int lanes) {
    const struct statescan_causal_conv1d_update *p = step->p;
    const struct tile_view pool = tile_view_of(&p->state, step->slots.write);
    const int speculative = p->slots.accepted != NULL;
    if (speculative) {
        store_state(step, &pool, channel, lanes, 0);
    }
    for (int64_t token = 0; token < p->num_tokens; token++) {
        if (p->positions != NULL) {
            const int64_t column = ring_column(p->positions[step->row] + token, p->state_len);
            vec_store(step->columns + column * VEC_LANES,
                      vec_load(step->tokens + token * VEC_LANES));
        }
        if (p->kept.data != NULL) {
            const struct tile_view kept = kept_view(step, token);
            store_state(step, &kept, channel, lanes, token + 1);
        }
    }
    if (!speculative) {
        store_state(step, &pool, channel, lanes, p->num_tokens);
    }
}

static void write_zeros(const struct step *step, int64_t first, int64_t end) {
    const struct tile_view out = tile_view_of(&step->p->out, step->row);
    float zeros[VEC_LANES] = {0};
    for (int64_t channel = first; channel < end; channel += VEC_LANES) {
        const int lanes = (int)smaller(end - channel, VEC_LANES);
        for (int64_t token = 0; token < step->p->num_tokens; token++) {
            const struct tile_span here = {channel, lanes, token, 1, 0};
            tile_store(zeros, &out, &here);
        }
    }
}

static int64_t tasks_per_row(const struct statescan_causal_conv1d_update *p) {
    return divide_up(p->dim, TASK_CHANNELS);
}

void AT_LEVEL(causal_conv1d_update_task)(const void *params, int64_t number, char *scratch) {
    const struct statescan_causal_conv1d_update *p = params;
    struct step step = {.p = p, .row = number / tasks_per_row(p)};
    step.slots = slots_of(&p->slots, step.row);
    step.weight = (float *)scratch;
    step.before = step.weight + p->width * VEC_LANES;
    step.columns = step.before + p->width * VEC_LANES;
    step.tokens = step.columns + p->state_len * VEC_LANES;
    const int64_t first = number % tasks_per_row(p) * TASK_CHANNELS;
    const int64_t end = smaller(first + TASK_CHANNELS, p->dim);
    if (step.slots.padding) {
        write_zeros(&step, first, end);
        return;
    }
    const struct tile_view weight = tile_view_of(&p->weight, 0);
    for (int64_t channel = first; channel < end; channel += VEC_LANES) {
        const int lanes = (int)smaller(end - channel, VEC_LANES);
        const struct tile_span taps = span_of(channel, lanes, p->width);
        tile_load(step.weight, &weight, &taps);
        load_window(&step, channel, lanes);
        store_results(&step, channel, lanes);
        store_states(&step, channel, lanes);
    }
}

void AT_LEVEL(causal_conv1d_update)(const struct statescan_causal_conv1d_update *form,
                                    void *const *addresses) {
    struct statescan_causal_conv1d_update p;
    copy_words(&p, form, sizeof(p));
    struct statescan_tensor *tensors[] = {&p.x,    &p.out,    &p.state, &p.start,
                                          &p.kept, &p.weight, &p.bias};
    for (int i = 0; i < 7; i++) {
        tensors[i]->data = addresses[i];
    }
    if (p.batch * p.dim * (p.state_len + p.num_tokens) <= DECODE_SERIAL) {
        p.workers.count = 1;
    }
    pool_run(&p.workers, AT_LEVEL(causal_conv1d_update_task), &p, p.batch * tasks_per_row(&p));
}
