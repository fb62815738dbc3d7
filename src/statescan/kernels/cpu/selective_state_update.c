/* SPDX-License-Identifier: Apache-2.0 */
/* One or a few decode steps of the SSM state, in place, Mamba-1 and headed form alike.
 *
 * Work: a task is a row, a head and up to 64 of its channels. Lane = state, so a state is read and
 * written in the order in which it lies; the sums over states wait as one vector a channel and are
 * reduced for all channels together. Step sizes and gates are taken with lane = channel.
 * Everything is float32 inside and stays so between tokens. Scratch: states and rates of the
 * task's channels, dstate padded with zeros to whole vectors, and a few rows. */
#include "decode.h"
#include "kernels.h"
#include "tile.h"

#define TASK_CHANNELS DECODE_CHANNELS

struct step {
    const struct statescan_selective_state_update *p;
    int64_t row, head, first;
    int channels;
    int64_t padded; /* dstate in whole vectors */
    struct row_slots slots;
    float *state, *rate;       /* [channels][padded] */
    float *B, *C;              /* [padded] */
    float *sums;               /* [channels][VEC_LANES] */
    float *x, *dt, *y, *spare; /* [TASK_CHANNELS] */
};

/* Address of (row, token, head, channel, state 0). */
static char *at(const struct statescan_states *t, int64_t row, int64_t token, int64_t head,
                int64_t channel) {
    return (char *)t->data + (row * t->row_stride + token * t->token_stride +
                              head * t->head_stride + channel * t->channel_stride) *
                                 dtype_bytes(t->dtype);
}

/* `count` numbers that lie `stride` apart. */
static void load_row(float *target, const char *source, int64_t stride, int64_t dtype,
                     int64_t count) {
    int64_t i = 0;
    if (stride == 1) {
        for (; i + VEC_LANES <= count; i += VEC_LANES) {
            vec_store(target + i, load_dense(source + i * dtype_bytes(dtype), dtype));
        }
    }
    for (; i < count; i++) {
        target[i] = load_one(source + i * stride * dtype_bytes(dtype), dtype);
    }
}

static void store_row(char *target, const float *source, int64_t stride, int64_t dtype,
                      int64_t count) {
    int64_t i = 0;
    if (stride == 1) {
        for (; i + VEC_LANES <= count; i += VEC_LANES) {
            store_dense(target + i * dtype_bytes(dtype), dtype, vec_load(source + i));
        }
    }
    for (; i < count; i++) {
        store_one(target + i * stride * dtype_bytes(dtype), dtype, source[i]);
    }
}

/* One number for each channel of the task. */
static void load_channels(const struct step *step, float *target, const struct statescan_states *t,
                          int64_t token) {
    load_row(target, at(t, step->row, token, step->head, step->first), t->channel_stride, t->dtype,
             step->channels);
}

/* [channels][padded] from a table of states; what is beyond dstate becomes 0. */
static void load_table(const struct step *step, float *target, const struct statescan_states *t,
                       int64_t row, int64_t token) {
    for (int channel = 0; channel < step->channels; channel++) {
        float *line = target + channel * step->padded;
        load_row(line, at(t, row, token, step->head, step->first + channel), t->state_stride,
                 t->dtype, step->p->dstate);
        for (int64_t state = step->p->dstate; state < step->padded; state++) {
            line[state] = 0.0f;
        }
    }
}

static void store_table(const struct step *step, const struct statescan_states *t, int64_t row,
                        int64_t token) {
    for (int channel = 0; channel < step->channels; channel++) {
        store_row(at(t, row, token, step->head, step->first + channel),
                  step->state + channel * step->padded, t->state_stride, t->dtype, step->p->dstate);
    }
}

static void load_group(const struct step *step, float *target, const struct statescan_states *t,
                       int64_t token, int64_t heads) {
    load_row(target, at(t, step->row, token, step->head / heads, 0), t->state_stride, t->dtype,
             step->p->dstate);
    for (int64_t state = step->p->dstate; state < step->padded; state++) {
        target[state] = 0.0f;
    }
}

/* dt with bias and softplus, lane = channel; works on whole vectors of the padded row. */
static void load_step_size(const struct step *step, int64_t token) {
    const struct statescan_selective_state_update *p = step->p;
    load_channels(step, step->dt, &p->dt, token);
    if (p->dt_bias.data != NULL) {
        load_channels(step, step->spare, &p->dt_bias, 0);
    }
    for (int channel = 0; channel < step->channels; channel += VEC_LANES) {
        vec dt = vec_load(step->dt + channel);
        if (p->dt_bias.data != NULL) {
            dt = dt + vec_load(step->spare + channel);
        }
        vec_store(step->dt + channel, p->dt_softplus ? vec_softplus(dt) : dt);
    }
}

static void advance(const struct step *step) {
    for (int channel = 0; channel < step->channels; channel++) {
        float *states = step->state + channel * step->padded;
        const float *rates = step->rate + channel * step->padded;
        const vec dt = vec_all(step->dt[channel]);
        const vec input = vec_all(step->dt[channel] * step->x[channel]);
        vec sum = vec_all(0.0f), part = vec_all(0.0f);
        for (int64_t state = 0; state < step->padded; state += VEC_LANES) {
            const vec entering = input * vec_load(step->B + state);
            const vec next =
                vec_exp(dt * vec_load(rates + state)) * vec_load(states + state) + entering;
            vec_store(states + state, next);
            part = next * vec_load(step->C + state) + part;
            /* In two levels: one chain over many states would add its rounding at each. */
            if (state % (8 * VEC_LANES) == 7 * VEC_LANES) {
                sum = sum + part;
                part = vec_all(0.0f);
            }
        }
        sum = sum + part;
        vec_store(step->sums + channel * VEC_LANES, sum);
    }
    vec_sum_rows(step->y, step->sums, step->channels);
}

/* Skip and gate, lane = channel, then the result. */
static void finish(const struct step *step, int64_t token) {
    const struct statescan_selective_state_update *p = step->p;
    if (p->D.data != NULL) {
        load_channels(step, step->spare, &p->D, 0);
        for (int channel = 0; channel < step->channels; channel += VEC_LANES) {
            vec_store(step->y + channel,
                      vec_load(step->spare + channel) * vec_load(step->x + channel) +
                          vec_load(step->y + channel));
        }
    }
    if (p->z.data != NULL) {
        load_channels(step, step->spare, &p->z, token);
        for (int channel = 0; channel < step->channels; channel += VEC_LANES) {
            const vec z = vec_load(step->spare + channel);
            vec_store(step->y + channel, vec_load(step->y + channel) * z * vec_sigmoid(z));
        }
    }
    store_row(at(&p->out, step->row, token, step->head, step->first), step->y,
              p->out.channel_stride, p->out.dtype, step->channels);
}

/* A in place of log(-A). */
static void exponentiate(const struct step *step) {
    const int64_t count = step->channels * step->padded;
    for (int64_t i = 0; i < count; i += VEC_LANES) {
        const vec A = vec_load(step->rate + i);
        vec_store(step->rate + i, -vec_exp(A));
    }
}

static void run_row(const struct step *step) {
    const struct statescan_selective_state_update *p = step->p;
    if (step->slots.accepted > 0) {
        load_table(step, step->state, &p->kept, step->row, step->slots.accepted - 1);
    } else {
        load_table(step, step->state, &p->start, step->slots.read, 0);
    }
    if (p->slots.accepted != NULL) {
        store_table(step, &p->state, step->slots.write, 0);
    }
    load_table(step, step->rate, &p->A, 0, 0);
    if (p->A_is_log) {
        exponentiate(step);
    }
    for (int64_t token = 0; token < p->num_tokens; token++) {
        load_group(step, step->B, &p->B, token, p->B_heads);
        load_group(step, step->C, &p->C, token, p->C_heads);
        load_channels(step, step->x, &p->x, token);
        load_step_size(step, token);
        advance(step);
        finish(step, token);
        if (p->kept.data != NULL) {
            store_table(step, &p->kept, step->row, token);
        }
    }
    if (p->slots.accepted == NULL) {
        store_table(step, &p->state, step->slots.write, 0);
    }
}

static void write_zeros(const struct step *step) {
    const struct statescan_states *out = &step->p->out;
    for (int channel = 0; channel < TASK_CHANNELS; channel++) {
        step->y[channel] = 0.0f;
    }
    for (int64_t token = 0; token < step->p->num_tokens; token++) {
        store_row(at(out, step->row, token, step->head, step->first), step->y, out->channel_stride,
                  out->dtype, step->channels);
    }
}

static int64_t tasks_per_head(const struct statescan_selective_state_update *p) {
    return divide_up(p->head_channels, TASK_CHANNELS);
}

void AT_LEVEL(selective_state_update_task)(const void *params, int64_t number, char *scratch) {
    const struct statescan_selective_state_update *p = params;
    struct step step = {.p = p};
    step.first = number % tasks_per_head(p) * TASK_CHANNELS;
    step.head = number / tasks_per_head(p) % p->num_heads;
    step.row = number / tasks_per_head(p) / p->num_heads;
    step.channels = (int)smaller(p->head_channels - step.first, TASK_CHANNELS);
    step.padded = divide_up(p->dstate, VEC_LANES) * VEC_LANES;
    step.slots = slots_of(&p->slots, step.row);

    float *memory = (float *)scratch;
    float **rows[] = {&step.x, &step.dt, &step.y, &step.spare};
    for (int i = 0; i < 4; i++, memory += TASK_CHANNELS) {
        *rows[i] = memory;
        /* Whole vectors are worked on, so the channels that a task lacks must hold numbers. */
        for (int channel = 0; channel < TASK_CHANNELS; channel++) {
            memory[channel] = 0.0f;
        }
    }
    step.sums = memory;
    step.B = step.sums + TASK_CHANNELS * VEC_LANES;
    step.C = step.B + step.padded;
    step.state = step.C + step.padded;
    step.rate = step.state + TASK_CHANNELS * step.padded;
    if (step.slots.padding) {
        write_zeros(&step);
    } else {
        run_row(&step);
    }
}

void AT_LEVEL(selective_state_update)(const struct statescan_selective_state_update *form,
                                      void *const *addresses) {
    struct statescan_selective_state_update p;
    copy_words(&p, form, sizeof(p));
    struct statescan_states *tensors[] = {&p.state, &p.start, &p.kept, &p.x, &p.dt,      &p.A,
                                          &p.B,     &p.C,     &p.D,    &p.z, &p.dt_bias, &p.out};
    for (int i = 0; i < 12; i++) {
        tensors[i]->data = addresses[i];
    }
    const int64_t work = p.batch * p.num_heads * p.head_channels * p.dstate;
    if (work * p.num_tokens <= DECODE_SERIAL) {
        p.workers.count = 1;
    }
    pool_run(&p.workers, AT_LEVEL(selective_state_update_task), &p,
             p.batch * p.num_heads * tasks_per_head(&p));
}
