// SPDX-License-Identifier: Apache-2.0
// WALK of the convolution's gradients: channels are neighbours in memory, a thread owns some of
// them. The derivation is in causal_conv1d_bwd.cu.

// Some channels walking a stretch of steps of some rows.
template <typename T, int TAPS, int CHANNELS> struct Walker {
    static constexpr int HALO = TAPS - 1;
    const Params &p;
    i64 row, channel;
    Taps<TAPS, CHANNELS> taps;
    float dtap[TAPS][CHANNELS], dbias[CHANNELS];
    float history[HALO][CHANNELS]; // inputs before the next step, newest first
    float pending[HALO][CHANNELS]; // their gradients so far
    int since;                     // steps since the sequence of the last step began, if few
    i64 start;                     // the first of the steps whose dx is wanted
    int count, real;               // how many these are; steps from the first to the row's end
    int width;
    i64 x_offset, dout_offset, dx_offset; // of the first step
    i64 x_stride, dout_stride, dx_stride; // in the order of processing

    // Not an aggregate: the compiler would clear its arrays in a loop, and so keep them in memory.
    __device__ __forceinline__ explicit Walker(const Params &params) : p(params) {
    }

    // Addresses are counted in bytes: the size of any_t is that of its numbers at run time.
    __device__ __forceinline__ i64 bytes_of(i64 numbers, i64 dtype) const {
        return sizeof(T) > 1 ? numbers * static_cast<i64>(sizeof(T)) : numbers * (dtype ? 2 : 4);
    }
    __device__ __forceinline__ i64 bytes_of(i64 numbers) const {
        return bytes_of(numbers, p.x_dtype);
    }
    static __device__ __forceinline__ const T *advanced(const T *place, i64 bytes) {
        return reinterpret_cast<const T *>(reinterpret_cast<const char *>(place) + bytes);
    }
    static __device__ __forceinline__ T *advanced(T *place, i64 bytes) {
        return reinterpret_cast<T *>(reinterpret_cast<char *>(place) + bytes);
    }
    __device__ __forceinline__ Gradients one(int n) const {
        return Gradients(p, row, channel + n);
    }
    // Steps count from the first one on from here.
    __device__ __forceinline__ void load(int step, float (&x)[CHANNELS],
                                         float (&dout)[CHANNELS]) const {
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            x[n] = dout[n] = 0.0f;
        }
        if (step < real && step < count + HALO) {
            load_n<T, CHANNELS>(p.x, x_offset + step * x_stride, p.x_dtype, x);
            load_n<T, CHANNELS>(p.dout, dout_offset + step * dout_stride, p.dout_dtype, dout);
        }
    }
    __device__ __forceinline__ void put(int step, const float (&dx)[CHANNELS]) const {
        if (step >= 0 && step < count) {
            store_n<T, CHANNELS>(p.dx, dx_offset + step * dx_stride, p.x_dtype, dx);
        }
    }
    // WHOLE: the part has all of these steps and of the HALO before them, and so has the row.
    template <bool WHOLE, bool SILU>
    __device__ __forceinline__ void plain(int step, const float (&x)[CONV_BATCH][CHANNELS],
                                          const float (&dout)[CONV_BATCH][CHANNELS], T *target,
                                          i64 target_bytes) {
        float dx[HALO + CONV_BATCH][CHANNELS]; // from HALO steps before the first one
#pragma unroll
        for (int i = 0; i < HALO; i++) {
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                dx[i][n] = pending[HALO - 1 - i][n];
            }
        }
#pragma unroll
        for (int i = 0; i < CONV_BATCH; i++) {
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                float pre = taps.bias[n];
                float input[TAPS];
#pragma unroll
                for (int d = TAPS - 1; d >= 0; d--) {
                    input[d] =
                        i >= d ? x[i >= d ? i - d : 0][n] : history[d > i ? d - i - 1 : 0][n];
                    if (has_tap<TAPS>(d, width)) {
                        pre += taps.tap[d][n] * input[d];
                    }
                }
                float dpre = SILU ? dout[i][n] * silu_slope(pre) : dout[i][n];
                dpre = WHOLE || step + i < real ? dpre : 0.0f;
                dx[HALO + i][n] = 0.0f;
                if (WHOLE || step + i < count) {
                    dbias[n] += dpre;
#pragma unroll
                    for (int d = 0; d < TAPS; d++) {
                        if (has_tap<TAPS>(d, width)) {
                            dtap[d][n] += dpre * input[d];
                        }
                    }
                }
#pragma unroll
                for (int d = 0; d < TAPS; d++) {
                    if (has_tap<TAPS>(d, width)) {
                        dx[HALO + i - d][n] += taps.tap[d][n] * dpre;
                    }
                }
            }
            const int here = step - HALO + i;
            if (WHOLE || (here >= 0 && here < count)) {
                store_n<T, CHANNELS>(target, 0, p.x_dtype, dx[i]);
            }
            target = advanced(target, target_bytes);
        }
#pragma unroll
        for (int d = 0; d < HALO; d++) {
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                history[d][n] = x[CONV_BATCH - 1 - d][n];
                pending[d][n] = dx[CONV_BATCH + HALO - 1 - d][n];
            }
        }
        since += CONV_BATCH;
    }
    // Batches from `step` to `end` that are whole and have nothing special.
    template <bool SILU> __device__ __forceinline__ int whole(int step, int end) {
        const i64 x_bytes = bytes_of(x_stride), dout_bytes = bytes_of(dout_stride, p.dout_dtype);
        const i64 dx_bytes = bytes_of(dx_stride);
        const T *x_here =
            advanced(static_cast<const T *>(p.x), bytes_of(x_offset + step * x_stride));
        const T *dout_here = advanced(static_cast<const T *>(p.dout),
                                      bytes_of(dout_offset + step * dout_stride, p.dout_dtype));
        T *target = dx_place(step);
#pragma unroll 1
        for (; step + CONV_BATCH <= end; step += CONV_BATCH) {
            float x[CONV_BATCH][CHANNELS], dout[CONV_BATCH][CHANNELS];
#pragma unroll
            for (int i = 0; i < CONV_BATCH; i++) {
                load_n<T, CHANNELS>(x_here, 0, p.x_dtype, x[i]);
                load_n<T, CHANNELS>(dout_here, 0, p.dout_dtype, dout[i]);
                x_here = advanced(x_here, x_bytes);
                dout_here = advanced(dout_here, dout_bytes);
            }
            plain<true, SILU>(step, x, dout, target, dx_bytes);
            target = advanced(target, CONV_BATCH * dx_bytes);
        }
        return step;
    }
    __device__ __forceinline__ T *dx_place(int step) const {
        return advanced(static_cast<T *>(p.dx), bytes_of(dx_offset + (step - HALO) * dx_stride));
    }
    // Where batches begin and end that need not ask: dx of the part's first steps is not there yet
    // in the first batch, final states belong to the row's last step.
    __device__ __forceinline__ int whole_end() const {
        const int end = real < count ? real : count;
        return p.marks ? 0 : (p.dfinal_states && end == real ? end - 1 : end);
    }
    __device__ __forceinline__ void begin(u32 mark) {
        since = 0;
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            const Gradients channel_n = one(n);
#pragma unroll
            for (int d = 0; d < HALO; d++) {
                history[d][n] = channel_n.initial(mark, p.width - 2 - d);
            }
        }
    }
    // One step of a sequence, whose dx so far becomes the newest pending one.
    __device__ __forceinline__ void advance(int step, u32 mark, const float (&x)[CHANNELS],
                                            const float (&dout)[CHANNELS]) {
        const bool counts = step < real && !(mark & MARK_PADDING);
        float oldest[CHANNELS];
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            float pre = taps.bias[n];
#pragma unroll
            for (int i = 0; i < HALO; i++) {
                if (has_tap<TAPS>(HALO - i, width)) {
                    pre += taps.tap[HALO - i][n] * history[HALO - 1 - i][n];
                }
            }
            pre += taps.tap[0][n] * x[n];
            float dpre = p.silu ? dout[n] * silu_slope(pre) : dout[n];
            dpre = counts ? dpre : 0.0f;
            if (counts && step < count) {
                dbias[n] += dpre;
#pragma unroll
                for (int i = 0; i < HALO; i++) {
                    if (has_tap<TAPS>(i + 1, width)) {
                        dtap[i + 1][n] += dpre * history[i][n];
                    }
                }
                dtap[0][n] += dpre * x[n];
            }
            float newest = counts ? taps.tap[0][n] * dpre : 0.0f;
#pragma unroll
            for (int d = 1; d < TAPS; d++) {
                if (counts && has_tap<TAPS>(d, width) && d <= since) {
                    pending[d - 1][n] += taps.tap[d][n] * dpre;
                }
            }
            if (counts && p.dfinal_states && (mark & MARK_FINAL)) {
                const Gradients channel_n = one(n);
                newest += p.width > 1 ? channel_n.dfinal(mark, p.width - 2) : 0.0f;
#pragma unroll
                for (int d = 1; d < HALO; d++) {
                    if (d < p.width - 1 && d <= since) {
                        pending[d - 1][n] += channel_n.dfinal(mark, p.width - 2 - d);
                    }
                }
            }
            oldest[n] = pending[HALO - 1][n];
#pragma unroll
            for (int d = HALO - 1; d > 0; d--) {
                pending[d][n] = pending[d - 1][n];
                history[d][n] = history[d - 1][n];
            }
            pending[0][n] = newest;
            history[0][n] = x[n];
        }
        put(step - HALO, oldest);
    }
    // Steps near which sequences begin or end, one by one; x and dout are in the L1 cache by now.
    __device__ __forceinline__ void marked(int first) {
#pragma unroll 1
        for (int step = first; step < first + CONV_BATCH; step++) {
            float x[CHANNELS], dout[CHANNELS];
            load(step, x, dout);
            const u32 mark = step < real ? one(0).mark(start + step) : 0u;
            since++;
            if (mark & MARK_START) {
                begin(mark);
            }
            advance(step, mark, x, dout);
        }
    }
    // Where the walk begins, in the order of processing.
    __device__ __forceinline__ void enter() {
        const Gradients first = one(0);
        real = static_cast<int>(smaller(p.seqlen - start, count + HALO));
        x_offset = first.x_at(start);
        dout_offset = first.dout_at(start);
        dx_offset = first.dx_at(start);
        // Steps since the beginning count from the step before this one.
        since = HALO;
        float before[HALO][CHANNELS];
        if (p.marks || start == 0) {
            since = load_history<Params>(first, start, before) - 1;
        } else {
#pragma unroll
            for (int d = 0; d < HALO; d++) {
                const i64 back = start > d ? d + 1 : 0;
                float input[CHANNELS];
                load_n<T, CHANNELS>(p.x, x_offset - back * x_stride, p.x_dtype, input);
#pragma unroll
                for (int n = 0; n < CHANNELS; n++) {
                    before[d][n] = input[n];
                }
            }
        }
#pragma unroll
        for (int d = 0; d < HALO; d++) {
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                history[d][n] = before[d][n];
            }
        }
#pragma unroll
        for (int d = 0; d < HALO; d++) {
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                pending[d][n] = 0.0f;
            }
        }
    }
    __device__ __forceinline__ void run() {
        enter();
#pragma unroll 1
        for (int step = 0; step < count + HALO; step += CONV_BATCH) {
            if (step > 0) {
                step = p.silu ? whole<true>(step, whole_end()) : whole<false>(step, whole_end());
                if (step >= count + HALO) {
                    break;
                }
            }
            float x[CONV_BATCH][CHANNELS], dout[CONV_BATCH][CHANNELS];
            const int there = (real < count + HALO ? real : count + HALO) - step;
            i64 x_here = x_offset + step * x_stride, dout_here = dout_offset + step * dout_stride;
#pragma unroll
            for (int i = 0; i < CONV_BATCH; i++) {
#pragma unroll
                for (int n = 0; n < CHANNELS; n++) {
                    x[i][n] = dout[i][n] = 0.0f;
                }
                if (i < there) {
                    load_n<T, CHANNELS>(p.x, x_here, p.x_dtype, x[i]);
                    load_n<T, CHANNELS>(p.dout, dout_here, p.dout_dtype, dout[i]);
                }
                x_here += x_stride;
                dout_here += dout_stride;
            }
            // Inputs of the sequence before may still be pending, which these steps must not reach.
            if (special(one(0), start + step, CONV_BATCH) || (p.marks && since + 1 < HALO)) {
                marked(step);
            } else {
                T *target = dx_place(step);
                p.silu ? plain<false, true>(step, x, dout, target, bytes_of(dx_stride))
                       : plain<false, false>(step, x, dout, target, bytes_of(dx_stride));
            }
        }
        // After the walk, in which a call of a function would keep registers from it.
        if (p.dinitial_states) {
            store_dinitials();
        }
    }
    __device__ __forceinline__ void store_dinitials() const {
        const Gradients first = one(0);
#pragma unroll 1
        for (int step = 0; step < count; step++) {
            if (!p.marks && start + step > 0) {
                return;
            }
            if (p.marks && step % 32 == 0 && first.marked(start + step, 32) == 0u) {
                step += 31;
                continue;
            }
            if (first.mark(start + step) & MARK_INITIAL) {
#pragma unroll 1
                for (int n = 0; n < CHANNELS; n++) {
                    store_dinitial(p, row, channel + n, start + step);
                }
            }
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
    const i64 stretches = (p.seqlen + p.part_size - 1) / p.part_size;
    for (i64 part = blockIdx.y; part < p.parts; part += gridDim.y) {
        i64 row_part, number;
        divide(part, stretches, row_part, number);
        Walker<T, TAPS, CHANNELS> walker(p);
        walker.channel = first;
        walker.taps.load(p, walker.channel);
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            walker.dbias[n] = 0.0f;
#pragma unroll
            for (int d = 0; d < TAPS; d++) {
                walker.dtap[d][n] = 0.0f;
            }
        }
        walker.start = number * p.part_size;
        walker.count = static_cast<int>(smaller(p.part_size, p.seqlen - walker.start));
        walker.width = static_cast<int>(p.width);
        walker.x_stride = p.reverse ? -p.x_seqlen_stride : p.x_seqlen_stride;
        walker.dout_stride = p.reverse ? -p.dout_seqlen_stride : p.dout_seqlen_stride;
        walker.dx_stride = p.reverse ? -p.dx_seqlen_stride : p.dx_seqlen_stride;
        const i64 last_row = smaller((row_part + 1) * p.part_rows, p.batch);
        for (walker.row = row_part * p.part_rows; walker.row < last_row; walker.row++) {
            walker.run();
        }
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            *partial_at(p, part, p.width, walker.channel + n) = walker.dbias[n];
#pragma unroll
            for (int d = 0; d < TAPS; d++) {
                if (d < p.width) {
                    *partial_at(p, part, d, walker.channel + n) = walker.dtap[d][n];
                }
            }
        }
    }
}
