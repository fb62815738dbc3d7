// SPDX-License-Identifier: Apache-2.0
// ROWS of the convolution's gradients: tokens are neighbours in memory, a warp owns a channel.
// The derivation is in causal_conv1d_bwd.cu.

// The inputs and the sums of a special tile.
template <typename T, int TAPS> struct RowGradients {
    static constexpr int HALO = TAPS - 1;
    Taps<TAPS, 1> taps;
    float dtap[TAPS], dbias;
    float x[HALO + CONV_BATCH + TAPS]; // from HALO steps before the first one
    float dpre[CONV_BATCH + TAPS];     // dout at first

    __device__ __forceinline__ void load(const Params &p, const RowVectors<T> &rows,
                                         const RowVectors<T> &douts, i64 first_token) {
        const i64 low = first_token - TAPS, high = first_token + CONV_BATCH;
        float own[CONV_BATCH], before[TAPS], after[TAPS], dout[CONV_BATCH], dout_after[TAPS];
        rows.load(first_token, own);
        rows.load(p.reverse ? high : low, before);
        rows.load(p.reverse ? low : high, after);
        if (rows.lead() == douts.lead()) {
            douts.load(first_token, dout);
            douts.load(p.reverse ? low : high, dout_after);
        } else {
            load_apart(douts, first_token, dout);
            load_apart(douts, p.reverse ? low : high, dout_after);
        }
        if (p.reverse) {
            turn_around(own);
            turn_around(before);
            turn_around(after);
            turn_around(dout);
            turn_around(dout_after);
        }
#pragma unroll
        for (int i = 0; i < HALO; i++) {
            x[i] = before[i + 1];
        }
#pragma unroll
        for (int i = 0; i < CONV_BATCH; i++) {
            x[HALO + i] = own[i];
            dpre[i] = dout[i];
        }
#pragma unroll
        for (int i = 0; i < TAPS; i++) {
            x[HALO + CONV_BATCH + i] = after[i];
            dpre[CONV_BATCH + i] = dout_after[i];
        }
    }
    // Where vectors of dout do not begin at multiples of 16 bytes together with those of x.
    template <int N>
    __device__ __forceinline__ void load_apart(const RowVectors<T> &rows, i64 first,
                                               float (&values)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const i64 token = first + i;
            values[i] = token >= 0 && token < rows.seqlen ? to_float(rows.data[token]) : 0.0f;
        }
    }
};

template <int TAPS> struct SharedWindow {
    float x[2 * TAPS + CONV_BATCH][ROW_THREADS];
    float dpre[TAPS + CONV_BATCH][ROW_THREADS];
    float sums[TAPS + 1][ROW_THREADS];
};

// A tile near which sequences begin or end. Its inputs and dpre lie in shared memory, a column a
// thread, so that steps can be loops; dx of step i takes the place of an input that was needed.
template <typename T, int TAPS>
__device__ __forceinline__ void add_marked(const Gradients &channel, RowGradients<T, TAPS> &sums,
                                           i64 first_step, SharedWindow<TAPS> &shared,
                                           float (&dx)[CONV_BATCH]) {
    constexpr int HALO = TAPS - 1;
    const Params &p = channel.p;
    const int me = threadIdx.x;
    const i64 first = first_step - HALO;
    StepMarks marks;
    marks.load(channel, first, 2 * HALO + CONV_BATCH);
#pragma unroll
    for (int i = 0; i < 2 * HALO + CONV_BATCH; i++) {
        shared.x[i][me] = sums.x[i];
    }
#pragma unroll
    for (int i = 0; i < HALO + CONV_BATCH; i++) {
        shared.dpre[i][me] = sums.dpre[i];
    }
#pragma unroll 1
    for (int i = 0; i < CONV_BATCH + HALO; i++) {
        const i64 step = first_step + i;
        float input[TAPS], pre = sums.taps.bias[0];
#pragma unroll
        for (int d = TAPS - 1; d >= 0; d--) {
            input[d] = 0.0f;
            if (d < p.width) {
                input[d] =
                    joined_input(channel, marks, first, HALO + i, d, shared.x[HALO + i - d][me]);
                pre += sums.taps.tap[d][0] * input[d];
            }
        }
        const bool real = step >= 0 && step < p.seqlen && !((marks.padding >> (HALO + i)) & 1u);
        const float slope = p.silu ? silu_slope(pre) : 1.0f;
        const float dpre = real ? shared.dpre[i][me] * slope : 0.0f;
        shared.dpre[i][me] = dpre;
        if (i < CONV_BATCH && real) {
            sums.dbias += dpre;
#pragma unroll
            for (int d = 0; d < TAPS; d++) {
                sums.dtap[d] += d < p.width ? dpre * input[d] : 0.0f;
            }
        }
    }
#pragma unroll 1
    for (int i = 0; i < CONV_BATCH; i++) {
        const i64 step = first_step + i;
        const bool real = step >= 0 && step < p.seqlen && !((marks.padding >> (HALO + i)) & 1u);
        float sum = 0.0f;
#pragma unroll
        for (int d = 0; d < TAPS; d++) {
            if (d < p.width && marks.joined(HALO + i, HALO + i + d)) {
                sum += sums.taps.tap[d][0] * shared.dpre[i + d][me];
            }
        }
        if (real && p.dfinal_states && (marks.final >> (HALO + i)) != 0u) {
            sum += dfinal_of(p, channel.row, channel.channel, step);
        }
        if (p.dinitial_states && ((marks.initial >> (HALO + i)) & 1u)) {
            store_dinitial(p, channel.row, channel.channel, step);
        }
        shared.x[i][me] = real ? sum : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < CONV_BATCH; i++) {
        dx[i] = shared.x[i][me];
    }
}

// A tile near which a sequence begins or ends, or that reaches out of the row, for one lane; its
// sums are added to the lane's column of `sums`.
template <typename T, int TAPS>
__device__ __noinline__ void special_tile(const Params &p, i64 row, i64 number, int first_token,
                                          SharedWindow<TAPS> &shared) {
    const Gradients channel(p, row, number);
    const RowVectors<T> rows = {
        static_cast<const T *>(p.x) + row * p.x_batch_stride + number * p.x_dim_stride, p.seqlen};
    const RowVectors<T> douts = {static_cast<const T *>(p.dout) + row * p.dout_batch_stride +
                                     number * p.dout_dim_stride,
                                 p.seqlen};
    const i64 first_step = p.reverse ? p.seqlen - first_token - CONV_BATCH : first_token;
    RowGradients<T, TAPS> sums;
    sums.taps.load(p, number);
    sums.dbias = 0.0f;
#pragma unroll
    for (int d = 0; d < TAPS; d++) {
        sums.dtap[d] = 0.0f;
    }
    sums.load(p, rows, douts, first_token);
    float dx[CONV_BATCH];
    add_marked(channel, sums, first_step, shared, dx);
    if (p.reverse) {
        turn_around(dx);
    }
    T *target = static_cast<T *>(p.dx) + row * p.dx_batch_stride + number * p.dx_dim_stride;
    store_row(target, p.seqlen, first_token, dx);
#pragma unroll
    for (int d = 0; d < TAPS; d++) {
        shared.sums[d][threadIdx.x] += sums.dtap[d];
    }
    shared.sums[TAPS][threadIdx.x] += sums.dbias;
}

// What a lane knows of the row that its warp works on.
template <typename T> struct Row {
    const T *x;
    const T *dout;
    T *dx;
    bool together; // whether vectors of all three are aligned together
    bool reverse, silu;
    int seqlen, width;
};

// 8 tokens of a lane whose surroundings hold nothing special.
template <typename T, int TAPS> struct Tile {
    static constexpr int HALO = TAPS - 1;
    Packed<T, CONV_BATCH> x, dout;
    Packed<T, TAPS> x_low, x_high, dout_near; // dout of the steps after

    // Of a tile amid its row, or with nothing of it before or after. The order is that in memory.
    template <bool REVERSE>
    __device__ __forceinline__ void load(const Row<T> &row, int token, bool low, bool high) {
        const T *x_here = row.x + token;
        const T *dout_here = row.dout + token;
        x.load(x_here);
        dout.load(dout_here);
        x_low.clear();
        x_high.clear();
        dout_near.clear();
        if (low) {
            x_low.load(x_here - TAPS);
        }
        if (high) {
            x_high.load(x_here + CONV_BATCH);
        }
        if (REVERSE ? low : high) {
            dout_near.load(dout_here + (REVERSE ? -TAPS : CONV_BATCH));
        }
    }
    // Steps from HALO before the first own one, in the order of processing.
    template <bool REVERSE>
    __device__ __forceinline__ void unpack(float (&xs)[2 * HALO + CONV_BATCH],
                                           float (&dpre)[HALO + CONV_BATCH]) const {
#pragma unroll
        for (int i = 0; i < HALO; i++) {
            xs[i] = REVERSE ? x_high.at(HALO - 1 - i) : x_low.at(i + 1);
            xs[HALO + CONV_BATCH + i] = REVERSE ? x_low.at(TAPS - 1 - i) : x_high.at(i);
            dpre[CONV_BATCH + i] = dout_near.at(REVERSE ? TAPS - 1 - i : i);
        }
#pragma unroll
        for (int i = 0; i < CONV_BATCH; i++) {
            xs[HALO + i] = x.at(REVERSE ? CONV_BATCH - 1 - i : i);
            dpre[i] = dout.at(REVERSE ? CONV_BATCH - 1 - i : i);
        }
    }
    // `ends` says that the row does, with this tile's last step.
    template <bool REVERSE, bool SILU>
    __device__ __forceinline__ void run(const Gradients &place, const Row<T> &row, T *target,
                                        bool ends, const float (&tap)[TAPS], float bias,
                                        float (&dtap)[TAPS], float &dbias) const {
        float xs[2 * HALO + CONV_BATCH], dpre[HALO + CONV_BATCH], dx[CONV_BATCH];
        unpack<REVERSE>(xs, dpre);
        if (SILU) {
            float pre[HALO + CONV_BATCH];
#pragma unroll
            for (int i = 0; i < HALO + CONV_BATCH; i++) {
                pre[i] = bias;
            }
#pragma unroll
            for (int d = TAPS - 1; d >= 0; d--) {
                if (has_tap<TAPS>(d, row.width)) {
#pragma unroll
                    for (int i = 0; i < HALO + CONV_BATCH; i++) {
                        pre[i] += tap[d] * xs[HALO + i - d];
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < HALO + CONV_BATCH; i++) {
                dpre[i] *= silu_slope(pre[i]);
            }
        }
        if (ends) {
            // There 0 times the slope may be no number.
#pragma unroll
            for (int i = 0; i < HALO; i++) {
                dpre[CONV_BATCH + i] = 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < CONV_BATCH; i++) {
            dbias += dpre[i];
            dx[i] = 0.0f;
        }
#pragma unroll
        for (int d = 0; d < TAPS; d++) {
            if (has_tap<TAPS>(d, row.width)) {
#pragma unroll
                for (int i = 0; i < CONV_BATCH; i++) {
                    dtap[d] += dpre[i] * xs[HALO + i - d];
                    dx[i] += tap[d] * dpre[i + d];
                }
            }
        }
        if (place.p.dfinal_states && ends && !place.p.marks) {
            // Autograd gives zeros for final states that nobody used, so this happens in each row.
#pragma unroll
            for (int i = CONV_BATCH - HALO; i < CONV_BATCH; i++) {
                const int column = i - CONV_BATCH + row.width - 1;
                dx[i] += column >= 0 ? place.dfinal(MARK_FINAL, column) : 0.0f;
            }
        }
        if (REVERSE) {
            turn_around(dx);
        }
        store_n<T, CONV_BATCH>(target, 0, 0, dx);
    }
};

// Tiles amid an aligned row without marks, of all lanes: nothing is asked but where the row ends.
// COUNT of them are on their way at once.
template <typename T, int TAPS, int COUNT, bool REVERSE, bool SILU>
__device__ __forceinline__ void gradients_whole(const Gradients &place, const Row<T> &row,
                                                int &base, int limit, const float (&tap)[TAPS],
                                                float bias, float (&dtap)[TAPS], float &dbias) {
    constexpr int STEP = 32 * CONV_BATCH;
    int token = base + static_cast<int>(threadIdx.x % 32) * CONV_BATCH;
#pragma unroll 1
    for (; base + COUNT * STEP <= limit; base += COUNT * STEP) {
        Tile<T, TAPS> tiles[COUNT];
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const int here = token + k * STEP;
            tiles[k].template load<REVERSE>(row, here, k > 0 || here > 0,
                                            here + CONV_BATCH < row.seqlen);
        }
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const int here = token + k * STEP;
            const bool ends = REVERSE ? here == 0 : here + CONV_BATCH == row.seqlen;
            tiles[k].template run<REVERSE, SILU>(place, row, row.dx + here, ends, tap, bias, dtap,
                                                 dbias);
        }
        token += COUNT * STEP;
    }
}

template <typename T, int TAPS, int COUNT>
__device__ __forceinline__ void gradients_whole(const Gradients &place, const Row<T> &row,
                                                int &base, int limit, const float (&tap)[TAPS],
                                                float bias, float (&dtap)[TAPS], float &dbias) {
    if (row.reverse) {
        row.silu ? gradients_whole<T, TAPS, COUNT, true, true>(place, row, base, limit, tap, bias,
                                                               dtap, dbias)
                 : gradients_whole<T, TAPS, COUNT, true, false>(place, row, base, limit, tap, bias,
                                                                dtap, dbias);
    } else {
        row.silu ? gradients_whole<T, TAPS, COUNT, false, true>(place, row, base, limit, tap, bias,
                                                                dtap, dbias)
                 : gradients_whole<T, TAPS, COUNT, false, false>(place, row, base, limit, tap, bias,
                                                                 dtap, dbias);
    }
}

// One tile of each lane, wherever it lies and whatever is special about it.
template <typename T, int TAPS>
__device__ __forceinline__ void
gradients_tile(const Gradients &place, const Row<T> &row, int token, const float (&tap)[TAPS],
               float bias, float (&dtap)[TAPS], float &dbias, SharedWindow<TAPS> &window) {
    constexpr int HALO = TAPS - 1;
    const Params &p = place.p;
    const int rest = row.seqlen - token - CONV_BATCH; // tokens that follow the tile
    const bool low = token >= TAPS, high = rest >= TAPS;
    const bool ends = row.reverse ? !low : !high;
    bool plain = row.together;
    if (!low || !high) {
        plain = plain && (low || token == 0) && (high || rest == 0);
    }
    if (p.marks || p.initial_states) {
        const int before = row.reverse ? rest : token;
        plain = plain && (p.marks ? place.marked(before - HALO, 2 * HALO + CONV_BATCH) == 0u
                                  : before > HALO);
    }
    if (!plain) {
        special_tile<T, TAPS>(p, place.row, place.channel, token, window);
        return;
    }
    Tile<T, TAPS> tile;
    T *target = row.dx + token;
    if (row.reverse) {
        tile.template load<true>(row, token, low, high);
        row.silu ? tile.template run<true, true>(place, row, target, ends, tap, bias, dtap, dbias)
                 : tile.template run<true, false>(place, row, target, ends, tap, bias, dtap, dbias);
    } else {
        tile.template load<false>(row, token, low, high);
        row.silu
            ? tile.template run<false, true>(place, row, target, ends, tap, bias, dtap, dbias)
            : tile.template run<false, false>(place, row, target, ends, tap, bias, dtap, dbias);
    }
}

// The grid's x counts groups of 4 channels, a warp each, and y parts: stretches of some rows.
template <typename T, int TAPS, int COUNT>
__device__ __forceinline__ void gradients_rows(const Params &p) {
    constexpr int STEP = 32 * CONV_BATCH;
    __shared__ SharedWindow<TAPS> window;
    const int lane = threadIdx.x % 32, seqlen = static_cast<int>(p.seqlen);
    const int stretch = static_cast<int>(p.part_size);
    const i64 channel = static_cast<i64>(blockIdx.x) * (ROW_THREADS / 32) + threadIdx.x / 32;
    if (channel >= p.dim) {
        return;
    }
    WarpTaps<TAPS> taps;
    taps.load(p, channel);
    float tap[TAPS], bias;
    taps.share(tap, bias);
    const int stretches = static_cast<int>((p.seqlen + p.lead + stretch - 1) / stretch);
    for (i64 part = blockIdx.y; part < p.parts; part += gridDim.y) {
        float dtap[TAPS] = {}, dbias = 0.0f;
#pragma unroll
        for (int d = 0; d <= TAPS; d++) {
            window.sums[d][threadIdx.x] = 0.0f;
        }
        const i64 row_part = part / stretches;
        const int number = static_cast<int>(part - row_part * stretches);
        const i64 last_row = smaller((row_part + 1) * p.part_rows, p.batch);
        for (i64 b = row_part * p.part_rows; b < last_row; b++) {
            const Gradients place(p, b, channel);
            Row<T> row = {
                static_cast<const T *>(p.x) + b * p.x_batch_stride + channel * p.x_dim_stride,
                static_cast<const T *>(p.dout) + b * p.dout_batch_stride +
                    channel * p.dout_dim_stride,
                static_cast<T *>(p.dx) + b * p.dx_batch_stride + channel * p.dx_dim_stride,
                true,
                p.reverse != 0,
                p.silu != 0,
                seqlen,
                static_cast<int>(p.width),
            };
            const int lead = static_cast<int>(RowVectors<T>{row.x, seqlen}.lead());
            row.together = RowVectors<T>{row.dout, seqlen}.lead() == lead &&
                           RowVectors<T>{row.dx, seqlen}.lead() == lead;
            const int start = number * stretch - lead;
            const int limit = start + stretch < seqlen ? start + stretch : seqlen;
            // The halo after a tile must be in the row whole or not at all, and where a sequence
            // begins with an initial state the tile is a special one.
            const bool ragged = ((seqlen - start) & (CONV_BATCH - 1)) != 0;
            int from = 0, whole = ragged ? static_cast<int>(smaller(limit, seqlen - TAPS)) : limit;
            if (p.initial_states) {
                from = row.reverse ? 0 : 1;
                whole = row.reverse ? static_cast<int>(smaller(whole, seqlen - TAPS)) : whole;
            }
            const bool quick = row.together && !p.marks;
#pragma unroll 1
            for (int base = start; base < limit;) {
                if (quick && base >= from) {
                    gradients_whole<T, TAPS, COUNT>(place, row, base, whole, tap, bias, dtap,
                                                    dbias);
                    if (COUNT > 1) {
                        gradients_whole<T, TAPS, 1>(place, row, base, whole, tap, bias, dtap,
                                                    dbias);
                    }
                    if (base >= limit) {
                        break;
                    }
                }
                const int token = base + lane * CONV_BATCH;
                if (token < limit) {
                    gradients_tile<T, TAPS>(place, row, token, tap, bias, dtap, dbias, window);
                }
                base += STEP;
            }
        }
#pragma unroll
        for (int d = 0; d <= TAPS; d++) {
            float sum = d < TAPS ? dtap[d < TAPS ? d : 0] : dbias;
            sum = warp_sum(sum + window.sums[d][threadIdx.x]);
            // The bias comes right after the last tap in `partials`.
            if (lane == 0 && (d < p.width || d == TAPS)) {
                *partial_at(p, part, d == TAPS ? p.width : d, channel) = sum;
            }
        }
    }
}
