/* SPDX-License-Identifier: Apache-2.0 */
/* Products of a few vectors with a matrix that is read once: what decoding spends its time on.
 *
 * A matrix is (rows, columns) with dense columns, in float32, bfloat16 or float16; vectors are
 * float32. Four rows are read side by side, and while they are in the cache every vector of the
 * batch meets them. The sum of a row has one order, so it does not depend on threads. */
#ifndef STATESCAN_MATVEC_H
#define STATESCAN_MATVEC_H

#include "tile.h"

#define MATVEC_ROWS 4

/* Bytes between what is multiplied and what is asked for. Rows of 768 bfloat16 are shorter than a
 * page and lie side by side in it, which the processor's own prefetching does not see through: on
 * an AVX-512 Xeon a model of 130M parameters decoded at 0.60 of the read bandwidth, and at 0.84
 * with this (2 to 8 KB made no difference; float32 stays at 0.95). */
#define MATVEC_AHEAD 6144

/* Two vectors' worth of a row. bfloat16 comes as even and odd places: the vector it meets must have
 * been unzipped the same way. */
VEC_INLINE void load_pair(const char *source, int64_t dtype, vec *first, vec *second) {
    if (dtype == STATESCAN_BFLOAT16) {
        vec_pair_from_bf16((const uint16_t *)source, first, second);
    } else {
        *first = load_dense(source, dtype);
        *second = load_dense(source + VEC_LANES * dtype_bytes(dtype), dtype);
    }
}

/* Sums of `count` rows, at most MATVEC_ROWS, with one vector; `dtype` and `count` are constants. */
VEC_INLINE void dot_rows(float *sums, const char *rows, int64_t row_bytes, int64_t dtype,
                         const float *vector, int64_t columns, int count) {
    vec even[MATVEC_ROWS], odd[MATVEC_ROWS];
    for (int row = 0; row < count; row++) {
        even[row] = odd[row] = vec_all(0.0f);
    }
    const int bytes = dtype_bytes(dtype);
    int64_t column = 0;
    for (; column + 2 * VEC_LANES <= columns; column += 2 * VEC_LANES) {
        const vec first = vec_load(vector + column);
        const vec second = vec_load(vector + column + VEC_LANES);
        for (int row = 0; row < count; row++) {
            const char *source = rows + row * row_bytes + column * bytes;
            for (int line = 0; line < 2 * VEC_LANES * bytes; line += 64) {
                __builtin_prefetch(source + MATVEC_AHEAD + line);
            }
            vec a, b;
            load_pair(source, dtype, &a, &b);
            even[row] = a * first + even[row];
            odd[row] = b * second + odd[row];
        }
    }
    if (column + VEC_LANES <= columns) {
        const vec value = vec_load(vector + column);
        for (int row = 0; row < count; row++) {
            even[row] =
                load_dense(rows + row * row_bytes + column * bytes, dtype) * value + even[row];
        }
        column += VEC_LANES;
    }
    for (int row = 0; row < count; row++) {
        float sum = vec_sum(even[row] + odd[row]);
        for (int64_t rest = column; rest < columns; rest++) {
            sum += load_one(rows + row * row_bytes + rest * bytes, dtype) * vector[rest];
        }
        sums[row] = sum;
    }
}

/* One vector in the order in which bfloat16 rows meet it. */
static inline void unzip_vector(float *target, const float *source, int64_t columns) {
    int64_t column = 0;
    for (; column + 2 * VEC_LANES <= columns; column += 2 * VEC_LANES) {
        vec even, odd;
        vec_unzip(vec_load(source + column), vec_load(source + column + VEC_LANES), &even, &odd);
        vec_store(target + column, even);
        vec_store(target + column + VEC_LANES, odd);
    }
    for (; column < columns; column++) {
        target[column] = source[column];
    }
}

VEC_INLINE void matvec_as(float *out, int64_t out_stride, const struct statescan_matrix *matrix,
                          int64_t dtype, int64_t first, int64_t end, const float *vectors,
                          int64_t vector_stride, int64_t batch) {
    const int64_t row_bytes = matrix->row_stride * dtype_bytes(dtype);
    for (int64_t row = first; row < end; row += MATVEC_ROWS) {
        const char *rows = (const char *)matrix->data + row * row_bytes;
        const int64_t count = end - row < MATVEC_ROWS ? end - row : MATVEC_ROWS;
        for (int64_t b = 0; b < batch; b++) {
            float *sums = out + b * out_stride + row - first;
            const float *vector = vectors + b * vector_stride;
            if (count == MATVEC_ROWS) {
                dot_rows(sums, rows, row_bytes, dtype, vector, matrix->columns, MATVEC_ROWS);
                continue;
            }
            for (int64_t r = 0; r < count; r++) {
                dot_rows(sums + r, rows + r * row_bytes, row_bytes, dtype, vector, matrix->columns,
                         1);
            }
        }
    }
}

/* out[b][row - first] for rows `first` to `end` of the matrix and each of `batch` vectors. `spare`
 * has room for the vectors. */
static inline void matvec(float *out, int64_t out_stride, const struct statescan_matrix *matrix,
                          int64_t first, int64_t end, const float *vectors, int64_t vector_stride,
                          int64_t batch, float *spare) {
    if (matrix->dtype == STATESCAN_FLOAT32) {
        matvec_as(out, out_stride, matrix, STATESCAN_FLOAT32, first, end, vectors, vector_stride,
                  batch);
    } else if (matrix->dtype == STATESCAN_BFLOAT16) {
        for (int64_t b = 0; b < batch; b++) {
            unzip_vector(spare + b * matrix->columns, vectors + b * vector_stride, matrix->columns);
        }
        matvec_as(out, out_stride, matrix, STATESCAN_BFLOAT16, first, end, spare, matrix->columns,
                  batch);
    } else {
        matvec_as(out, out_stride, matrix, STATESCAN_FLOAT16, first, end, vectors, vector_stride,
                  batch);
    }
}

/* Adds a bias of any dtype to out[b][i], i from 0 to count; element `first` + i of the bias. */
static inline void add_bias(float *out, int64_t out_stride, const struct statescan_tensor *bias,
                            int64_t first, int64_t count, int64_t batch) {
    if (bias->data == 0) {
        return;
    }
    const struct tile_view view = tile_view_of(bias, 0);
    for (int64_t i = 0; i < count; i++) {
        const float value = load_one(tile_address(&view, first + i, 0), bias->dtype);
        for (int64_t b = 0; b < batch; b++) {
            out[b * out_stride + i] += value;
        }
    }
}

/* Rows of `tensor` (batch, channels) as float32, and back. */
static inline void load_matrix(float *target, int64_t target_stride,
                               const struct statescan_tensor *tensor, int64_t batch,
                               int64_t channels) {
    for (int64_t b = 0; b < batch; b++) {
        const struct tile_view view = tile_view_of(tensor, b);
        for (int64_t c = 0; c < channels; c++) {
            target[b * target_stride + c] = load_one(tile_address(&view, c, 0), view.dtype);
        }
    }
}

static inline void store_matrix(const struct statescan_tensor *tensor, const float *source,
                                int64_t source_stride, int64_t batch, int64_t first,
                                int64_t count) {
    for (int64_t b = 0; b < batch; b++) {
        const struct tile_view view = tile_view_of(tensor, b);
        for (int64_t i = 0; i < count; i++) {
            store_one(tile_address(&view, first + i, 0), view.dtype, source[b * source_stride + i]);
        }
    }
}

#endif
