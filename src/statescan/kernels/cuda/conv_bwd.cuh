// SPDX-License-Identifier: Apache-2.0
// What every way to the gradients of the causal convolution needs of a channel, its states and its
// sums. The ways are in conv_bwd_rows.cuh, conv_bwd_walk.cuh and causal_conv1d_bwd.cu.

#define CONV_BATCH  8
#define ROW_THREADS 128

using Params = CausalConv1dBwdParams;

struct Gradients : Channel<Params> {
    __device__ __forceinline__ Gradients(const Params &p, i64 row, i64 channel)
        : Channel<Params>{p, row, channel} {
    }

    __device__ __forceinline__ i64 dout_at(i64 step) const {
        return row * p.dout_batch_stride + channel * p.dout_dim_stride +
               token(step) * p.dout_seqlen_stride;
    }
    __device__ __forceinline__ i64 dx_at(i64 step) const {
        return row * p.dx_batch_stride + channel * p.dx_dim_stride +
               token(step) * p.dx_seqlen_stride;
    }
    __device__ __forceinline__ float dpre(i64 step) const {
        const float dout = load_any(p.dout, dout_at(step), static_cast<int>(p.dout_dtype));
        return p.silu ? dout * silu_slope(convolved(step)) : dout;
    }
    __device__ __forceinline__ float dfinal(u32 mark, i64 column) const {
        const i64 offset = mark_state(mark, row) * p.dfinal_batch_stride +
                           channel * p.dfinal_dim_stride + column * p.dfinal_width_stride;
        return load_any(p.dfinal_states, offset, static_cast<int>(p.dfinal_dtype));
    }
    // What the final state of this sequence adds to the gradient of `step`'s input.
    __device__ __forceinline__ float from_final(i64 step) const {
        for (i64 d = 0; d < p.width - 1; d++) {
            const u32 found = mark(step + d);
            if (found & MARK_END) {
                return found & MARK_FINAL ? dfinal(found, p.width - 2 - d) : 0.0f;
            }
        }
        return 0.0f;
    }
};

// The gradient of the initial state that enters a sequence with its first step.
__device__ __noinline__ void store_dinitial(const Params &p, i64 row, i64 number, i64 step) {
    const Gradients channel(p, row, number);
    const u32 start = channel.mark(step);
    const i64 columns = p.width - 1;
    const i64 target =
        mark_state(start, row) * p.dinitial_batch_stride + number * p.dinitial_dim_stride;
    for (i64 column = 0; column < columns; column++) {
        float sum = 0.0f;
        u32 mark = start;
        // Column c is the input columns - c steps before the beginning.
        for (i64 i = 0; i <= column; i++) {
            sum += channel.tap(columns - column + i) * channel.dpre(step + i);
            if (mark & MARK_END) {
                if ((mark & MARK_FINAL) && p.dfinal_states && i < column) {
                    sum += channel.dfinal(mark, column - 1 - i);
                }
                break;
            }
            mark = channel.mark(step + i + 1);
        }
        store_any(p.dinitial_states, target + column * p.dinitial_width_stride,
                  static_cast<int>(p.initial_dtype), sum);
    }
}

__device__ __noinline__ float dfinal_of(const Params &p, i64 row, i64 number, i64 step) {
    return Gradients(p, row, number).from_final(step);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

__device__ __forceinline__ float *partial_at(const Params &p, i64 part, i64 tap, i64 channel) {
    return static_cast<float *>(p.partials) + (part * (p.width + 1) + tap) * p.dim + channel;
}

// Whether any of `count` steps needs to know where sequences begin and end.
__device__ __forceinline__ bool special(const Gradients &channel, i64 first, int count) {
    const Params &p = channel.p;
    if (p.marks) {
        return channel.marked(first, count) != 0u;
    }
    const i64 last = p.seqlen - 1;
    return (p.initial_states && first <= 0 && first + count > 0) ||
           (p.dfinal_states && first <= last && last < first + count);
}
