/* SPDX-License-Identifier: Apache-2.0 */
/* What both directions of the causal convolution share: blocks of channels, the steps that a task
 * has of a run, the inputs before a step, and the taps.
 *
 * A window is the tile of a stretch with the width - 1 inputs before it in front: row i of the
 * output meets tap k at row i + k. Only float32 tiles here; nothing of gradients. */
#ifndef STATESCAN_CONV_COMMON_H
#define STATESCAN_CONV_COMMON_H

#include "scan_common.h"

/* Taps that stay in registers together. */
#define TAPS 4

/* The steps of a run that lie in a part of the row's tokens. */
struct steps {
    int64_t start;
    int64_t end;
};

/* Steps of the tokens from `low` to `high`; none if end <= start. */
VEC_INLINE struct steps steps_within(const struct run *run, int64_t low, int64_t high,
                                     int64_t reverse) {
    low = larger(low, run->start);
    high = smaller(high, run->end);
    if (reverse) {
        return (struct steps){run->start + run->end - high, run->start + run->end - low};
    }
    return (struct steps){low, high};
}

/* Whether a token's channels are neighbours in memory. Blocks then take turns, so that a cache line
 * is still near when the next block wants its part of it; otherwise each walks alone, along its
 * rows. */
VEC_INLINE int is_channel_last(const struct statescan_tensor *tensor) {
    return tensor->channel_stride == 1 && tensor->token_stride != 1;
}

VEC_INLINE void copy_rows(float *target, const float *source, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) {
        vec_store(target + row * VEC_LANES, vec_load(source + row * VEC_LANES));
    }
}

VEC_INLINE struct tile_span span_of(const struct run *run, int64_t channel, int lanes, int64_t step,
                                    int64_t end, int64_t reverse) {
    return (struct tile_span){channel, lanes, first_token(run, step, end, reverse),
                              (int)(end - step), (int)reverse};
}

/* The `count` = width - 1 inputs before `step`: tokens of the run, and what is missing of them from
 * the columns of the initial state, which begins at `initial` for the block; null stands for 0. */
static void load_history(float *history, int64_t count, const struct tile_view *x,
                         const float *initial, const struct run *run, int64_t channel, int lanes,
                         int64_t step, int64_t reverse) {
    const int64_t tokens = smaller(count, step - run->start);
    if (tokens < count && initial != 0) {
        load_states(history, initial, count, lanes);
        copy_rows(history, history + tokens * VEC_LANES, count - tokens);
    } else {
        fill(history, (count - tokens) * VEC_LANES, 0.0f);
    }
    if (tokens > 0) {
        const struct tile_span span = span_of(run, channel, lanes, step - tokens, step, reverse);
        tile_load(history + (count - tokens) * VEC_LANES, x, &span);
    }
}

/* Adds `count` taps to y, which begins as `bias` if this is the `first` time. */
VEC_INLINE void add_taps(float *y, const float *window, const float *taps, vec bias, int count,
                         int steps, int first, int silu) {
    vec tap[TAPS], input[TAPS];
    for (int i = 0; i < count; i++) {
        tap[i] = vec_load(taps + i * VEC_LANES);
        input[i] = vec_load(window + i * VEC_LANES);
    }
    for (int step = 0; step < steps; step++) {
        vec sum = first ? bias : vec_load(y + step * VEC_LANES);
        input[count - 1] = vec_load(window + (step + count - 1) * VEC_LANES);
        for (int i = 0; i < count; i++) {
            sum = tap[i] * input[i] + sum;
        }
        vec_store(y + step * VEC_LANES, silu ? sum * vec_sigmoid(sum) : sum);
        for (int i = 0; i + 1 < count; i++) {
            input[i] = input[i + 1];
        }
    }
}

VEC_INLINE void convolve_short(float *y, const float *window, const float *taps, vec bias,
                               int width, int steps, int silu) {
    if (silu) {
        add_taps(y, window, taps, bias, width, steps, 1, 1);
    } else {
        add_taps(y, window, taps, bias, width, steps, 1, 0);
    }
}

static void convolve_long(float *y, const float *window, const float *taps, vec bias, int64_t width,
                          int steps, int silu) {
    add_taps(y, window, taps, bias, TAPS, steps, 1, 0);
    int64_t tap = TAPS;
    for (; tap + TAPS <= width; tap += TAPS) {
        const int64_t place = tap * VEC_LANES;
        add_taps(y, window + place, taps + place, bias, TAPS, steps, 0, 0);
    }
    for (; tap < width; tap++) {
        const int64_t place = tap * VEC_LANES;
        add_taps(y, window + place, taps + place, bias, 1, steps, 0, 0);
    }
    for (int step = 0; silu && step < steps; step++) {
        const vec value = vec_load(y + step * VEC_LANES);
        vec_store(y + step * VEC_LANES, value * vec_sigmoid(value));
    }
}

/* y[i] = bias + sum over k of taps[k] window[i + k], then SiLU if wanted. */
static void convolve(float *y, const float *window, const float *taps, vec bias, int64_t width,
                     int steps, int silu) {
    switch (width) {
    case 1:
        convolve_short(y, window, taps, bias, 1, steps, silu);
        break;
    case 2:
        convolve_short(y, window, taps, bias, 2, steps, silu);
        break;
    case 3:
        convolve_short(y, window, taps, bias, 3, steps, silu);
        break;
    case 4:
        convolve_short(y, window, taps, bias, 4, steps, silu);
        break;
    default:
        convolve_long(y, window, taps, bias, width, steps, silu);
    }
}

#endif
