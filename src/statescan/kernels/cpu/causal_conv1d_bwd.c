/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of the causal convolution.
 *
 * Let w be what a run sees: the width - 1 columns of its initial state, then its tokens. With n
 * tokens, pre[t] = bias + sum over k of taps[k] w[t + k] for t < n, and the final state is the last
 * width - 1 entries, w[n] and on. So with dpre = dout silu'(pre)
 *
 *     dw[j]    = sum over k of taps[k] dpre[j - k], over 0 <= j - k < n, and from j = n on
 *                also dfinal[j - n]
 *     dtaps[k] = sum over t of dpre[t] w[t + k]          dbias = sum over t of dpre[t]
 *
 * and dw holds dinitial first and dx after it, which needs no other case for either end.
 *
 * Work: a task is a part of the channels, a part of the tokens and a group of batch rows. It walks
 * stretches of at most 64 tokens in the order of processing, in blocks of VEC_LANES channels, and
 * makes pre again. dpre of a token is spread over the width entries of dw that it meets; an
 * entry is complete width - 1 steps after its token, so gradients leave that much late and the
 * unfinished ones wait. A part that ends inside a run goes width - 1 steps further for the last of
 * its dx, without counting those for dtaps.
 *
 * Per step 3 width multiply-adds, and exp2 and a division for SiLU. dtaps and dbias are summed
 * in float32 over a stretch, then over a task's stretches; parts and row groups depend on the shape
 * alone, the caller adds them up. Scratch of a worker: 4 tiles and 2 times width vectors, and
 * 5 times width vectors for each block. */
#include "conv_common.h"
#include "kernels.h"

#define MAX_BLOCKS 16

/* One block of channels, its tables in scratch memory. */
struct block {
    int64_t channel;
    int lanes;
    float *taps;    /* [width][VEC_LANES], and so the next one */
    float *dtaps;   /* summed over tokens and rows */
    float *dbias;   /* [VEC_LANES] */
    float *history; /* [width - 1][VEC_LANES], the inputs before the next step */
    float *pending; /* and their gradients so far */
};

struct task {
    const struct statescan_causal_conv1d_bwd *p;
    int64_t row;
    int64_t first_token, end_token;
    int num_blocks;
    struct block blocks[MAX_BLOCKS];
    float *window, *dwindow, *pre, *dpre;
};

/* `count` taps through a stretch: spreads dpre over dwindow, and adds to their dtaps. `whole` says
 * that these are all taps: the rows of dwindow beyond the pending ones then hold nothing yet. */
VEC_INLINE void spread(float *dwindow, const float *window, const float *dpre, const float *taps,
                       float *dtaps, int count, int steps, int whole, int counted) {
    vec tap[TAPS], input[TAPS], gradient[TAPS], sum[TAPS];
    for (int i = 0; i < count; i++) {
        tap[i] = vec_load(taps + i * VEC_LANES);
        input[i] = vec_load(window + i * VEC_LANES);
        gradient[i] = i + 1 < count ? vec_load(dwindow + i * VEC_LANES) : vec_all(0.0f);
        sum[i] = vec_all(0.0f);
    }
    for (int step = 0; step < steps; step++) {
        const vec now = vec_load(dpre + step * VEC_LANES);
        const int newest = (step + count - 1) * VEC_LANES;
        input[count - 1] = vec_load(window + newest);
        gradient[count - 1] = whole ? vec_all(0.0f) : vec_load(dwindow + newest);
        for (int i = 0; i < count; i++) {
            sum[i] = now * input[i] + sum[i];
            gradient[i] = tap[i] * now + gradient[i];
        }
        vec_store(dwindow + step * VEC_LANES, gradient[0]);
        for (int i = 0; i + 1 < count; i++) {
            input[i] = input[i + 1];
            gradient[i] = gradient[i + 1];
        }
    }
    for (int i = 0; i < count; i++) {
        if (i + 1 < count) {
            vec_store(dwindow + (steps + i) * VEC_LANES, gradient[i]);
        }
        if (counted) {
            vec_store(dtaps + i * VEC_LANES, vec_load(dtaps + i * VEC_LANES) + sum[i]);
        }
    }
}

static void spread_all(const struct task *task, const struct block *block, int steps, int counted) {
    const int64_t width = task->p->width;
    float *dw = task->dwindow, *dtaps = block->dtaps;
    const float *w = task->window, *dpre = task->dpre, *taps = block->taps;
    switch (width) {
    case 1:
        spread(dw, w, dpre, taps, dtaps, 1, steps, 1, counted);
        return;
    case 2:
        spread(dw, w, dpre, taps, dtaps, 2, steps, 1, counted);
        return;
    case 3:
        spread(dw, w, dpre, taps, dtaps, 3, steps, 1, counted);
        return;
    case 4:
        spread(dw, w, dpre, taps, dtaps, 4, steps, 1, counted);
        return;
    default:
        break;
    }
    fill(dw + (width - 1) * VEC_LANES, steps * VEC_LANES, 0.0f);
    int64_t place = 0;
    for (; place + TAPS * VEC_LANES <= width * VEC_LANES; place += TAPS * VEC_LANES) {
        spread(dw + place, w + place, dpre, taps + place, dtaps + place, TAPS, steps, 0, counted);
    }
    for (; place < width * VEC_LANES; place += VEC_LANES) {
        spread(dw + place, w + place, dpre, taps + place, dtaps + place, 1, steps, 0, counted);
    }
}

/* dpre from dout, in place. */
static void finish_dpre(const struct task *task, const struct block *block, int steps,
                        int counted) {
    const struct statescan_causal_conv1d_bwd *p = task->p;
    vec sum = vec_all(0.0f);
    if (p->silu) {
        const vec bias = load_lanes(p->bias ? p->bias + block->channel : 0, block->lanes);
        convolve(task->pre, task->window, block->taps, bias, p->width, steps, 0);
    }
    for (int step = 0; step < steps; step++) {
        float *place = task->dpre + step * VEC_LANES;
        vec value = vec_load(place);
        if (p->silu) {
            const vec pre = vec_load(task->pre + step * VEC_LANES), s = vec_sigmoid(pre);
            value = value * s * (vec_all(1.0f) + pre * (vec_all(1.0f) - s));
            vec_store(place, value);
        }
        sum = sum + value;
    }
    if (counted) {
        vec_store(block->dbias, vec_load(block->dbias) + sum);
    }
}

/* Gradients of the `count` inputs from step `first` on: those before the run are dinitial, and of
 * the others a task stores its own. */
static void store_gradients(const struct task *task, const struct block *block,
                            const struct run *run, const struct steps *steps, float *tile,
                            int64_t first, int64_t count) {
    const struct statescan_causal_conv1d_bwd *p = task->p;
    const int64_t columns = p->width - 1;
    if (p->dinitial_states != NULL && run->initial >= 0 && steps->start == run->start) {
        float *target = p->dinitial_states + (run->initial * p->dim + block->channel) * columns;
        for (int64_t step = first; step < smaller(first + count, run->start); step++) {
            const float *source = tile + (step - first) * VEC_LANES;
            for (int lane = 0; lane < block->lanes; lane++) {
                target[lane * columns + step - run->start + columns] = source[lane];
            }
        }
    }
    const int64_t start = larger(first, steps->start), end = smaller(first + count, steps->end);
    if (start < end) {
        const struct tile_view dx = tile_view_of(&p->dx, task->row);
        const struct tile_span span =
            span_of(run, block->channel, block->lanes, start, end, p->sequences.reverse);
        tile_store(tile + (start - first) * VEC_LANES, &dx, &span);
    }
}

static void run_stretch(const struct task *task, const struct block *block, const struct run *run,
                        const struct steps *steps, int64_t step, int64_t end) {
    const struct statescan_causal_conv1d_bwd *p = task->p;
    const struct tile_view x = tile_view_of(&p->x, task->row);
    const struct tile_view dout = tile_view_of(&p->dout, task->row);
    const struct tile_span span =
        span_of(run, block->channel, block->lanes, step, end, p->sequences.reverse);
    const int64_t before = p->width - 1;
    const int counted = step < steps->end;
    copy_rows(task->window, block->history, before);
    copy_rows(task->dwindow, block->pending, before);
    tile_load(task->window + before * VEC_LANES, &x, &span);
    tile_load(task->dpre, &dout, &span);
    finish_dpre(task, block, span.steps, counted);
    spread_all(task, block, span.steps, counted);
    store_gradients(task, block, run, steps, task->dwindow, step - before, span.steps);
    copy_rows(block->history, task->window + span.steps * VEC_LANES, before);
    copy_rows(block->pending, task->dwindow + span.steps * VEC_LANES, before);
}

/* Adds dfinal to the gradients that are pending after the last step of a run, and stores them. */
static void finish_run(const struct task *task, const struct block *block, const struct run *run,
                       const struct steps *steps) {
    const struct statescan_causal_conv1d_bwd *p = task->p;
    const int64_t columns = p->width - 1;
    if (p->dfinal_states != NULL && run->final >= 0) {
        const float *dfinal = p->dfinal_states + (run->final * p->dim + block->channel) * columns;
        load_states(task->dwindow, dfinal, columns, block->lanes);
        for (int64_t place = 0; place < columns * VEC_LANES; place += VEC_LANES) {
            vec_store(block->pending + place,
                      vec_load(block->pending + place) + vec_load(task->dwindow + place));
        }
    }
    store_gradients(task, block, run, steps, block->pending, run->end - columns, columns);
}

/* `count` blocks, which take turns, through their steps of a run. */
static void run_sequence(const struct task *task, const struct block *blocks, int count,
                         const struct run *run, const struct steps *steps) {
    const struct statescan_causal_conv1d_bwd *p = task->p;
    const struct tile_view x = tile_view_of(&p->x, task->row);
    const int64_t before = p->width - 1;
    for (int b = 0; b < count; b++) {
        const struct block *block = &blocks[b];
        const float *initial = 0;
        if (p->initial_states != NULL && run->initial >= 0) {
            initial = p->initial_states + (run->initial * p->dim + block->channel) * before;
        }
        load_history(block->history, before, &x, initial, run, block->channel, block->lanes,
                     steps->start, p->sequences.reverse);
        fill(block->pending, before * VEC_LANES, 0.0f);
    }
    const int64_t reach = smaller(steps->end + before, run->end);
    for (int64_t step = steps->start, end; step < reach; step = end) {
        end = smaller(step + TILE_STEPS, step < steps->end ? steps->end : reach);
        for (int b = 0; b < count; b++) {
            run_stretch(task, &blocks[b], run, steps, step, end);
        }
    }
    for (int b = 0; b < count && reach == run->end; b++) {
        finish_run(task, &blocks[b], run, steps);
    }
}

static void run_padding(const struct task *task, const struct block *block,
                        const struct steps *steps) {
    const struct tile_view dx = tile_view_of(&task->p->dx, task->row);
    fill(task->pre, TILE_FLOATS, 0.0f);
    for (int64_t token = steps->start, end; token < steps->end; token = end) {
        end = smaller(token + TILE_STEPS, steps->end);
        const struct tile_span span = {block->channel, block->lanes, token, (int)(end - token), 0};
        tile_store(task->pre, &dx, &span);
    }
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

/* Cuts the part into blocks, and lays their tables out in `memory`. */
static void make_blocks(struct task *task, int64_t channel, float *memory) {
    const struct statescan_causal_conv1d_bwd *p = task->p;
    const int64_t table = p->width * VEC_LANES;
    const int64_t end = smaller(channel + p->part_channels, p->dim);
    for (; channel < end; channel += VEC_LANES) {
        struct block *block = &task->blocks[task->num_blocks++];
        block->channel = channel;
        block->lanes = (int)smaller(end - channel, VEC_LANES);
        float **tables[] = {&block->taps, &block->dtaps, &block->dbias, &block->history,
                            &block->pending};
        for (int i = 0; i < 5; i++, memory += table) {
            *tables[i] = memory;
        }
        load_states(block->taps, p->weight + channel * p->width, p->width, block->lanes);
        fill(block->dtaps, table, 0.0f);
        fill(block->dbias, VEC_LANES, 0.0f);
    }
}

static void run_task(const void *params, int64_t number, char *scratch) {
    const struct statescan_causal_conv1d_bwd *p = params;
    const int64_t channel_parts = (p->dim + p->part_channels - 1) / p->part_channels;
    const int64_t token_parts = (p->sequences.seqlen + p->part_tokens - 1) / p->part_tokens;
    const int64_t sum = number / channel_parts; /* of row groups and parts of the tokens */
    const int64_t row_group = sum / token_parts;
    struct task task = {.p = p};
    task.first_token = sum % token_parts * p->part_tokens;
    task.end_token = smaller(task.first_token + p->part_tokens, p->sequences.seqlen);

    float *memory = (float *)scratch;
    float **tiles[] = {&task.pre, &task.dpre, &task.window, &task.dwindow};
    for (int i = 0; i < 4; i++, memory += TILE_FLOATS) {
        *tiles[i] = memory;
        memory += i < 2 ? 0 : p->width * VEC_LANES;
    }
    make_blocks(&task, number % channel_parts * p->part_channels, memory);
    const int together = is_channel_last(&p->x) ? task.num_blocks : 1;
    for (task.row = row_group; task.row < p->sequences.batch; task.row += p->row_groups) {
        for (int b = 0; b < task.num_blocks; b += together) {
            walk_runs(&task, &task.blocks[b], together);
        }
    }
    for (int b = 0; b < task.num_blocks; b++) {
        const struct block *block = &task.blocks[b];
        const int64_t channel = sum * p->dim + block->channel;
        store_states(p->dweight + channel * p->width, block->dtaps, p->width, block->lanes);
        store_lanes(p->dbias + channel, vec_load(block->dbias), block->lanes);
    }
}

void AT_LEVEL(causal_conv1d_bwd)(const struct statescan_causal_conv1d_bwd *p) {
    const int64_t channel_parts = (p->dim + p->part_channels - 1) / p->part_channels;
    const int64_t token_parts = (p->sequences.seqlen + p->part_tokens - 1) / p->part_tokens;
    pool_run(&p->workers, run_task, p, channel_parts * token_parts * p->row_groups);
}
