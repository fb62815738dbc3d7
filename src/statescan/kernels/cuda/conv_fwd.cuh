// SPDX-License-Identifier: Apache-2.0
// What every road of the forward convolution needs: the struct's name, final states, and tokens
// made anew where sequences begin. The roads are in conv_fwd_rows.cuh and causal_conv1d_fwd.cu.

enum Road { ROWS, WALK, ANY };

#define CONV_BATCH  8
#define ROW_THREADS 128

using Params = CausalConv1dFwdParams;

__device__ __noinline__ void store_final(const Params &p, i64 row, i64 number, i64 step) {
    const Channel<Params> channel{p, row, number};
    const u32 mark = channel.mark(step);
    const i64 columns = p.width - 1;
    const i64 target = (mark_state(mark, row) * p.dim + number) * columns;
    channel.inputs(step, columns, [&](i64 d, float value) {
        store_any(p.final_states, target + columns - 1 - d, static_cast<int>(p.x_dtype), value);
    });
}

// Makes tokens of a channel anew where a sequence begins near them, or all of `count` tokens from
// `first` on, and writes the final states of sequences that end there. Slow: for few tokens only.
__device__ __noinline__ void repair(const Params &p, i64 row, i64 number, i64 first, int count,
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
