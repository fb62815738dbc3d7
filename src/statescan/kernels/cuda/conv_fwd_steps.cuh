// SPDX-License-Identifier: Apache-2.0
// What the fast ways of the forward convolution leave to STEPS, and final states. Numbers are read
// one by one from wherever they lie, so this is slow: for few tokens only.

#define CONV_BATCH  8
#define ROW_THREADS 128

using Params = CausalConv1dFwdParams;

__device__ __forceinline__ void store_final(const Params &p, i64 row, i64 number, i64 step) {
    const Channel<Params> channel{p, row, number};
    const u32 mark = channel.mark(step);
    const i64 columns = p.width - 1;
    const i64 target = (mark_state(mark, row) * p.dim + number) * columns;
    channel.inputs(step, columns, [&](i64 d, float value) {
        store_any(p.final_states, target + columns - 1 - d, static_cast<int>(p.x_dtype), value);
    });
}

// The last inputs of an unpacked row, the newest last; `column` counts them.
__device__ __forceinline__ void store_row_end(const Params &p, i64 row, i64 number, int column) {
    const Channel<Params> channel{p, row, number};
    const i64 columns = p.width - 1, step = p.seqlen - columns + column;
    const float value = step >= 0 ? channel.x(step) : channel.initial(MARK_INITIAL, columns + step);
    store_any(p.final_states, (row * p.dim + number) * columns + column,
              static_cast<int>(p.x_dtype), value);
}

// Makes tokens of a channel anew where a sequence begins near them, or all of `count` tokens from
// `first` on, and writes the final states of sequences that end there. Slow: for few tokens only.
__device__ __forceinline__ void repair(const Params &p, i64 row, i64 number, i64 first, int count,
                                       bool all) {
    const Channel<Params> channel{p, row, number};
#pragma unroll 1
    for (i64 token = first; token < first + count; token++) {
        if (token < 0 || token >= p.seqlen) {
            continue;
        }
        const i64 step = channel.token(token); // its own inverse
        const u32 mark = channel.mark(step);
        const i64 offset =
            row * p.out_batch_stride + number * p.out_dim_stride + token * p.out_seqlen_stride;
        float result = 0.0f;
        if (!(mark & MARK_PADDING)) {
            if (!all && channel.marked(step - (p.width - 2), static_cast<int>(p.width) - 1) == 0u) {
                continue;
            }
            result = channel.convolved(step);
            result = p.silu ? result * sigmoid(result) : result;
        }
        store_any(p.out, offset, static_cast<int>(p.x_dtype), result);
        if (p.marks && (mark & MARK_FINAL)) {
            store_final(p, row, number, step);
        }
    }
}

// Where the tiles of 8 tokens of a row begin, which is where vectors of 16 bytes do.
struct RowPlace {
    int start; // of the stretch; before token 0 by what the row begins behind a vector
    int limit;

    __device__ __forceinline__ RowPlace(const Params &p, i64 row, i64 channel, int number,
                                        int size) {
        const int stretch = static_cast<int>(p.part_size), seqlen = static_cast<int>(p.seqlen);
        start = number * stretch -
                lead_of(p.x, row * p.x_batch_stride + channel * p.x_dim_stride, size);
        limit = start + stretch < seqlen ? start + stretch : seqlen;
    }
};

// Whether ROWS makes the tile at a token: it is in the row, and so are the inputs before it, in a
// tile like it, or there are none. `before` counts the latter.
__device__ __forceinline__ bool makes_tile(int token, int before, int seqlen) {
    return token >= 0 && token + CONV_BATCH <= seqlen && (before == 0 || before >= CONV_BATCH);
}

// A block has 32 channels of a part, each of its warps every 8th tile of them.
__device__ __forceinline__ void convolve_steps(const Params &p) {
    const i64 channel = static_cast<i64>(blockIdx.x) * 32 + threadIdx.x % 32, part = blockIdx.y;
    const i64 stretches = (p.seqlen + p.lead + p.part_size - 1) / p.part_size;
    const i64 row_part = part / stretches, number = part - row_part * stretches;
    const i64 last_row = smaller((row_part + 1) * p.part_rows, p.batch);
    const int columns = static_cast<int>(p.width) - 1;
    if (channel >= p.dim) {
        return;
    }
    for (i64 row = row_part * p.part_rows; row < last_row; row++) {
        i64 start = number * p.part_size, limit = smaller(start + p.part_size, p.seqlen);
        if (p.rows) {
            const RowPlace place(p, row, channel, static_cast<int>(number), p.x_dtype == 0 ? 4 : 2);
            start = place.start, limit = place.limit;
        }
        const Channel<Params> one{p, row, channel};
#pragma unroll 1
        for (i64 token = start + threadIdx.x / 32 * CONV_BATCH; token < limit;
             token += blockDim.x / 32 * CONV_BATCH) {
            const i64 step = p.reverse ? p.seqlen - token - CONV_BATCH : token;
            const bool made = !p.rows || makes_tile(static_cast<int>(token), static_cast<int>(step),
                                                    static_cast<int>(p.seqlen));
            const bool begins = !p.marks && p.initial_states && step < columns;
            if (!made || begins || (p.marks && one.marked(step - columns, columns + CONV_BATCH))) {
                repair(p, row, channel, token, CONV_BATCH, !made || begins);
            }
        }
    }
}
