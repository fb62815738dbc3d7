// SPDX-License-Identifier: Apache-2.0
// ROWS of the convolution's gradients: tokens are neighbours in memory, a warp owns a channel.
// The derivation is in causal_conv1d_bwd.cu.
//
// A warp walks its stretch of a row from its last step to its first, 256 tokens at once, a lane 8
// of them. A lane needs inputs of the lane before it and dpre of the lane after it: both come by
// shuffles, so that each number is loaded and each dpre made once. Behind the last lane is the
// first one as it was a tile ago; before the first lane are inputs that are loaded once more, from
// the L2 cache. All tiles of a part are one sequence of tiles, whatever rows they belong to, so
// that the next one's loads are always under way.
//
// With silu, taps and bias are held times -log2(e), which spares the product in front of exp2, and
// dpre times -ln(2), so that products of both are what they would be without; the sums are scaled
// back at the end.

#define ROW_STEP (32 * CONV_BATCH)

// What is to be done with a tile of 8 tokens.
enum TileKind : u32 {
    TILE_WHOLE = 1u,   // it lies in the row and is to be loaded
    TILE_SPECIAL = 2u, // STEPS makes it
    TILE_ENDS = 4u,    // nothing follows it in the order of processing
};

// Where the tiles of a row begin, which is where vectors of 16 bytes do.
struct RowPlace {
    const Params &p;
    i64 row, channel;
    bool together; // whether vectors of x, dout and dx are aligned together
    int start;     // of the stretch; before token 0 by what the row begins behind a vector
    int limit;

    __device__ __forceinline__ RowPlace(const Params &params, i64 row, i64 channel, int number,
                                        int size)
        : p(params), row(row), channel(channel) {
        const int lead = lead_of(p.x, row * p.x_batch_stride + channel * p.x_dim_stride, size);
        together = lead_of(p.dout, row * p.dout_batch_stride + channel * p.dout_dim_stride, size) ==
                       lead &&
                   lead_of(p.dx, row * p.dx_batch_stride + channel * p.dx_dim_stride, size) == lead;
        const int stretch = static_cast<int>(p.part_size), seqlen = static_cast<int>(p.seqlen);
        start = number * stretch - lead;
        limit = start + stretch < seqlen ? start + stretch : seqlen;
    }
    __device__ __forceinline__ int inner() const {
        return together && p.seqlen >= 3 * CONV_BATCH
                   ? static_cast<int>(p.seqlen) - 3 * CONV_BATCH + 1
                   : 0;
    }
};

// What the tile at a token is. `inner` counts the tokens from CONV_BATCH on at which tiles begin
// that have whole neighbours in the row.
template <int TAPS>
__device__ __forceinline__ u32 tile_kind(const Params &p, i64 row, bool together, int inner,
                                         int token, bool reverse) {
    constexpr int HALO = TAPS - 1;
    const int seqlen = static_cast<int>(p.seqlen), rest = seqlen - token - CONV_BATCH;
    const int before = reverse ? rest : token;
    bool plain = true;
    if (p.marks) {
        const Gradients place(p, row, 0);
        plain = place.marked(before - HALO, 2 * HALO + CONV_BATCH) == 0u;
    }
    if (plain && static_cast<u32>(token - CONV_BATCH) < static_cast<u32>(inner)) {
        return TILE_WHOLE;
    }
    const bool whole = together && token >= 0 && rest >= 0;
    // A tile takes from its neighbours, which are whole, or outside of the row.
    plain = plain && whole && (token == 0 || token >= CONV_BATCH) &&
            (rest == 0 || rest >= CONV_BATCH) &&
            (p.marks || !p.initial_states || before >= CONV_BATCH);
    const bool some = token < seqlen && token > -CONV_BATCH;
    return (whole ? TILE_WHOLE : 0u) | (some && !plain ? TILE_SPECIAL : 0u) |
           (whole && (reverse ? token : rest) == 0 ? TILE_ENDS : 0u);
}

// Where a lane is among the tiles that it walks over.
template <typename T, int TAPS, bool REVERSE> struct RowTiles {
    const Params &p;
    const i64 channel;
    int number;    // of the stretch in its row
    int row, rows; // the present one; how many are left with it
    int token;     // where this lane's 8 tokens begin
    int tiles;     // left of this row, with the present one
    int inner;     // as in tile_kind
    bool together;
    const T *x, *dout;
    T *dx;

    __device__ __forceinline__ RowTiles(const Params &params, i64 channel, i64 part)
        : p(params), channel(channel) {
        const int stretches = static_cast<int>((p.seqlen + p.lead + p.part_size - 1) / p.part_size);
        const i64 row_part = static_cast<u32>(part) / static_cast<u32>(stretches);
        number = static_cast<int>(part - row_part * stretches);
        rows = static_cast<int>(smaller(p.part_rows, p.batch - row_part * p.part_rows));
        begin(static_cast<int>(row_part * p.part_rows));
    }
    // Goes to the tile of a row that is walked first.
    __device__ __forceinline__ void begin(int b) {
        const int lane = threadIdx.x % 32;
        const RowPlace place(p, b, channel, number, sizeof(T));
        row = b;
        x = static_cast<const T *>(p.x) + b * p.x_batch_stride + channel * p.x_dim_stride;
        dout =
            static_cast<const T *>(p.dout) + b * p.dout_batch_stride + channel * p.dout_dim_stride;
        dx = static_cast<T *>(p.dx) + b * p.dx_batch_stride + channel * p.dx_dim_stride;
        together = place.together;
        inner = place.inner();
        tiles = (place.limit - place.start + ROW_STEP - 1) / ROW_STEP;
        token = place.start + (REVERSE ? 31 - lane : (tiles - 1) * 32 + lane) * CONV_BATCH;
    }
    // Goes on to the next tile, of the next row after the last one of this row.
    __device__ __forceinline__ void advance() {
        token += REVERSE ? ROW_STEP : -ROW_STEP;
        if (--tiles == 0) {
            rows--;
            begin(row + 1);
        }
    }
    __device__ __forceinline__ bool last() const {
        return tiles == 1 && rows == 1;
    }
    __device__ __forceinline__ int before() const { // in the order of processing
        return REVERSE ? static_cast<int>(p.seqlen) - token - CONV_BATCH : token;
    }
    __device__ __forceinline__ u32 kind() const {
        return tile_kind<TAPS>(p, row, together, inner, token, REVERSE);
    }
};

// 8 tokens of a lane as they lie in memory.
template <typename T, int TAPS, bool REVERSE> struct RowTile {
    static constexpr int HALO = TAPS - 1;
    Packed<T, CONV_BATCH> x, dout;
    Packed<T, TAPS> halo; // the inputs before those of the first lane
    u32 kind;

    __device__ __forceinline__ void load(const RowTiles<T, TAPS, REVERSE> &tiles) {
        const T *source = tiles.x + tiles.token;
        kind = tiles.kind();
        if (kind & TILE_WHOLE) {
            x.load_if(source, true);
            dout.load_if(tiles.dout + tiles.token, true);
        } else {
            x.clear();
        }
        halo.load_if(source + (REVERSE ? CONV_BATCH : -TAPS),
                     threadIdx.x % 32 == 0 && (kind & TILE_WHOLE) && tiles.before() >= CONV_BATCH);
    }
    // In the order of processing, from HALO steps before the first own one.
    __device__ __forceinline__ void unpack(float (&xs)[HALO + CONV_BATCH],
                                           float (&douts)[CONV_BATCH]) const {
        constexpr int WORDS = Packed<T, TAPS>::WORDS;
        const bool first = threadIdx.x % 32 == 0;
        Packed<T, TAPS> low;
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const u32 mine = x.word[REVERSE ? i : Packed<T, CONV_BATCH>::WORDS - WORDS + i];
            const u32 other = __shfl_up_sync(0xffffffffu, mine, 1);
            low.word[i] = first ? halo.word[i] : other;
        }
#pragma unroll
        for (int i = 0; i < HALO; i++) {
            xs[i] = low.at(REVERSE ? HALO - 1 - i : i + 1);
        }
#pragma unroll
        for (int i = 0; i < CONV_BATCH; i++) {
            xs[HALO + i] = x.at(REVERSE ? CONV_BATCH - 1 - i : i);
            douts[i] = dout.at(REVERSE ? CONV_BATCH - 1 - i : i);
        }
        // From here on the registers of what was loaded are free for the next tile.
        settle(xs);
        settle(douts);
    }
};

// What a lane carries from tile to tile.
template <typename T, int TAPS, bool REVERSE> struct RowSums {
    static constexpr int HALO = TAPS - 1;
    const Params &p;
    const int width;
    const bool silu;
    float tap[TAPS], bias;
    float later[HALO]; // dpre of the first steps of the tile before
    Sums<TAPS> sums;

    __device__ __forceinline__ RowSums(const Params &params)
        : p(params), width(static_cast<int>(params.width)), silu(params.silu != 0) {
    }
    __device__ __forceinline__ void load(i64 channel) {
        WarpTaps<TAPS> taps;
        taps.load(p, channel);
        taps.mine *= silu ? -STATESCAN_LOG2E : 1.0f;
        taps.share(tap, bias);
        sums.clear();
    }
    // dout times the slope of silu.
    __device__ __forceinline__ float dpre_of(float scaled, float dout) const {
        constexpr float SQUARE = STATESCAN_LN2 * STATESCAN_LN2;
        const float s = reciprocal_approx(1.0f + exp2_approx(scaled));
        return dout * s * (scaled * (SQUARE - SQUARE * s) - STATESCAN_LN2);
    }
    // dpre of the steps right behind the stretch, a lane each: they are another part's.
    __device__ __forceinline__ void look_ahead(const RowTiles<T, TAPS, REVERSE> &tiles) {
        const int lane = threadIdx.x % 32, seqlen = static_cast<int>(p.seqlen);
        const int last = __shfl_sync(0xffffffffu, tiles.token, 31);
        const int ahead = (lane + 1) * (REVERSE ? -1 : 1);
        const int here = last + (REVERSE ? 0 : CONV_BATCH - 1) + ahead;
        float dpre = 0.0f;
        if (lane < HALO && here >= 0 && here < seqlen) {
            float pre = bias;
            dpre = to_float(tiles.dout[here]);
#pragma unroll
            for (int d = TAPS - 1; d >= 0; d--) {
                const int token = REVERSE ? here + d : here - d;
                if (has_tap<TAPS>(d, width) && token >= 0 && token < seqlen) {
                    pre += tap[d] * to_float(tiles.x[token]);
                }
            }
            dpre = silu ? dpre_of(pre, dpre) : dpre;
        }
#pragma unroll
        for (int i = 0; i < HALO; i++) {
            later[i] = __shfl_sync(0xffffffffu, dpre, i);
        }
    }
    // `row`, `kind` and `target` are those of the tile.
    __device__ __forceinline__ void run(const float (&xs)[HALO + CONV_BATCH],
                                        const float (&douts)[CONV_BATCH], u32 kind, int row,
                                        i64 channel, T *target) {
        const int lane = threadIdx.x % 32;
        float dpre[CONV_BATCH + HALO];
#pragma unroll
        for (int i = 0; i < CONV_BATCH; i++) {
            dpre[i] = douts[i];
        }
        if (silu) {
#pragma unroll
            for (int i = 0; i < CONV_BATCH; i++) {
                float pre = bias;
#pragma unroll
                for (int d = TAPS - 1; d >= 0; d--) {
                    if (has_tap<TAPS>(d, width)) {
                        pre += tap[d] * xs[HALO + i - d];
                    }
                }
                dpre[i] = dpre_of(pre, dpre[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < HALO; i++) {
            const float sent = lane == 0 ? later[i] : dpre[i];
            dpre[CONV_BATCH + i] = __shfl_sync(0xffffffffu, sent, (lane + 1) % 32);
            later[i] = dpre[i];
        }
        if (kind != TILE_WHOLE) {
            if (kind != (TILE_WHOLE | TILE_ENDS)) {
                return;
            }
            // What follows the row would not do: even 0 times a slope may be no number.
#pragma unroll
            for (int i = 0; i < HALO; i++) {
                dpre[CONV_BATCH + i] = 0.0f;
            }
        }
        float dx[CONV_BATCH];
#pragma unroll
        for (int i = 0; i < CONV_BATCH; i++) {
            dx[i] = tap[0] * dpre[i];
            sums.dbias += dpre[i];
            sums.dtap[0] += dpre[i] * xs[HALO + i];
#pragma unroll
            for (int d = 1; d < TAPS; d++) {
                if (has_tap<TAPS>(d, width)) {
                    dx[i] += tap[d] * dpre[i + d];
                    sums.dtap[d] += dpre[i] * xs[HALO + i - d];
                }
            }
        }
        if (kind != TILE_WHOLE && p.dfinal_states && !p.marks) {
            // Where final states that nobody used come with zeros, this happens in each row.
            const Gradients place(p, row, channel);
#pragma unroll
            for (int i = 0; i < HALO; i++) {
                const int column = i - HALO + width - 1;
                dx[CONV_BATCH - HALO + i] += column >= 0 ? place.dfinal(MARK_FINAL, column) : 0.0f;
            }
        }
        if (REVERSE) {
            turn_around(dx);
        }
        store_n<T, CONV_BATCH>(target, 0, 0, dx);
    }
};

template <typename T, int TAPS, bool REVERSE>
__device__ __forceinline__ Sums<TAPS> walk_part(const Params &p, i64 channel, i64 part) {
    RowTiles<T, TAPS, REVERSE> tiles(p, channel, part);
    RowSums<T, TAPS, REVERSE> sums(p);
    RowTile<T, TAPS, REVERSE> tile;
    tile.load(tiles);
    sums.load(channel);
    sums.look_ahead(tiles);
    bool more = true;
#pragma unroll 1
    while (more) {
        float xs[TAPS - 1 + CONV_BATCH], douts[CONV_BATCH];
        tile.unpack(xs, douts);
        const u32 kind = tile.kind;
        const int row = tiles.row;
        T *target = tiles.dx + tiles.token;
        settle(target);
        more = !tiles.last();
        if (more) {
            tiles.advance();
            tile.load(tiles);
        }
        sums.run(xs, douts, kind, row, channel, target);
    }
    Sums<TAPS> result;
    result.clear();
    result.add(sums.sums, p.silu ? -STATESCAN_LOG2E : 1.0f);
    return result;
}

// The grid's x counts groups of 4 channels, a warp each, and y parts: stretches of some rows.
template <typename T, int TAPS> __device__ __forceinline__ void gradients_rows(const Params &p) {
    const i64 channel = static_cast<i64>(blockIdx.x) * (ROW_THREADS / 32) + threadIdx.x / 32;
    const i64 part = blockIdx.y;
    if (channel >= p.dim) {
        return;
    }
    const Sums<TAPS> sums = p.reverse ? walk_part<T, TAPS, true>(p, channel, part)
                                      : walk_part<T, TAPS, false>(p, channel, part);
#pragma unroll
    for (int d = 0; d <= TAPS; d++) {
        const float sum = warp_sum(d < TAPS ? sums.dtap[d < TAPS ? d : 0] : sums.dbias);
        // The bias comes right after the last tap in `partials`.
        if (threadIdx.x % 32 == 0 && (d < p.width || d == TAPS)) {
            *partial_at(p, part, d == TAPS ? p.width : d, channel) = sum;
        }
    }
}
