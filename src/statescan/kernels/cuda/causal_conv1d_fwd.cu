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

// What a lane knows of the row that its warp works on.
template <typename T, int TAPS> struct Row {
    const Params &p;
    const T *x;
    T *out;
    i64 row, channel;
    int seqlen, width;
    bool together; // whether vectors of x and out are aligned together
    bool reverse, silu;
    WarpTaps<TAPS> taps; // on their way until the first inputs are
    bool known;
    float tap[TAPS], bias;

    __device__ __forceinline__ void know_taps() {
        if (!known) {
            taps.share(tap, bias);
            known = true;
        }
    }
};

enum TileKind { WHOLE, EDGE, OUTSIDE };

template <typename T, int TAPS> struct Tile {
    Packed<T, CONV_BATCH> own;
    Packed<T, TAPS> halo;
    TileKind kind;

    // All tokens of a whole tile are in the row, and so are those of its halo, or none of them.
    static __device__ __forceinline__ TileKind kind_of(const Row<T, TAPS> &row, int token,
                                                       int limit) {
        const int rest = row.seqlen - token - CONV_BATCH; // tokens that follow the tile
        const int before = row.reverse ? rest : token;
        if (token >= limit) {
            return OUTSIDE;
        }
        return token >= 0 && rest >= 0 && (before == 0 || before >= TAPS) ? WHOLE : EDGE;
    }
    __device__ __forceinline__ void load(const Row<T, TAPS> &row, int token, int limit) {
        own.clear();
        halo.clear();
        kind = kind_of(row, token, limit);
        if (kind == WHOLE) {
            const T *here = row.x + token;
            own.load(here);
            if (row.reverse ? token + CONV_BATCH < row.seqlen : token > 0) {
                halo.load(here + (row.reverse ? CONV_BATCH : -TAPS));
            }
        }
    }
    // Whether tokens of the tile must be made by `repair`: all (2), some (1) or none.
    static __device__ __forceinline__ int rest(const Row<T, TAPS> &row, int token, TileKind kind) {
        constexpr int HALO = TAPS - 1;
        const Params &p = row.p;
        const int step = row.reverse ? row.seqlen - token - CONV_BATCH : token;
        if (kind != WHOLE) {
            return kind == EDGE ? 2 : 0;
        }
        if (p.marks) {
            const Channel<Params> channel{p, row.row, row.channel};
            return channel.marked(step - HALO, HALO + CONV_BATCH) != 0u ? 1 : 0;
        }
        return p.initial_states && step == 0 ? 2 : 0;
    }
    __device__ __forceinline__ void store(const Row<T, TAPS> &row, int token) const {
        constexpr int HALO = TAPS - 1;
        if (kind != WHOLE) {
            return;
        }
        float x[HALO + CONV_BATCH], result[CONV_BATCH];
#pragma unroll
        for (int i = 0; i < HALO; i++) {
            x[i] = halo.at(i + 1);
        }
#pragma unroll
        for (int i = 0; i < CONV_BATCH; i++) {
            x[HALO + i] = own.at(i);
            result[i] = row.bias;
        }
        if (row.reverse) {
#pragma unroll
            for (int i = 0; i < HALO; i++) {
                x[i] = halo.at(HALO - 1 - i);
            }
#pragma unroll
            for (int i = 0; i < CONV_BATCH; i++) {
                x[HALO + i] = own.at(CONV_BATCH - 1 - i);
            }
        }
#pragma unroll
        for (int d = TAPS - 1; d >= 0; d--) {
            if (has_tap<TAPS>(d, row.width)) {
#pragma unroll
                for (int i = 0; i < CONV_BATCH; i++) {
                    result[i] += row.tap[d] * x[HALO + i - d];
                }
            }
        }
        if (row.silu) {
#pragma unroll
            for (int i = 0; i < CONV_BATCH; i++) {
                result[i] = result[i] * sigmoid(result[i]);
            }
        }
        if (row.reverse) {
            turn_around(result);
        }
        if (row.together) {
            store_n<T, CONV_BATCH>(row.out + token, 0, 0, result);
        } else {
#pragma unroll
            for (int i = 0; i < CONV_BATCH; i++) {
                row.out[token + i] = from_float<T>(result[i]);
            }
        }
    }
};

// Tiles amid an aligned row, of all lanes. Nothing is asked of them but whether the row begins (in
// reverse: ends) with one, which has no halo; what else may be special is for `repair`.
template <typename T, int TAPS, int COUNT, bool REVERSE, bool SILU>
__device__ __forceinline__ void convolve_whole(Row<T, TAPS> &row, int &base, int limit) {
    constexpr int STEP = 32 * CONV_BATCH, HALO = TAPS - 1;
    int token = base + static_cast<int>(threadIdx.x % 32) * CONV_BATCH;
    const T *x = row.x + token;
    T *out = row.out + token;
#pragma unroll 1
    for (; base + COUNT * STEP <= limit; base += COUNT * STEP) {
        Packed<T, CONV_BATCH> own[COUNT];
        Packed<T, TAPS> halo[COUNT];
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            own[k].load(x + k * STEP);
            halo[k].clear();
            const bool has = REVERSE ? k + 1 < COUNT || token + k * STEP + CONV_BATCH < row.seqlen
                                     : k > 0 || token > 0;
            if (has) {
                halo[k].load(x + k * STEP + (REVERSE ? CONV_BATCH : -TAPS));
            }
        }
        row.know_taps();
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            float result[CONV_BATCH];
#pragma unroll
            for (int i = 0; i < CONV_BATCH; i++) {
                result[i] = row.bias;
            }
#pragma unroll
            for (int d = HALO; d >= 0; d--) {
                if (has_tap<TAPS>(d, row.width)) {
#pragma unroll
                    for (int i = 0; i < CONV_BATCH; i++) {
                        const int from = REVERSE ? i + d : i - d;
                        const float x_there = from < 0             ? halo[k].at(TAPS + from)
                                              : from >= CONV_BATCH ? halo[k].at(from - CONV_BATCH)
                                                                   : own[k].at(from);
                        result[i] += row.tap[d] * x_there;
                    }
                }
            }
            if (SILU) {
#pragma unroll
                for (int i = 0; i < CONV_BATCH; i++) {
                    result[i] = result[i] * sigmoid(result[i]);
                }
            }
            store_n<T, CONV_BATCH>(out + k * STEP, 0, 0, result);
        }
        token += COUNT * STEP;
        x += COUNT * STEP;
        out += COUNT * STEP;
    }
}

template <typename T, int TAPS, int COUNT>
__device__ __forceinline__ void convolve_whole(Row<T, TAPS> &row, int &base, int limit) {
    if (row.reverse) {
        row.silu ? convolve_whole<T, TAPS, COUNT, true, true>(row, base, limit)
                 : convolve_whole<T, TAPS, COUNT, true, false>(row, base, limit);
    } else {
        row.silu ? convolve_whole<T, TAPS, COUNT, false, true>(row, base, limit)
                 : convolve_whole<T, TAPS, COUNT, false, false>(row, base, limit);
    }
}

// The last inputs of an unpacked row, a lane each.
template <typename T>
__device__ __forceinline__ void store_row_end(const Params &p, i64 row, i64 number, int column) {
    const Channel<Params> channel{p, row, number};
    const i64 columns = p.width - 1, step = p.seqlen - columns + column;
    if (column >= columns) {
        return;
    }
    const float value = step >= 0 ? to_float(static_cast<const T *>(p.x)[channel.x_at(step)])
                                  : channel.initial(MARK_INITIAL, columns + step);
    static_cast<T *>(p.final_states)[(row * p.dim + number) * columns + column] =
        from_float<T>(value);
}

// The grid's x counts groups of 4 channels, y stretches of a row, z rows.
template <typename T, int TAPS, int COUNT>
__device__ __forceinline__ void convolve_rows(const Params &p) {
    const int lane = threadIdx.x % 32;
    const i64 channel = static_cast<i64>(blockIdx.x) * (ROW_THREADS / 32) + threadIdx.x / 32;
    if (channel >= p.dim) {
        return;
    }
    constexpr int STEP = 32 * CONV_BATCH;
    const int stretch = static_cast<int>(p.stretch), seqlen = static_cast<int>(p.seqlen);
    Row<T, TAPS> row{p};
    row.taps.load(p, channel);
    row.known = false;
    for (i64 number = blockIdx.z; number < p.batch; number += gridDim.z) {
        row.x = static_cast<const T *>(p.x) + number * p.x_batch_stride + channel * p.x_dim_stride;
        row.out =
            static_cast<T *>(p.out) + number * p.out_batch_stride + channel * p.out_dim_stride;
        row.row = number;
        row.channel = channel;
        row.seqlen = seqlen;
        row.width = static_cast<int>(p.width);
        row.reverse = p.reverse != 0;
        row.silu = p.silu != 0;
        const int lead = static_cast<int>(RowVectors<T>{row.x, seqlen}.lead());
        row.together = RowVectors<T>{row.out, seqlen}.lead() == lead;
        for (int start = static_cast<int>(blockIdx.y) * stretch - lead; start < seqlen;
             start += static_cast<int>(gridDim.y) * stretch) {
            const int limit = start + stretch < seqlen ? start + stretch : seqlen;
            // In reverse a halo follows the tile, and must be in the row whole or not at all.
            const bool ragged = row.reverse && ((seqlen - start) & (CONV_BATCH - 1)) != 0;
            const int whole = ragged ? static_cast<int>(smaller(limit, seqlen - TAPS)) : limit;
            const bool begins = row.reverse ? limit == seqlen : start <= 0;
            bool rests = p.marks != nullptr || (p.initial_states && begins);
#pragma unroll 1
            for (int base = start; base < limit;) {
                if (row.together && base >= 0) {
                    convolve_whole<T, TAPS, COUNT>(row, base, whole);
                    convolve_whole<T, TAPS, COUNT / 2>(row, base, whole);
                    convolve_whole<T, TAPS, 1>(row, base, whole);
                    if (base >= limit) {
                        break;
                    }
                }
                const int token = base + lane * CONV_BATCH;
                Tile<T, TAPS> tile;
                tile.load(row, token, limit);
                row.know_taps();
                tile.store(row, token);
                rests = rests || Tile<T, TAPS>::rest(row, token, tile.kind) != 0;
                base += STEP;
            }
            // After the walk, in which a call of a function would keep registers from it.
#pragma unroll 1
            for (int token = start + lane * CONV_BATCH; rests && token < limit; token += STEP) {
                const TileKind kind = Tile<T, TAPS>::kind_of(row, token, limit);
                const int rest = Tile<T, TAPS>::rest(row, token, kind);
                if (rest != 0) {
                    repair(p, number, channel, token, CONV_BATCH, rest == 2);
                }
            }
            if (!p.marks && limit == seqlen) {
                store_row_end<T>(p, number, channel, lane);
            }
        }
    }
}

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
