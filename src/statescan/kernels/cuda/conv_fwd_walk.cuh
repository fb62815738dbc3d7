// SPDX-License-Identifier: Apache-2.0
// WALK of the forward convolution: channels are neighbours in memory, a thread owns some of them.
//
// The last TAPS inputs lie in a ring, whose places are known when steps are unrolled, so that
// nothing is moved. What is DEPTH steps ahead is being loaded. Taps as in conv_fwd_rows.cuh.

template <typename T, int TAPS, int CHANNELS> struct Walker {
    static constexpr int DEPTH = 8;
    using Few = Numbers<T, CHANNELS>;
    const Params &p;
    const int width, dtype;
    const bool silu;
    int count; // steps
    Taps<TAPS, CHANNELS> taps;
    float x[TAPS][CHANNELS]; // step i is at i % TAPS
    Few next[DEPTH];
    const char *x_ahead; // DEPTH steps ahead
    char *out;
    i64 x_stride, out_stride;

    __device__ __forceinline__ Walker(const Params &params)
        : p(params), width(static_cast<int>(params.width)), dtype(static_cast<int>(params.x_dtype)),
          silu(params.silu != 0) {
    }
    __device__ __forceinline__ void load(int slot, int step) {
        next[slot].load_if(x_ahead, dtype, step < count);
        x_ahead += x_stride;
    }
    __device__ __forceinline__ void enter(i64 row, i64 channel, i64 start) {
        const Channel<Params> first{p, row, channel};
        const int size = Few::size(dtype);
        x_stride = p.x_seqlen_stride * (p.reverse ? -size : size);
        out_stride = p.out_seqlen_stride * (p.reverse ? -size : size);
        x_ahead = static_cast<const char *>(p.x) + first.x_at(start) * size;
        out = static_cast<char *>(p.out) + (row * p.out_batch_stride + channel * p.out_dim_stride +
                                            first.token(start) * p.out_seqlen_stride) *
                                               size;
        Few before[TAPS];
#pragma unroll
        for (int d = 1; d < TAPS; d++) {
            before[d].load_if(x_ahead - d * x_stride, dtype, start >= d);
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            load(i, i);
        }
        taps.load(p, channel);
        const float scale = silu ? -STATESCAN_LOG2E : 1.0f;
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            taps.bias[n] *= scale;
#pragma unroll
            for (int d = 0; d < TAPS; d++) {
                taps.tap[d][n] *= scale;
                x[d][n] = d > 0 ? before[TAPS - d].at(n, dtype) : 0.0f;
            }
        }
    }
    __device__ __forceinline__ void batch(int step) {
#pragma unroll
        for (int i = 0; i < CONV_BATCH; i++) {
            float results[CHANNELS];
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                x[i % TAPS][n] = next[i % DEPTH].at(n, dtype);
            }
            settle(x[i % TAPS]);
            load(i % DEPTH, step + i + DEPTH);
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                results[n] = taps.bias[n];
#pragma unroll
                for (int d = TAPS - 1; d >= 0; d--) {
                    if (has_tap<TAPS>(d, width)) {
                        results[n] += taps.tap[d][n] * x[(i - d + TAPS) % TAPS][n];
                    }
                }
                results[n] = silu ? scaled_silu(results[n]) : results[n];
            }
            if (step + i < count) {
                Few::store(out, dtype, results);
            }
            out += out_stride;
        }
    }
};

// The grid's x counts groups of channels (a thread each), y stretches of a row, z rows.
template <typename T, int TAPS, int CHANNELS>
__device__ __forceinline__ void convolve_walk(const Params &p) {
    const i64 first = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * CHANNELS;
    if (first >= p.dim) {
        return;
    }
    const i64 stretches = (p.seqlen + p.part_size - 1) / p.part_size;
    const i64 row_part = blockIdx.y / stretches;
    const i64 start = (blockIdx.y - row_part * stretches) * p.part_size;
    const i64 last_row = smaller((row_part + 1) * p.part_rows, p.batch);
    for (i64 row = row_part * p.part_rows; row < last_row; row++) {
        Walker<T, TAPS, CHANNELS> walker(p);
        walker.count = static_cast<int>(smaller(p.part_size, p.seqlen - start));
        walker.enter(row, first, start);
#pragma unroll 1
        for (int step = 0; step < walker.count; step += CONV_BATCH) {
            walker.batch(step);
        }
#pragma unroll 1
        for (int i = 0; !p.marks && start == 0 && i < CHANNELS * (p.width - 1); i++) {
            store_row_end(p, row, first + i % CHANNELS, i / CHANNELS);
        }
    }
}
