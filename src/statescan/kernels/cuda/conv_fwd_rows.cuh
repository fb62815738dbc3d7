// SPDX-License-Identifier: Apache-2.0
// ROWS of the forward convolution: tokens are neighbours in memory, a warp walks a stretch of one
// row.

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
