/* SPDX-License-Identifier: Apache-2.0 */
/* Moves stretches of tokens between tensors of any layout and dtype and tiles of floats.
 *
 * A tile is float[steps][VEC_LANES]: row = step in the order of processing, lane = channel. Kernels
 * see nothing else, so layout, dtype and direction are dealt with here once. Dense channels or
 * dense tokens move by vectors (tokens through square transposes); any other strides one by one.
 * Lanes without a channel are 0 and never written back. No arithmetic belongs here. */
#ifndef STATESCAN_TILE_H
#define STATESCAN_TILE_H

#include "abi.h"
#include "counts.h"
#include "vec.h"

/* One tensor seen from one batch row: where (channel, token) lies, strides in elements. */
struct tile_view {
    char *data;
    int64_t channel_stride;
    int64_t token_stride;
    int64_t dtype;
};

/* The lanes and tokens of one move. `reverse` walks from the last token to the first. */
struct tile_span {
    int64_t channel;
    int lanes;
    int64_t token; /* lowest token in memory */
    int steps;
    int reverse;
};

VEC_INLINE int dtype_bytes(int64_t dtype) {
    return dtype == STATESCAN_FLOAT32 ? 4 : 2;
}

VEC_INLINE struct tile_view tile_view_of(const struct statescan_tensor *tensor, int64_t row) {
    struct tile_view view = {tensor->data, tensor->channel_stride, tensor->token_stride,
                             tensor->dtype};
    if (view.data != 0) {
        view.data += row * tensor->batch_stride * dtype_bytes(tensor->dtype);
    }
    return view;
}

VEC_INLINE float load_one(const char *source, int64_t dtype) {
    if (dtype == STATESCAN_FLOAT32) {
        return *(const float *)source;
    }
    const uint16_t half = *(const uint16_t *)source;
    return dtype == STATESCAN_BFLOAT16 ? float_from_bf16(half) : float_from_f16(half);
}

VEC_INLINE void store_one(char *target, int64_t dtype, float value) {
    if (dtype == STATESCAN_FLOAT32) {
        *(float *)target = value;
    } else {
        *(uint16_t *)target =
            dtype == STATESCAN_BFLOAT16 ? bf16_from_float(value) : f16_from_float(value);
    }
}

VEC_INLINE vec load_dense(const char *source, int64_t dtype) {
    if (dtype == STATESCAN_FLOAT32) {
        return vec_load((const float *)source);
    }
    return dtype == STATESCAN_BFLOAT16 ? vec_from_bf16((const uint16_t *)source)
                                       : vec_from_f16((const uint16_t *)source);
}

VEC_INLINE void store_dense(char *target, int64_t dtype, vec value) {
    if (dtype == STATESCAN_FLOAT32) {
        vec_store((float *)target, value);
    } else if (dtype == STATESCAN_BFLOAT16) {
        vec_to_bf16((uint16_t *)target, value);
    } else {
        vec_to_f16((uint16_t *)target, value);
    }
}

VEC_INLINE char *tile_address(const struct tile_view *view, int64_t channel, int64_t token) {
    return view->data +
           (channel * view->channel_stride + token * view->token_stride) * dtype_bytes(view->dtype);
}

/* A walk over the span's tokens, up in memory: where the next one lies, and its row of the tile. */
struct tile_walk {
    char *place;
    float *row;
    int64_t token_bytes;
    int64_t channel_bytes;
    int64_t row_floats;
};

VEC_INLINE struct tile_walk tile_begin(float *tile, const struct tile_view *view,
                                       const struct tile_span *span) {
    const int64_t bytes = dtype_bytes(view->dtype);
    struct tile_walk walk = {tile_address(view, span->channel, span->token), tile,
                             view->token_stride * bytes, view->channel_stride * bytes, VEC_LANES};
    if (span->reverse) {
        walk.row += (span->steps - 1) * VEC_LANES;
        walk.row_floats = -VEC_LANES;
    }
    return walk;
}

VEC_INLINE void tile_advance(struct tile_walk *walk, int tokens) {
    walk->place += tokens * walk->token_bytes;
    walk->row += tokens * walk->row_floats;
}

/* `dtype` is a constant at each call, so that the compiler makes one loop for each. */
VEC_INLINE void tile_load_as(float *tile, const struct tile_view *view,
                             const struct tile_span *span, int64_t dtype) {
    struct tile_walk walk = tile_begin(tile, view, span);
    const int full = span->lanes == VEC_LANES;
    int left = span->steps;
    if (full && view->channel_stride == 1) {
        for (; left > 0; left--, tile_advance(&walk, 1)) {
            vec_store(walk.row, load_dense(walk.place, dtype));
        }
        return;
    }
    if (full && view->token_stride == 1) {
        for (; left >= VEC_LANES; left -= VEC_LANES, tile_advance(&walk, VEC_LANES)) {
            vec square[VEC_LANES];
            for (int lane = 0; lane < VEC_LANES; lane++) {
                square[lane] = load_dense(walk.place + lane * walk.channel_bytes, dtype);
            }
            vec_transpose(square);
            for (int step = 0; step < VEC_LANES; step++) {
                vec_store(walk.row + step * walk.row_floats, square[step]);
            }
        }
    }
    for (; left > 0; left--, tile_advance(&walk, 1)) {
        vec_store(walk.row, vec_all(0.0f));
        for (int lane = 0; lane < span->lanes; lane++) {
            walk.row[lane] = load_one(walk.place + lane * walk.channel_bytes, dtype);
        }
    }
}

VEC_INLINE void tile_store_as(float *tile, const struct tile_view *view,
                              const struct tile_span *span, int64_t dtype) {
    struct tile_walk walk = tile_begin(tile, view, span);
    const int full = span->lanes == VEC_LANES;
    int left = span->steps;
    if (full && view->channel_stride == 1) {
        for (; left > 0; left--, tile_advance(&walk, 1)) {
            store_dense(walk.place, dtype, vec_load(walk.row));
        }
        return;
    }
    if (full && view->token_stride == 1) {
        for (; left >= VEC_LANES; left -= VEC_LANES, tile_advance(&walk, VEC_LANES)) {
            vec square[VEC_LANES];
            for (int step = 0; step < VEC_LANES; step++) {
                square[step] = vec_load(walk.row + step * walk.row_floats);
            }
            vec_transpose(square);
            for (int lane = 0; lane < VEC_LANES; lane++) {
                store_dense(walk.place + lane * walk.channel_bytes, dtype, square[lane]);
            }
        }
    }
    for (; left > 0; left--, tile_advance(&walk, 1)) {
        for (int lane = 0; lane < span->lanes; lane++) {
            store_one(walk.place + lane * walk.channel_bytes, dtype, walk.row[lane]);
        }
    }
}

static inline void tile_load(float *tile, const struct tile_view *view,
                             const struct tile_span *span) {
    if (view->dtype == STATESCAN_FLOAT32) {
        tile_load_as(tile, view, span, STATESCAN_FLOAT32);
    } else if (view->dtype == STATESCAN_BFLOAT16) {
        tile_load_as(tile, view, span, STATESCAN_BFLOAT16);
    } else {
        tile_load_as(tile, view, span, STATESCAN_FLOAT16);
    }
}

static inline void tile_store(float *tile, const struct tile_view *view,
                              const struct tile_span *span) {
    if (view->dtype == STATESCAN_FLOAT32) {
        tile_store_as(tile, view, span, STATESCAN_FLOAT32);
    } else if (view->dtype == STATESCAN_BFLOAT16) {
        tile_store_as(tile, view, span, STATESCAN_BFLOAT16);
    } else {
        tile_store_as(tile, view, span, STATESCAN_FLOAT16);
    }
}

/* One vector with a value for each lane from `source`, 0 beyond the last; null stands for zeros. */
VEC_INLINE vec load_lanes(const float *source, int lanes) {
    if (source == 0) {
        return vec_all(0.0f);
    }
    if (lanes == VEC_LANES) {
        return vec_load(source);
    }
    float row[VEC_LANES] = {0};
    for (int lane = 0; lane < lanes; lane++) {
        row[lane] = source[lane];
    }
    return vec_load(row);
}

VEC_INLINE void store_lanes(float *target, vec value, int lanes) {
    float row[VEC_LANES];
    vec_store(row, value);
    for (int lane = 0; lane < lanes; lane++) {
        target[lane] = row[lane];
    }
}

#endif
