// SPDX-License-Identifier: Apache-2.0
// out[t] = act(bias + sum over d of tap[d] x[t - d]) for every channel, and the final states.
//
// ROWS (tokens are neighbours in memory): a warp walks a stretch of one row, 256 tokens COUNT times
// at once. A lane makes 8 neighbouring tokens from one vector of 16 bytes (two in float32) and the
// last inputs of the vector before it, which lies in the L1 cache since a neighbour loads it.
// Vectors begin at 16-byte addresses, so rows may begin anywhere.
// WALK (channels are neighbours): a thread owns COUNT neighbouring channels and walks a stretch of
// tokens, 8 loads in flight, the last inputs in registers. With any_t it takes any strides.
// ANY: a thread makes one token after the other, reading everything anew; any width and strides.
//
// All of this is done as if a row were one sequence that begins with zeros. `repair` then makes the
// few tokens anew that a beginning lies near, and writes final states. So what happens once a
// sequence costs nothing elsewhere, neither registers nor branches.
// Arithmetic is float32; no shared memory.

// Some channels walking some steps of a row.
template <typename T, int TAPS, int CHANNELS> struct Walker {
    static constexpr int HALO = TAPS - 1;
    const Params &p;
    const Channel<Params> channel;
    Taps<TAPS, CHANNELS> taps;
    const int width;
    float history[HALO][CHANNELS]; // the inputs before the next step, newest first

    // Addresses are counted in bytes: the size of any_t is that of its numbers at run time.
    __device__ __forceinline__ i64 bytes_of(i64 numbers) const {
        return sizeof(T) > 1 ? numbers * static_cast<i64>(sizeof(T))
                             : numbers * (p.x_dtype == 0 ? 4 : 2);
    }
    static __device__ __forceinline__ const T *advanced(const T *place, i64 bytes) {
        return reinterpret_cast<const T *>(reinterpret_cast<const char *>(place) + bytes);
    }
    static __device__ __forceinline__ T *advanced(T *place, i64 bytes) {
        return reinterpret_cast<T *>(reinterpret_cast<char *>(place) + bytes);
    }

    // Makes CONV_BATCH steps, or `count` of them where FULL is false. The results go to `target`
    // and on, `stride` apart.
    template <bool FULL, bool SILU>
    __device__ __forceinline__ void plain(int count, const float (&now)[CONV_BATCH][CHANNELS],
                                          T *target, i64 stride) {
#pragma unroll
        for (int i = 0; i < CONV_BATCH; i++) {
            float result[CHANNELS];
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                result[n] = taps.bias[n];
#pragma unroll
                for (int d = TAPS - 1; d >= 0; d--) {
                    if (has_tap<TAPS>(d, width)) {
                        const float input =
                            i >= d ? now[i >= d ? i - d : 0][n] : history[d > i ? d - i - 1 : 0][n];
                        result[n] += taps.tap[d][n] * input;
                    }
                }
                result[n] = SILU ? result[n] * sigmoid(result[n]) : result[n];
            }
            if (FULL || i < count) {
                store_n<T, CHANNELS>(target, 0, p.x_dtype, result);
            }
            target = advanced(target, stride);
        }
#pragma unroll
        for (int d = 0; d < HALO; d++) {
#pragma unroll
            for (int n = 0; n < CHANNELS; n++) {
                history[d][n] = now[CONV_BATCH - 1 - d][n];
            }
        }
    }
    // Whole batches of steps, in which nothing is asked; returns the first step that is left.
    template <bool SILU>
    __device__ __forceinline__ i64 whole(i64 step, i64 end, const T *&source, i64 stride,
                                         T *&target, i64 out_stride) {
#pragma unroll 1
        for (; step + CONV_BATCH <= end; step += CONV_BATCH) {
            float now[CONV_BATCH][CHANNELS];
#pragma unroll
            for (int i = 0; i < CONV_BATCH; i++) {
                load_n<T, CHANNELS>(source, 0, p.x_dtype, now[i]);
                source = advanced(source, stride);
            }
            plain<true, SILU>(CONV_BATCH, now, target, out_stride);
            target = advanced(target, CONV_BATCH * out_stride);
        }
        return step;
    }
    // Tokens near which sequences begin or end, once more.
    __device__ __forceinline__ void repair_channels(i64 step, int count, bool all) {
#pragma unroll 1
        for (int n = 0; n < CHANNELS; n++) {
            repair(p, channel.row, channel.channel + n, p.reverse ? p.seqlen - step - count : step,
                   count, all);
        }
    }
    __device__ __forceinline__ void run(i64 start, i64 end) {
        taps.load(p, channel.channel);
#pragma unroll
        for (int d = 0; d < HALO; d++) {
            if (start > d) {
                load_n<T, CHANNELS>(p.x, channel.x_at(start - 1 - d), p.x_dtype, history[d]);
            } else {
#pragma unroll
                for (int n = 0; n < CHANNELS; n++) {
                    history[d][n] = 0.0f;
                }
            }
        }
        const i64 stride = bytes_of(p.reverse ? -p.x_seqlen_stride : p.x_seqlen_stride);
        const i64 out_stride = bytes_of(p.reverse ? -p.out_seqlen_stride : p.out_seqlen_stride);
        const T *source = advanced(static_cast<const T *>(p.x), bytes_of(channel.x_at(start)));
        T *target =
            advanced(static_cast<T *>(p.out), bytes_of(channel.row * p.out_batch_stride +
                                                       channel.channel * p.out_dim_stride +
                                                       channel.token(start) * p.out_seqlen_stride));
        const i64 left = p.silu ? whole<true>(start, end, source, stride, target, out_stride)
                                : whole<false>(start, end, source, stride, target, out_stride);
        if (left < end) {
            const int count = static_cast<int>(end - left);
            float now[CONV_BATCH][CHANNELS];
#pragma unroll
            for (int i = 0; i < CONV_BATCH; i++) {
#pragma unroll
                for (int n = 0; n < CHANNELS; n++) {
                    now[i][n] = 0.0f;
                }
                if (i < count) {
                    load_n<T, CHANNELS>(source, 0, p.x_dtype, now[i]);
                }
                source = advanced(source, stride);
            }
            p.silu ? plain<false, true>(count, now, target, out_stride)
                   : plain<false, false>(count, now, target, out_stride);
        }
        // After the walk, in which a call of a function would keep registers from it.
#pragma unroll 1
        for (i64 step = start; p.marks && step < end; step += CONV_BATCH) {
            if (channel.marked(step - HALO, HALO + CONV_BATCH) != 0u) {
                repair_channels(step, static_cast<int>(smaller(CONV_BATCH, end - step)), false);
            }
        }
        if (!p.marks && p.initial_states && start == 0) {
            repair_channels(0, static_cast<int>(smaller(p.width - 1, end)), true);
        }
        if (!p.marks && end == p.seqlen) {
#pragma unroll 1
            for (int n = 0; n < CHANNELS; n++) {
                store_final(p, channel.row, channel.channel + n, end - 1);
            }
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
    for (i64 row = blockIdx.z; row < p.batch; row += gridDim.z) {
        for (i64 start = blockIdx.y * p.stretch; start < p.seqlen; start += gridDim.y * p.stretch) {
            Walker<T, TAPS, CHANNELS> walker{p, {p, row, first}, {}, static_cast<int>(p.width)};
            walker.run(start, smaller(start + p.stretch, p.seqlen));
        }
    }
}

__device__ __forceinline__ void convolve_any(const Params &p) {
    const bool tokens_first = p.x_seqlen_stride <= p.x_dim_stride;
    const i64 inner = tokens_first ? p.seqlen : p.dim, outer = tokens_first ? p.dim : p.seqlen;
    for (i64 unit = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
         unit < p.batch * p.dim * p.seqlen; unit += static_cast<i64>(gridDim.x) * blockDim.x) {
        i64 rest, fast, row, slow;
        divide(unit, inner, rest, fast);
        divide(rest, outer, row, slow);
        const i64 step = tokens_first ? fast : slow;
        const Channel<Params> channel{p, row, tokens_first ? slow : fast};
        const u32 mark = channel.mark(step);
        float result = 0.0f;
        if (!(mark & MARK_PADDING)) {
            result = channel.convolved(step);
            result = p.silu ? result * sigmoid(result) : result;
        }
        const i64 offset = row * p.out_batch_stride + channel.channel * p.out_dim_stride +
                           channel.token(step) * p.out_seqlen_stride;
        store_any(p.out, offset, static_cast<int>(p.x_dtype), result);
        if (mark & MARK_FINAL) {
            store_final(p, row, channel.channel, step);
        }
    }
}

template <Road ROAD, typename T, int TAPS, int COUNT>
__device__ __forceinline__ void causal_conv1d_fwd(const Params &p) {
    if constexpr (ROAD == ROWS) {
        convolve_rows<T, TAPS, COUNT>(p);
    } else if constexpr (ROAD == WALK) {
        convolve_walk<T, TAPS, COUNT>(p);
    } else {
        convolve_any(p);
    }
}
