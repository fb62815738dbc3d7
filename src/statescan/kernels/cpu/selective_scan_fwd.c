/* SPDX-License-Identifier: Apache-2.0 */
/* Forward selective scan.
 *
 * Work: a task is one batch row and a few blocks of VEC_LANES channels, from the first token to the
 * last; tasks share nothing. Lane = channel, so no sum crosses lanes. Time is cut into stretches of
 * at most 64 tokens: x and dt become tiles of floats, softplus is taken once a token, and then
 * four states at a time walk the stretch with their state and decay rate in registers.
 *
 * Per state and step: one product for dt A, exp2, one product for B, two multiply-adds, that is
 * 9 operations for the multiply-add units and about 7 others a vector. Arithmetic and states are
 * float32. Prefetching the next stretch changed nothing on a Xeon. Scratch of a worker: 4 tiles,
 * and 4 times dstate vectors for each block of a task. */
#include "kernels.h"
#include "scan_common.h"

#define MAX_BLOCKS 4

/* One block of channels of a task, its tables in scratch memory. */
struct block {
    int64_t channel;
    int lanes;
    float *state; /* [dstate][VEC_LANES], and so the next three */
    float *rate;  /* A log2(e) */
    float *B;     /* filled only where constant */
    float *C;
};

struct task {
    const struct statescan_selective_scan_fwd *p;
    int64_t row;
    int num_blocks;
    struct block blocks[MAX_BLOCKS];
    float *dt, *inputs, *y, *x;
};

/* `count` states from `first` on through one stretch; y receives their part of the sum. */
VEC_INLINE void walk(const struct task *task, const struct block *block,
                     const struct block_weights *B, const struct block_weights *C, int64_t first,
                     int count, int steps) {
    vec state[4], rate[4];
    for (int i = 0; i < count; i++) {
        state[i] = vec_load(block->state + (first + i) * VEC_LANES);
        rate[i] = vec_load(block->rate + (first + i) * VEC_LANES);
    }
    for (int step = 0; step < steps; step++) {
        const vec dt = vec_load(task->dt + step * VEC_LANES);
        const vec input = vec_load(task->inputs + step * VEC_LANES);
        vec y = vec_load(task->y + step * VEC_LANES);
        for (int i = 0; i < count; i++) {
            const vec decay = vec_decay(dt, rate[i]);
            const vec entering = input * weight_at(B, step, first + i);
            state[i] = decay * state[i] + entering;
            y = state[i] * weight_at(C, step, first + i) + y;
        }
        vec_store(task->y + step * VEC_LANES, y);
    }
    for (int i = 0; i < count; i++) {
        vec_store(block->state + (first + i) * VEC_LANES, state[i]);
    }
}

VEC_INLINE void walk_all(const struct task *task, const struct block *block,
                         const struct block_weights *B, const struct block_weights *C, int steps) {
    int64_t state = 0;
    for (; state + 4 <= task->p->dstate; state += 4) {
        walk(task, block, B, C, state, 4, steps);
    }
    for (; state < task->p->dstate; state++) {
        walk(task, block, B, C, state, 1, steps);
    }
}

static void save_chunk_state(const struct task *task, const struct block *block, int64_t step) {
    const struct statescan_selective_scan_fwd *p = task->p;
    const int64_t num_chunks = divide_up(p->sequences.seqlen, p->chunk_size);
    const int64_t chunk = task->row * num_chunks + step / p->chunk_size;
    float *target = p->chunk_states + (chunk * p->dim + block->channel) * p->dstate;
    store_states(target, block->state, p->dstate, block->lanes);
}

static void gate(const struct task *task, const struct tile_span *span) {
    const struct tile_view z = tile_view_of(&task->p->z, task->row);
    tile_load(task->x, &z, span);
    for (int step = 0; step < span->steps; step++) {
        const vec value = vec_load(task->x + step * VEC_LANES);
        const vec y = vec_load(task->y + step * VEC_LANES);
        vec_store(task->y + step * VEC_LANES, y * value * vec_sigmoid(value));
    }
}

static void run_stretch(const struct task *task, const struct block *block,
                        const struct tile_span *span) {
    const struct statescan_selective_scan_fwd *p = task->p;
    const struct tile_view x = tile_view_of(&p->x, task->row);
    const struct tile_view dt = tile_view_of(&p->dt, task->row);
    const struct tile_view out = tile_view_of(&p->out, task->row);
    const vec bias = load_lanes(p->dt_bias ? p->dt_bias + span->channel : 0, span->lanes);
    const vec skip = load_lanes(p->D ? p->D + span->channel : 0, span->lanes);
    tile_load(task->x, &x, span);
    tile_load(task->dt, &dt, span);
    finish_dt(task->dt, bias, span->steps, (int)p->dt_softplus);
    for (int step = 0; step < span->steps; step++) {
        const vec value = vec_load(task->x + step * VEC_LANES);
        vec_store(task->inputs + step * VEC_LANES, value * vec_load(task->dt + step * VEC_LANES));
        vec_store(task->y + step * VEC_LANES, p->D ? skip * value : vec_all(0.0f));
    }
    struct block_weights B =
        stretch_weights(&p->B, block->B, task->row, span->channel, p->dim, span);
    struct block_weights C =
        stretch_weights(&p->C, block->C, task->row, span->channel, p->dim, span);
    if (B.constant || C.constant) {
        walk_all(task, block, &B, &C, span->steps);
    } else {
        B.constant = C.constant = 0; /* a constant for the compiler, in this copy of the loops */
        walk_all(task, block, &B, &C, span->steps);
    }
    if (p->z.data != NULL) {
        gate(task, span);
    }
    tile_store(task->y, &out, span);
}

static void run_padding(const struct task *task, const struct run *run) {
    const struct statescan_selective_scan_fwd *p = task->p;
    const struct tile_view out = tile_view_of(&p->out, task->row);
    for (int b = 0; b < task->num_blocks; b++) {
        const struct block *block = &task->blocks[b];
        fill(task->y, TILE_FLOATS, 0.0f);
        fill(block->state, p->dstate * VEC_LANES, 0.0f);
        for (int64_t step = run->start, end; step < run->end; step = end) {
            end = stretch_end(run, step);
            if (p->chunk_states != NULL && step % p->chunk_size == 0) {
                save_chunk_state(task, block, step);
            }
            const struct tile_span span = {block->channel, block->lanes, step, (int)(end - step),
                                           0};
            tile_store(task->y, &out, &span);
        }
    }
}

static void run_sequence(const struct task *task, const struct run *run) {
    const struct statescan_selective_scan_fwd *p = task->p;
    for (int b = 0; b < task->num_blocks; b++) {
        const struct block *block = &task->blocks[b];
        if (p->initial_states != NULL && run->initial >= 0) {
            const float *initial =
                p->initial_states + (run->initial * p->dim + block->channel) * p->dstate;
            load_states(block->state, initial, p->dstate, block->lanes);
        } else {
            fill(block->state, p->dstate * VEC_LANES, 0.0f);
        }
    }
    const int reverse = (int)p->sequences.reverse;
    for (int64_t step = run->start, end; step < run->end; step = end) {
        end = stretch_end(run, step);
        for (int b = 0; b < task->num_blocks; b++) {
            const struct block *block = &task->blocks[b];
            if (p->chunk_states != NULL && step % p->chunk_size == 0) {
                save_chunk_state(task, block, step);
            }
            const struct tile_span span = {block->channel, block->lanes,
                                           first_token(run, step, end, reverse), (int)(end - step),
                                           reverse};
            run_stretch(task, block, &span);
        }
    }
    for (int b = 0; b < task->num_blocks && run->final >= 0; b++) {
        const struct block *block = &task->blocks[b];
        float *final = p->final_states + (run->final * p->dim + block->channel) * p->dstate;
        store_states(final, block->state, p->dstate, block->lanes);
    }
}

static int64_t blocks_per_unit(const struct statescan_selective_scan_fwd *p) {
    return divide_up(p->unit_channels, VEC_LANES);
}

/* Blocks of a task: several, so that whole cache lines of channel-last tensors are used at a time,
 * unless that leaves too few tasks for the threads. */
static int64_t blocks_per_task(const struct statescan_selective_scan_fwd *p) {
    const int64_t blocks = p->sequences.batch * (p->dim / p->unit_channels) * blocks_per_unit(p);
    int64_t count = MAX_BLOCKS;
    while (count > 1 && blocks / count < 8 * p->workers.count) {
        count /= 2;
    }
    return count;
}

static void run_task(const void *params, int64_t number, char *scratch) {
    const struct statescan_selective_scan_fwd *p = params;
    const int64_t per_task = blocks_per_task(p), per_unit = blocks_per_unit(p);
    const int64_t tasks_per_unit = divide_up(per_unit, per_task);
    const int64_t num_units = p->dim / p->unit_channels;
    const int64_t unit = number / tasks_per_unit % num_units;
    const int64_t first_block = number % tasks_per_unit * per_task;

    struct task task = {.p = p, .row = number / tasks_per_unit / num_units};
    float *memory = (float *)scratch;
    float **tiles[] = {&task.dt, &task.inputs, &task.y, &task.x};
    for (int i = 0; i < 4; i++, memory += TILE_FLOATS) {
        *tiles[i] = memory;
    }
    for (int64_t b = first_block; b < per_unit && b < first_block + per_task; b++) {
        struct block *block = &task.blocks[task.num_blocks++];
        const int64_t offset = b * VEC_LANES;
        block->channel = unit * p->unit_channels + offset;
        block->lanes = (int)smaller(p->unit_channels - offset, VEC_LANES);
        float **tables[] = {&block->state, &block->rate, &block->B, &block->C};
        for (int i = 0; i < 4; i++, memory += p->dstate * VEC_LANES) {
            *tables[i] = memory;
        }
        const int64_t row = block->channel * p->dstate;
        load_rates(block->rate, p->A + row, p->dstate, block->lanes);
        if (p->B.ngroups == 0) {
            load_states(block->B, p->B.data + row, p->dstate, block->lanes);
        }
        if (p->C.ngroups == 0) {
            load_states(block->C, p->C.data + row, p->dstate, block->lanes);
        }
    }
    const int64_t runs = num_runs(&p->sequences, task.row);
    for (int64_t r = 0; r < runs; r++) {
        const struct run run = get_run(&p->sequences, task.row, r);
        if (run.initial == RUN_PADDING) {
            run_padding(&task, &run);
        } else {
            run_sequence(&task, &run);
        }
    }
}

void AT_LEVEL(selective_scan_fwd)(const struct statescan_selective_scan_fwd *p) {
    const int64_t per_task = blocks_per_task(p);
    const int64_t tasks_per_unit = divide_up(blocks_per_unit(p), per_task);
    pool_run(&p->workers, run_task, p,
             p->sequences.batch * (p->dim / p->unit_channels) * tasks_per_unit);
}
