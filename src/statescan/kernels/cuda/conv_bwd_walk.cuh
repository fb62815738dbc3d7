// SPDX-License-Identifier: Apache-2.0
// WALK of the convolution's gradients: channels are neighbours in memory, a thread owns some of
// them. The derivation is in causal_conv1d_bwd.cu.
//
// The last TAPS inputs and the gradients of these that are still incomplete lie in rings, whose
// places are known when steps are unrolled, so that nothing is moved. What is DEPTH steps ahead is
// being loaded. As in conv_bwd_rows.cuh taps are held times -log2(e), and dpre times -ln(2).

// Some channels walking a stretch of steps of some rows.
template <typename T, int TAPS, int CHANNELS> struct Walker {
    static constexpr int HALO = TAPS - 1, DEPTH = 4;
    using Few = Numbers<T, CHANNELS>;
    const Params &p;
    const int width, dtype;
    const bool silu;
    int row;
    i64 start;      // the first of the steps whose dx is wanted
    int count;      // how many these are
    int there;      // steps from the first to the last one of which anything is needed
    int final_from; // the first step that the final state's gradient is added to
    Taps<TAPS, CHANNELS> taps;
    float dtap[TAPS][CHANNELS], dbias[CHANNELS];
    float x[TAPS][CHANNELS];       // rings: step i is at i % TAPS
    float pending[TAPS][CHANNELS]; // gradients of these so far
    Few next_x[DEPTH], next_dout[DEPTH];
    const char *x_ahead, *dout_ahead; // DEPTH steps ahead
    char *dx_behind;                  // HALO steps behind
    i64 x_stride, dout_stride, dx_stride;

    // The first of the thread's channels; held nowhere, since registers are few.
    static __device__ __forceinline__ i64 own_channel() {
        return (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * CHANNELS;
    }
    // Not an aggregate: the compiler would clear its arrays in a loop, and so keep them in memory.
    __device__ __forceinline__ Walker(const Params &params, i64 channel)
        : p(params), width(static_cast<int>(params.width)), dtype(static_cast<int>(params.x_dtype)),
          silu(params.silu != 0) {
        const i64 size = Few::size(dtype) * (p.reverse ? -1 : 1);
        x_stride = p.x_seqlen_stride * size;
        dout_stride = p.dout_seqlen_stride * size;
        dx_stride = p.dx_seqlen_stride * size;
        taps.load(p, channel);
        const float scale = silu ? -STATESCAN_LOG2E : 1.0f;
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            taps.bias[n] *= scale;
            dbias[n] = 0.0f;
#pragma unroll
            for (int d = 0; d < TAPS; d++) {
                taps.tap[d][n] *= scale;
                dtap[d][n] = 0.0f;
            }
        }
    }
    __device__ __forceinline__ void load(int slot, int step) {
        next_x[slot].load_if(x_ahead, dtype, step < there);
        next_dout[slot].load_if(dout_ahead, dtype, step < there);
        x_ahead += x_stride;
        dout_ahead += dout_stride;
    }
    // What comes before the first step as if no sequence began or ended, and the first loads.
    __device__ __forceinline__ void enter() {
        const i64 channel = own_channel();
        const Gradients first(p, row, channel);
        const int size = Few::size(dtype);
        there = static_cast<int>(smaller(p.seqlen - start, count + HALO));
        const i64 kept = p.seqlen - start - (width - 1);
        final_from = p.dfinal_states && !p.marks && kept < count ? static_cast<int>(kept) : count;
        x_ahead = static_cast<const char *>(p.x) + first.x_at(start) * size;
        dout_ahead = static_cast<const char *>(p.dout) + first.dout_at(start) * size;
        dx_behind = static_cast<char *>(p.dx) + first.dx_at(start) * size - HALO * dx_stride;
        Few before[TAPS];
#pragma unroll
        for (int d = 1; d < TAPS; d++) {
            before[d].load_if(x_ahead - d * x_stride, dtype, start >= d);
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            load(i, i);
        }
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
#pragma unroll
            for (int d = 0; d < TAPS; d++) {
                pending[d][n] = 0.0f;
                x[d][n] = d > 0 ? before[TAPS - d].at(n, dtype) : 0.0f;
            }
        }
    }
    // CONV_BATCH steps. PLAIN: they are all own ones, and neither they nor those of the batch
    // before are left out, which else `left_out` and `left_out_before` say.
    template <bool PLAIN>
    __device__ __forceinline__ void batch(int step, bool left_out, bool left_out_before) {
#pragma unroll
        for (int i = 0; i < CONV_BATCH; i++) {
            constexpr float SQUARE = STATESCAN_LN2 * STATESCAN_LN2;
            const int slot = i % DEPTH, now = i % TAPS;
            const bool own = PLAIN || (step + i < count && !left_out);
            float dpre[CHANNELS];
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                x[now][n] = next_x[slot].at(n, dtype);
                dpre[n] = next_dout[slot].at(n, dtype);
            }
            settle(x[now]);
            settle(dpre);
            load(slot, step + i + DEPTH);
            if (silu) {
#pragma unroll
                for (int n = 0; n < CHANNELS; n++) {
                    float pre = taps.bias[n];
#pragma unroll
                    for (int d = TAPS - 1; d >= 0; d--) {
                        if (has_tap<TAPS>(d, width)) {
                            pre += taps.tap[d][n] * x[(i - d + TAPS * 2) % TAPS][n];
                        }
                    }
                    const float s = reciprocal_approx(1.0f + exp2_approx(pre));
                    dpre[n] *= s * (pre * (SQUARE - SQUARE * s) - STATESCAN_LN2);
                }
            }
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                if (!PLAIN) {
                    // Outside of the row even 0 times the slope may be no number.
                    dpre[n] = step + i < there ? dpre[n] : 0.0f;
                }
                pending[now][n] = taps.tap[0][n] * dpre[n];
#pragma unroll
                for (int d = 1; d < TAPS; d++) {
                    if (has_tap<TAPS>(d, width)) {
                        pending[(i - d + TAPS * 2) % TAPS][n] += taps.tap[d][n] * dpre[n];
                    }
                }
            }
            if (own) {
#pragma unroll
                for (int n = 0; n < CHANNELS; n++) {
                    dbias[n] += dpre[n];
#pragma unroll
                    for (int d = 0; d < TAPS; d++) {
                        if (has_tap<TAPS>(d, width)) {
                            dtap[d][n] += dpre[n] * x[(i - d + TAPS * 2) % TAPS][n];
                        }
                    }
                }
            }
            const int here = step + i - HALO;
            if (PLAIN || (here >= 0 && here < count && !(i < HALO ? left_out_before : left_out))) {
                float (&dx)[CHANNELS] = pending[(i + 1) % TAPS];
                if (!PLAIN && here >= final_from) {
                    add_final(here, dx);
                }
                Few::store(dx_behind, dtype, dx);
            }
            dx_behind += dx_stride;
        }
    }
    // Autograd gives zeros for final states that nobody used, so this happens in each row. None of
    // these steps is complete before the first batch that is not plain.
    __device__ __forceinline__ void add_final(int here, float (&dx)[CHANNELS]) const {
        const i64 place = row * p.dfinal_batch_stride + own_channel() * p.dfinal_dim_stride +
                          (here - final_from) * p.dfinal_width_stride;
        const int format = static_cast<int>(p.dfinal_dtype);
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            dx[n] += load_any(p.dfinal_states, place + n * p.dfinal_dim_stride, format);
        }
    }
    __device__ __forceinline__ void run() {
        enter();
        bool left_out_before = true; // no step before the first one is wanted
#pragma unroll 1
        for (int step = 0; step < count + HALO; step += CONV_BATCH) {
            const bool left_out = special_batch<TAPS>(p, row, start + step);
            if (step + CONV_BATCH <= count && !left_out && !left_out_before) {
                batch<true>(step, false, false);
            } else {
                batch<false>(step, left_out, left_out_before);
            }
            left_out_before = left_out;
        }
    }
};

// The grid's x counts groups of channels, a thread each, and y parts: stretches of some rows.
template <typename T, int TAPS, int CHANNELS>
__device__ __forceinline__ void gradients_walk(const Params &p) {
    const i64 first = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * CHANNELS;
    if (first >= p.dim) {
        return;
    }
    const i64 part = blockIdx.y, stretches = (p.seqlen + p.part_size - 1) / p.part_size;
    const i64 row_part = part / stretches, number = part - row_part * stretches;
    const int last_row = static_cast<int>(smaller((row_part + 1) * p.part_rows, p.batch));
    Walker<T, TAPS, CHANNELS> walker(p, first);
    walker.start = number * p.part_size;
    walker.count = static_cast<int>(smaller(p.part_size, p.seqlen - walker.start));
    for (walker.row = static_cast<int>(row_part * p.part_rows); walker.row < last_row;
         walker.row++) {
        walker.run();
    }
    const float scale = p.silu ? -STATESCAN_LOG2E : 1.0f;
#pragma unroll
    for (int n = 0; n < CHANNELS; n++) {
        *partial_at(p, part, p.width, first + n) = walker.dbias[n] * scale;
#pragma unroll
        for (int d = 0; d < TAPS; d++) {
            if (d < p.width) {
                *partial_at(p, part, d, first + n) = walker.dtap[d][n] * scale;
            }
        }
    }
}
