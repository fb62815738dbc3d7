/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of the selective scan.
 *
 * With h the states, a = exp(dt A), u = dt x, for each channel and state n:
 *
 *     g[t]  = C[t] dy[t] + w[t+1]            gradient of h[t];  w[t] = a[t] g[t]
 *     dC[t] = sum over channels of h[t] dy[t]         dB[t] = sum over channels of g[t] u[t]
 *     p[t]  = w[t] h[t-1]                    gradient of the exponent dt A
 *     dA    = sum over tokens of dt[t] p[t]
 *     dx[t] = dt[t] S + D dy[t]              S = sum over n of B[t] g[t]
 *     ddt[t] = x[t] S + sum over n of A p[t]
 *     dinitial = w[first], and dfinal enters as w after the last token.
 *
 * Work: a task is a part of the channels in a group of batch rows. It visits stretches of 64 tokens
 * from the last to the first, and in each all its blocks of VEC_LANES channels, so that dB and dC
 * of the stretch gather over the part before they are written once. Up to STATES states of a block
 * walk the stretch forward, leaving h and a in the first-level cache, then back. One exponential a
 * state and step; about 20 operations of the multiply-add units and as many loads and stores.
 *
 * Where saved states are further apart than a stretch (dstate > 16), one more walk finds the states
 * between. Sums over channels and rows have a fixed order: parts and row groups depend on
 * the shape alone, the caller adds them up. Everything is float32. */
#include "kernels.h"
#include "scan_common.h"

/* States that walk together: as many as registers hold. */
#if VEC_LANES == 16
#define STATES 4
#else
#define STATES 2
#endif

/* One block of channels, its tables [dstate][VEC_LANES] in scratch memory. */
struct block {
    int64_t channel;
    int lanes;
    float *rate; /* A log2(e) */
    float *A;    /* itself: a rounded rate turned back would add two errors to ddt */
    float *dA;   /* summed over tokens and rows, and so the next two where constant */
    float *dB, *dC;
    float *carry;  /* w of the step that comes after in time */
    float *B, *C;  /* where constant */
    float *starts; /* states before each stretch of a chunk */
    vec dD, ddt_bias;
};

struct task {
    const struct statescan_selective_scan_bwd *p;
    int64_t part, row;
    int64_t first_channel, end_channel;
    int64_t num_blocks;
    struct block *blocks;
    float *x, *dt, *inputs, *y, *dy, *gate, *sum_B, *sum_A, *slope;
    float *states, *decays; /* [step][STATES][VEC_LANES] */
    float *sums_B, *sums_C; /* dB and dC of the stretch, [step][dstate][VEC_LANES] */
};

static int64_t group_of(const struct statescan_weights *weights, int64_t dim, int64_t channel) {
    return weights->ngroups == 0 ? 0 : channel / (dim / weights->ngroups);
}

/* Tiles of a stretch that both walks need: x, dt, dt x. Keeps softplus' slope if it is wanted. */
static void load_inputs(const struct task *task, const struct tile_span *span, int with_slope) {
    const struct statescan_selective_scan_bwd *p = task->p;
    const struct tile_view x = tile_view_of(&p->x, task->row);
    const struct tile_view dt = tile_view_of(&p->dt, task->row);
    const vec bias = load_lanes(p->dt_bias ? p->dt_bias + span->channel : 0, span->lanes);
    tile_load(task->x, &x, span);
    tile_load(task->dt, &dt, span);
    if (with_slope && p->dt_softplus) {
        for (int step = 0; step < span->steps; step++) {
            const vec raw = vec_load(task->dt + step * VEC_LANES) + bias;
            vec_store(task->slope + step * VEC_LANES, vec_sigmoid(raw));
        }
    }
    finish_dt(task->dt, bias, span->steps, (int)p->dt_softplus);
    for (int step = 0; step < span->steps; step++) {
        vec_store(task->inputs + step * VEC_LANES,
                  vec_load(task->x + step * VEC_LANES) * vec_load(task->dt + step * VEC_LANES));
    }
}

/* dy = dout silu(z); y starts as D x. */
static void load_gradient(const struct task *task, const struct tile_span *span) {
    const struct statescan_selective_scan_bwd *p = task->p;
    const struct tile_view dout = tile_view_of(&p->dout, task->row);
    const vec skip = load_lanes(p->D ? p->D + span->channel : 0, span->lanes);
    tile_load(task->dy, &dout, span);
    if (p->z.data != NULL) {
        const struct tile_view z = tile_view_of(&p->z, task->row);
        tile_load(task->gate, &z, span);
    }
    for (int step = 0; step < span->steps; step++) {
        float *dy = task->dy + step * VEC_LANES, *gate = task->gate + step * VEC_LANES;
        if (p->z.data != NULL) {
            const vec z = vec_load(gate), s = vec_sigmoid(z), dout_now = vec_load(dy);
            /* dout silu'(z), which times y is dz */
            vec_store(gate, dout_now * s * (vec_all(1.0f) + z * (vec_all(1.0f) - s)));
            vec_store(dy, dout_now * z * s);
        }
        const vec x = vec_load(task->x + step * VEC_LANES);
        vec_store(task->y + step * VEC_LANES, p->D ? skip * x : vec_all(0.0f));
        vec_store(task->sum_A + step * VEC_LANES, vec_all(0.0f));
        vec_store(task->sum_B + step * VEC_LANES, vec_all(0.0f));
    }
}

/* Forward through a stretch; leaves states and decays for `walk_back`, and adds to y. */
VEC_INLINE void walk_forward(const struct task *task, const struct block *block, float *start,
                             const struct block_weights *B, const struct block_weights *C,
                             int64_t first, int count, int steps) {
    vec state[STATES], rate[STATES];
    for (int i = 0; i < count; i++) {
        state[i] = vec_load(start + (first + i) * VEC_LANES);
        rate[i] = vec_load(block->rate + (first + i) * VEC_LANES);
    }
    for (int step = 0; step < steps; step++) {
        const vec dt = vec_load(task->dt + step * VEC_LANES);
        const vec input = vec_load(task->inputs + step * VEC_LANES);
        vec y = vec_load(task->y + step * VEC_LANES);
        for (int i = 0; i < count; i++) {
            const int place = (step * STATES + i) * VEC_LANES;
            const vec decay = vec_decay(dt, rate[i]);
            const vec entering = input * weight_at(B, step, first + i);
            state[i] = decay * state[i] + entering;
            vec_store(task->decays + place, decay);
            vec_store(task->states + place, state[i]);
            y = state[i] * weight_at(C, step, first + i) + y;
        }
        vec_store(task->y + step * VEC_LANES, y);
    }
}

VEC_INLINE void add_to(float *target, vec value) {
    vec_store(target, vec_load(target) + value);
}

VEC_INLINE void walk_back(const struct task *task, const struct block *block, const float *start,
                          const struct block_weights *B, const struct block_weights *C,
                          int64_t first, int count, int steps) {
    const int64_t dstate = task->p->dstate;
    float *dB = B->constant ? block->dB : task->sums_B,
          *dC = C->constant ? block->dC : task->sums_C;
    const int64_t dB_stride = B->constant ? 0 : dstate * VEC_LANES;
    const int64_t dC_stride = C->constant ? 0 : dstate * VEC_LANES;
    vec carry[STATES], dA[STATES], state[STATES];
    for (int i = 0; i < count; i++) {
        carry[i] = vec_load(block->carry + (first + i) * VEC_LANES);
        state[i] = vec_load(task->states + ((steps - 1) * STATES + i) * VEC_LANES);
        dA[i] = vec_all(0.0f);
    }
    for (int step = steps - 1; step >= 0; step--) {
        const vec dt = vec_load(task->dt + step * VEC_LANES);
        const vec input = vec_load(task->inputs + step * VEC_LANES);
        const vec dy = vec_load(task->dy + step * VEC_LANES);
        vec sum_A = vec_load(task->sum_A + step * VEC_LANES);
        vec sum_B = vec_load(task->sum_B + step * VEC_LANES);
        for (int i = 0; i < count; i++) {
            const float *before = step > 0 ? task->states + ((step - 1) * STATES + i) * VEC_LANES
                                           : start + (first + i) * VEC_LANES;
            const vec gradient = weight_at(C, step, first + i) * dy + carry[i];
            add_to(dC + step * dC_stride + (first + i) * VEC_LANES, state[i] * dy);
            add_to(dB + step * dB_stride + (first + i) * VEC_LANES, gradient * input);
            sum_B = gradient * weight_at(B, step, first + i) + sum_B;
            carry[i] = vec_load(task->decays + (step * STATES + i) * VEC_LANES) * gradient;
            state[i] = vec_load(before);
            const vec exponent = carry[i] * state[i];
            sum_A = vec_load(block->A + (first + i) * VEC_LANES) * exponent + sum_A;
            dA[i] = dt * exponent + dA[i];
        }
        vec_store(task->sum_A + step * VEC_LANES, sum_A);
        vec_store(task->sum_B + step * VEC_LANES, sum_B);
    }
    for (int i = 0; i < count; i++) {
        vec_store(block->carry + (first + i) * VEC_LANES, carry[i]);
        add_to(block->dA + (first + i) * VEC_LANES, dA[i]);
    }
}

VEC_INLINE void walk_both(const struct task *task, const struct block *block, float *start,
                          const struct block_weights *B, const struct block_weights *C, int steps) {
    int64_t state = 0;
    for (; state + STATES <= task->p->dstate; state += STATES) {
        walk_forward(task, block, start, B, C, state, STATES, steps);
        walk_back(task, block, start, B, C, state, STATES, steps);
    }
    for (; state < task->p->dstate; state++) {
        walk_forward(task, block, start, B, C, state, 1, steps);
        walk_back(task, block, start, B, C, state, 1, steps);
    }
}

static void store_gradients(const struct task *task, struct block *block,
                            const struct tile_span *span) {
    const struct statescan_selective_scan_bwd *p = task->p;
    const struct tile_view dx = tile_view_of(&p->dx, task->row);
    const struct tile_view ddt = tile_view_of(&p->ddt, task->row);
    const vec skip = load_lanes(p->D ? p->D + span->channel : 0, span->lanes);
    vec dD = vec_all(0.0f), ddt_bias = vec_all(0.0f);
    for (int step = 0; step < span->steps; step++) {
        const int place = step * VEC_LANES;
        const vec x = vec_load(task->x + place), dy = vec_load(task->dy + place);
        const vec sum_B = vec_load(task->sum_B + place);
        vec dt_now = x * sum_B + vec_load(task->sum_A + place);
        if (p->dt_softplus) {
            dt_now = dt_now * vec_load(task->slope + place);
        }
        vec dx_now = vec_load(task->dt + place) * sum_B;
        dx_now = p->D ? skip * dy + dx_now : dx_now;
        dD = dy * x + dD;
        ddt_bias = ddt_bias + dt_now;
        vec_store(task->sum_A + place, dt_now);
        vec_store(task->sum_B + place, dx_now);
        vec_store(task->y + place, vec_load(task->y + place) * vec_load(task->gate + place));
    }
    block->dD = block->dD + dD;
    block->ddt_bias = block->ddt_bias + ddt_bias;
    tile_store(task->sum_B, &dx, span);
    tile_store(task->sum_A, &ddt, span);
    if (p->z.data != NULL) {
        const struct tile_view dz = tile_view_of(&p->dz, task->row);
        tile_store(task->y, &dz, span);
    }
}

/* One block through one stretch, from the states before it. */
static void run_stretch(const struct task *task, struct block *block, float *start,
                        const struct tile_span *span) {
    const struct statescan_selective_scan_bwd *p = task->p;
    load_inputs(task, span, 1);
    load_gradient(task, span);
    struct block_weights B =
        stretch_weights(&p->B, block->B, task->row, span->channel, p->dim, span);
    struct block_weights C =
        stretch_weights(&p->C, block->C, task->row, span->channel, p->dim, span);
    if (B.constant || C.constant) {
        walk_both(task, block, start, &B, &C, span->steps);
    } else {
        B.constant = C.constant = 0; /* a constant for the compiler, in this copy of the loops */
        walk_both(task, block, start, &B, &C, span->steps);
    }
    store_gradients(task, block, span);
}

/* States after a stretch, from those before it; they may be in the same place. */
static void advance(const struct task *task, const struct block *block, const float *start,
                    float *after, const struct tile_span *span) {
    const struct statescan_selective_scan_bwd *p = task->p;
    load_inputs(task, span, 0);
    const struct block_weights B =
        stretch_weights(&p->B, block->B, task->row, span->channel, p->dim, span);
    for (int64_t state = 0; state < p->dstate; state++) {
        vec value = vec_load(start + state * VEC_LANES);
        const vec rate = vec_load(block->rate + state * VEC_LANES);
        for (int step = 0; step < span->steps; step++) {
            const vec decay = vec_decay(vec_load(task->dt + step * VEC_LANES), rate);
            const vec entering =
                vec_load(task->inputs + step * VEC_LANES) * weight_at(&B, step, state);
            value = decay * value + entering;
        }
        vec_store(after + state * VEC_LANES, value);
    }
}

/* Writes dB or dC of one group and stretch, and clears the sums. */
static void flush(const struct task *task, const struct statescan_weights *weights, float *target,
                  float *sums, int64_t group, const struct tile_span *span) {
    const struct statescan_selective_scan_bwd *p = task->p;
    if (weights->ngroups == 0) {
        return;
    }
    const int64_t first_part = group * (p->dim / weights->ngroups) / p->part_channels;
    const int64_t plane = (task->part - first_part) * p->sequences.batch + task->row;
    target += (plane * weights->ngroups + group) * p->sequences.seqlen * p->dstate;
    for (int step = 0; step < span->steps; step++) {
        const int64_t token = span->token + (span->reverse ? span->steps - 1 - step : step);
        vec_sum_rows(target + token * p->dstate, sums + step * p->dstate * VEC_LANES, p->dstate);
    }
    fill(sums, span->steps * p->dstate * VEC_LANES, 0.0f);
}

/* All blocks of the part through one stretch. `number` counts stretches within the chunk. */
static void run_part(const struct task *task, const struct run *run, int64_t step, int64_t end,
                     int64_t number) {
    const struct statescan_selective_scan_bwd *p = task->p;
    const int reverse = (int)p->sequences.reverse;
    struct tile_span span = {0, 0, first_token(run, step, end, reverse), (int)(end - step),
                             reverse};
    for (int64_t b = 0; b < task->num_blocks; b++) {
        struct block *block = &task->blocks[b];
        span.channel = block->channel;
        span.lanes = block->lanes;
        run_stretch(task, block, block->starts + number * p->dstate * VEC_LANES, &span);
        const int64_t next = b + 1 < task->num_blocks ? block[1].channel : -1;
        const int64_t group_B = group_of(&p->B, p->dim, block->channel);
        const int64_t group_C = group_of(&p->C, p->dim, block->channel);
        if (next < 0 || group_of(&p->B, p->dim, next) != group_B) {
            flush(task, &p->B, p->dB, task->sums_B, group_B, &span);
        }
        if (next < 0 || group_of(&p->C, p->dim, next) != group_C) {
            flush(task, &p->C, p->dC, task->sums_C, group_C, &span);
        }
    }
}

/* The states before each stretch from `start` to `end`, which lie in one chunk. */
static int64_t find_starts(const struct task *task, const struct run *run, int64_t start,
                           int64_t end) {
    const struct statescan_selective_scan_bwd *p = task->p;
    const int reverse = (int)p->sequences.reverse;
    const int64_t num_chunks = divide_up(p->sequences.seqlen, p->chunk_size);
    int64_t number = 0;
    for (int64_t b = 0; b < task->num_blocks; b++) {
        struct block *block = &task->blocks[b];
        float *state = block->starts;
        if (start > run->start) {
            const int64_t chunk = task->row * num_chunks + start / p->chunk_size;
            const float *saved = p->chunk_states + (chunk * p->dim + block->channel) * p->dstate;
            load_states(state, saved, p->dstate, block->lanes);
        } else if (p->initial_states != NULL && run->initial >= 0) {
            const float *initial =
                p->initial_states + (run->initial * p->dim + block->channel) * p->dstate;
            load_states(state, initial, p->dstate, block->lanes);
        } else {
            fill(state, p->dstate * VEC_LANES, 0.0f);
        }
        number = 1;
        for (int64_t step = start, next = stretch_end(run, start); next < end;
             step = next, next = stretch_end(run, step), number++) {
            const struct tile_span span = {block->channel, block->lanes,
                                           first_token(run, step, next, reverse),
                                           (int)(next - step), reverse};
            advance(task, block, state, state + p->dstate * VEC_LANES, &span);
            state += p->dstate * VEC_LANES;
        }
    }
    return number;
}

static void run_sequence(const struct task *task, const struct run *run) {
    const struct statescan_selective_scan_bwd *p = task->p;
    for (int64_t b = 0; b < task->num_blocks; b++) {
        struct block *block = &task->blocks[b];
        if (p->dfinal_states != NULL && run->final >= 0) {
            const float *dfinal =
                p->dfinal_states + (run->final * p->dim + block->channel) * p->dstate;
            load_states(block->carry, dfinal, p->dstate, block->lanes);
        } else {
            fill(block->carry, p->dstate * VEC_LANES, 0.0f);
        }
    }
    for (int64_t end = run->end; end > run->start;) {
        const int64_t chunk = (end - 1) / p->chunk_size * p->chunk_size;
        const int64_t start = chunk > run->start ? chunk : run->start;
        for (int64_t number = find_starts(task, run, start, end); end > start; number--) {
            const int64_t step = stretch_start(run, end);
            run_part(task, run, step, end, number - 1);
            end = step;
        }
    }
    for (int64_t b = 0; b < task->num_blocks; b++) {
        const struct block *block = &task->blocks[b];
        if (p->dinitial_states != NULL && run->initial >= 0) {
            store_states(p->dinitial_states + (run->initial * p->dim + block->channel) * p->dstate,
                         block->carry, p->dstate, block->lanes);
        }
    }
}

static void run_padding(const struct task *task, const struct run *run) {
    const struct statescan_selective_scan_bwd *p = task->p;
    const struct statescan_tensor *targets[] = {&p->dx, &p->ddt, &p->dz};
    fill(task->y, TILE_FLOATS, 0.0f);
    for (int i = 0; i < (p->z.data != NULL ? 3 : 2); i++) {
        const struct tile_view view = tile_view_of(targets[i], task->row);
        for (int64_t step = run->start, end; step < run->end; step = end) {
            end = stretch_end(run, step);
            for (int64_t b = 0; b < task->num_blocks; b++) {
                const struct block *block = &task->blocks[b];
                const struct tile_span span = {block->channel, block->lanes, step,
                                               (int)(end - step), 0};
                tile_store(task->y, &view, &span);
            }
        }
    }
}

/* Cuts the part into blocks that stay within units, and lays their tables out in `memory`. */
static void make_blocks(struct task *task, float *memory) {
    const struct statescan_selective_scan_bwd *p = task->p;
    const int64_t table = p->dstate * VEC_LANES;
    int64_t channel = task->first_channel;
    while (channel < task->end_channel) {
        const int64_t unit_end = (channel / p->unit_channels + 1) * p->unit_channels;
        struct block *block = &task->blocks[task->num_blocks++];
        block->channel = channel;
        block->lanes = (int)smaller(VEC_LANES, smaller(unit_end, task->end_channel) - channel);
        float **tables[] = {&block->rate,  &block->A, &block->dA, &block->dB,    &block->dC,
                            &block->carry, &block->B, &block->C,  &block->starts};
        for (int i = 0; i < 9; i++, memory += table) {
            *tables[i] = memory;
        }
        memory += (p->chunk_size / TILE_STEPS - 1) * table;
        const int64_t row = channel * p->dstate;
        load_rates(block->rate, p->A + row, p->dstate, block->lanes);
        load_states(block->A, p->A + row, p->dstate, block->lanes);
        fill(block->dA, 3 * table, 0.0f);
        if (p->B.ngroups == 0) {
            load_states(block->B, p->B.data + row, p->dstate, block->lanes);
        }
        if (p->C.ngroups == 0) {
            load_states(block->C, p->C.data + row, p->dstate, block->lanes);
        }
        block->dD = block->ddt_bias = vec_all(0.0f);
        channel += block->lanes;
    }
}

static void store_sums(const struct task *task, int64_t row_group) {
    const struct statescan_selective_scan_bwd *p = task->p;
    for (int64_t b = 0; b < task->num_blocks; b++) {
        const struct block *block = &task->blocks[b];
        const int64_t channel = row_group * p->dim + block->channel;
        store_states(p->dA + channel * p->dstate, block->dA, p->dstate, block->lanes);
        store_lanes(p->dD + channel, block->dD, block->lanes);
        store_lanes(p->ddt_bias + channel, block->ddt_bias, block->lanes);
        if (p->B.ngroups == 0) {
            store_states(p->dB + channel * p->dstate, block->dB, p->dstate, block->lanes);
        }
        if (p->C.ngroups == 0) {
            store_states(p->dC + channel * p->dstate, block->dC, p->dstate, block->lanes);
        }
    }
}

static void run_task(const void *params, int64_t number, char *scratch) {
    const struct statescan_selective_scan_bwd *p = params;
    const int64_t num_parts = divide_up(p->dim, p->part_channels);
    const int64_t row_group = number / num_parts;
    struct task task = {.p = p, .part = number % num_parts};
    task.first_channel = task.part * p->part_channels;
    task.end_channel = smaller(task.first_channel + p->part_channels, p->dim);

    float *memory = (float *)scratch;
    float **tiles[] = {&task.x,    &task.dt,    &task.inputs, &task.y,    &task.dy,
                       &task.gate, &task.sum_B, &task.sum_A,  &task.slope};
    for (int i = 0; i < 9; i++, memory += TILE_FLOATS) {
        *tiles[i] = memory;
    }
    float **stacks[] = {&task.states, &task.decays};
    for (int i = 0; i < 2; i++, memory += STATES * TILE_FLOATS) {
        *stacks[i] = memory;
    }
    float **sums[] = {&task.sums_B, &task.sums_C};
    for (int i = 0; i < 2; i++, memory += p->dstate * TILE_FLOATS) {
        *sums[i] = memory;
    }
    fill(task.gate, TILE_FLOATS, 0.0f);
    fill(task.sums_B, 2 * p->dstate * TILE_FLOATS, 0.0f);
    task.blocks = (struct block *)memory;
    const int64_t most_blocks =
        p->part_channels / VEC_LANES + p->part_channels / p->unit_channels + 4;
    make_blocks(&task, (float *)(task.blocks + most_blocks));

    for (task.row = row_group; task.row < p->sequences.batch; task.row += p->row_groups) {
        for (int64_t r = num_runs(&p->sequences, task.row); r-- > 0;) {
            const struct run run = get_run(&p->sequences, task.row, r);
            if (run.initial == RUN_PADDING) {
                run_padding(&task, &run);
            } else {
                run_sequence(&task, &run);
            }
        }
    }
    store_sums(&task, row_group);
}

void AT_LEVEL(selective_scan_bwd)(const struct statescan_selective_scan_bwd *p) {
    const int64_t num_parts = divide_up(p->dim, p->part_channels);
    pool_run(&p->workers, run_task, p, num_parts * p->row_groups);
}
