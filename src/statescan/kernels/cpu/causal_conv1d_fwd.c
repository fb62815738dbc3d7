/* SPDX-License-Identifier: Apache-2.0 */
/* Forward causal convolution.
 *
 * Work: a task is one batch row, a part of its tokens and a few blocks of VEC_LANES channels.
 * Lane = channel, so no sum crosses lanes. Time is cut into stretches of at most 64 tokens: x
 * becomes a tile of floats behind the width - 1 inputs before it, and up to four taps at a time
 * stay in registers while the window slides. Outputs depend on nothing but their window, so that
 * rows may be cut anywhere: as often as the threads need.
 *
 * Per step: width multiply-adds, and exp2 and a division for SiLU. Arithmetic is float32. Scratch
 * of a worker: 2 tiles and width vectors, and 2 times width vectors for each block of a task. */
#include "conv_common.h"
#include "kernels.h"

#define MAX_BLOCKS 16

/* One block of channels of a task, its tables in scratch memory. */
struct block {
    int64_t channel;
    int lanes;
    float *taps;    /* [width][VEC_LANES] */
    float *history; /* [width - 1][VEC_LANES], the inputs before the next step */
};

struct task {
    const struct statescan_causal_conv1d_fwd *p;
    int64_t row;
    int64_t first_token, end_token;
    int num_blocks;
    struct block blocks[MAX_BLOCKS];
    float *window, *y;
};

static void run_stretch(const struct task *task, const struct block *block,
                        const struct tile_span *span) {
    const struct statescan_causal_conv1d_fwd *p = task->p;
    const struct tile_view x = tile_view_of(&p->x, task->row);
    const struct tile_view out = tile_view_of(&p->out, task->row);
    const vec bias = load_lanes(p->bias ? p->bias + span->channel : 0, span->lanes);
    const int64_t before = p->width - 1;
    copy_rows(task->window, block->history, before);
    tile_load(task->window + before * VEC_LANES, &x, span);
    convolve(task->y, task->window, block->taps, bias, p->width, span->steps, (int)p->silu);
    tile_store(task->y, &out, span);
    copy_rows(block->history, task->window + span->steps * VEC_LANES, before);
}

static void run_padding(const struct task *task, const struct block *block,
                        const struct steps *steps) {
    const struct tile_view out = tile_view_of(&task->p->out, task->row);
    fill(task->y, TILE_FLOATS, 0.0f);
    for (int64_t token = steps->start, end; token < steps->end; token = end) {
        end = smaller(token + TILE_STEPS, steps->end);
        const struct tile_span span = {block->channel, block->lanes, token, (int)(end - token), 0};
        tile_store(task->y, &out, &span);
    }
}

/* A final state is the history after the last step, in x's dtype. */
static void store_final(const struct task *task, const struct block *block, int64_t state) {
    const struct statescan_causal_conv1d_fwd *p = task->p;
    const int64_t columns = p->width - 1, bytes = dtype_bytes(p->x.dtype);
    char *target = (char *)p->final_states + (state * p->dim + block->channel) * columns * bytes;
    for (int lane = 0; lane < block->lanes; lane++) {
        for (int64_t column = 0; column < columns; column++, target += bytes) {
            store_one(target, p->x.dtype, block->history[column * VEC_LANES + lane]);
        }
    }
}

/* `count` blocks, which take turns, through their steps of a run. */
static void run_sequence(const struct task *task, const struct block *blocks, int count,
                         const struct run *run, const struct steps *steps) {
    const struct statescan_causal_conv1d_fwd *p = task->p;
    const struct tile_view x = tile_view_of(&p->x, task->row);
    const int64_t reverse = p->sequences.reverse, before = p->width - 1;
    for (int b = 0; b < count; b++) {
        const struct block *block = &blocks[b];
        const float *initial = 0;
        if (p->initial_states != NULL && run->initial >= 0) {
            initial = p->initial_states + (run->initial * p->dim + block->channel) * before;
        }
        load_history(block->history, before, &x, initial, run, block->channel, block->lanes,
                     steps->start, reverse);
    }
    for (int64_t step = steps->start, end; step < steps->end; step = end) {
        end = smaller(step + TILE_STEPS, steps->end);
        for (int b = 0; b < count; b++) {
            const struct tile_span span =
                span_of(run, blocks[b].channel, blocks[b].lanes, step, end, reverse);
            run_stretch(task, &blocks[b], &span);
        }
    }
    for (int b = 0; b < count && steps->end == run->end && run->final >= 0; b++) {
        store_final(task, &blocks[b], run->final);
    }
}

/* How the work is cut; influences no result. */
struct cut {
    int64_t blocks, blocks_per_task, tasks_per_part;
    int64_t part_tokens, num_parts;
};

static struct cut cut_work(const struct statescan_causal_conv1d_fwd *p) {
    struct cut cut = {.blocks = divide_up(p->dim, VEC_LANES), .num_parts = 1};
    const int64_t enough = 8 * p->workers.count;
    cut.blocks_per_task = is_channel_last(&p->x) ? MAX_BLOCKS : 1;
    int64_t tasks = p->sequences.batch * divide_up(cut.blocks, cut.blocks_per_task);
    while (tasks * cut.num_parts < enough && p->sequences.seqlen / cut.num_parts > 512) {
        cut.num_parts *= 2;
    }
    while (tasks * cut.num_parts < enough && cut.blocks_per_task > 2) {
        cut.blocks_per_task /= 2;
        tasks = p->sequences.batch * divide_up(cut.blocks, cut.blocks_per_task);
    }
    cut.tasks_per_part = divide_up(cut.blocks, cut.blocks_per_task);
    cut.part_tokens = divide_up(divide_up(p->sequences.seqlen, cut.num_parts), TILE_STEPS);
    cut.part_tokens *= TILE_STEPS;
    return cut;
}

static void walk_runs(const struct task *task, const struct block *blocks, int count) {
    const struct statescan_sequences *sequences = &task->p->sequences;
    const int64_t runs = num_runs(sequences, task->row);
    for (int64_t r = 0; r < runs; r++) {
        const struct run run = get_run(sequences, task->row, r);
        const int padding = run.initial == RUN_PADDING;
        const struct steps steps = steps_within(&run, task->first_token, task->end_token,
                                                padding ? 0 : sequences->reverse);
        if (steps.end <= steps.start) {
            continue;
        }
        for (int b = 0; padding && b < count; b++) {
            run_padding(task, &blocks[b], &steps);
        }
        if (!padding) {
            run_sequence(task, blocks, count, &run, &steps);
        }
    }
}

static void run_task(const void *params, int64_t number, char *scratch) {
    const struct statescan_causal_conv1d_fwd *p = params;
    const struct cut cut = cut_work(p);
    const int64_t first_block = number % cut.tasks_per_part * cut.blocks_per_task;
    const int64_t part = number / cut.tasks_per_part % cut.num_parts;
    struct task task = {.p = p, .row = number / cut.tasks_per_part / cut.num_parts};
    task.first_token = part * cut.part_tokens;
    task.end_token = smaller(task.first_token + cut.part_tokens, p->sequences.seqlen);

    float *memory = (float *)scratch;
    task.y = memory;
    task.window = memory += TILE_FLOATS;
    memory += TILE_FLOATS + p->width * VEC_LANES;
    for (int64_t b = first_block; b < smaller(cut.blocks, first_block + cut.blocks_per_task); b++) {
        struct block *block = &task.blocks[task.num_blocks++];
        block->channel = b * VEC_LANES;
        block->lanes = (int)smaller(p->dim - block->channel, VEC_LANES);
        block->taps = memory;
        block->history = memory += p->width * VEC_LANES;
        memory += p->width * VEC_LANES;
        load_states(block->taps, p->weight + block->channel * p->width, p->width, block->lanes);
    }
    const int together = is_channel_last(&p->x) ? task.num_blocks : 1;
    for (int b = 0; b < task.num_blocks; b += together) {
        walk_runs(&task, &task.blocks[b], together);
    }
}

void AT_LEVEL(causal_conv1d_fwd)(const struct statescan_causal_conv1d_fwd *p) {
    const struct cut cut = cut_work(p);
    pool_run(&p->workers, run_task, p, p->sequences.batch * cut.num_parts * cut.tasks_per_part);
}
