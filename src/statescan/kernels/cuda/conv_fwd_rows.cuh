// SPDX-License-Identifier: Apache-2.0
// ROWS of the forward convolution: tokens are neighbours in memory, a warp owns a channel.
//
// A warp walks in the order of processing, two tiles of 256 tokens at once, a lane 8 tokens of
// each. The inputs before its own are the last ones of the lane before it and come by shuffles;
// before the first lane is the last one as it was a tile ago. All tiles of a part are one sequence,
// whatever rows they belong to, so that the next ones' loads are always under way.
//
// With silu, taps and bias are held times -log2(e): silu(v) is then v / (-log2(e) (1 + exp2(v))).

#define ROW_TILES 2
#define ROW_TILE  (32 * CONV_BATCH)
#define ROW_STEP  (ROW_TILES * ROW_TILE)

template <typename T, int TAPS, bool REVERSE> struct RowWalk {
    static constexpr int HALO = TAPS - 1, WORDS = Packed<T, TAPS>::WORDS;
    const Params &p;
    const i64 channel;
    int number;    // of the stretch in its row
    int row, rows; // the present one; how many are left with it
    int token;     // where this lane's tokens of the first tile begin
    int steps;     // of ROW_STEP tokens left of this row, with the present one
    const T *x;
    T *out;
    bool together;                         // whether vectors of x and out are aligned together
    Packed<T, CONV_BATCH> tile[ROW_TILES]; // what has been loaded
    Packed<T, TAPS> before;                // the last inputs of the tile before
    float tap[TAPS], bias;

    __device__ __forceinline__ RowWalk(const Params &params, i64 channel, i64 part)
        : p(params), channel(channel) {
        const u32 stretches = static_cast<u32>((p.seqlen + p.lead + p.part_size - 1) / p.part_size);
        const i64 row_part = static_cast<u32>(part) / stretches;
        number = static_cast<int>(part - row_part * stretches);
        rows = static_cast<int>(smaller(p.part_rows, p.batch - row_part * p.part_rows));
        begin(static_cast<int>(row_part * p.part_rows));
    }
    __device__ __forceinline__ int token_of(int k) const {
        return token + (REVERSE ? -k : k) * ROW_TILE;
    }
    __device__ __forceinline__ int steps_before(int at) const {
        return REVERSE ? static_cast<int>(p.seqlen) - at - CONV_BATCH : at;
    }
    // Goes to where the walk over a row begins.
    __device__ __forceinline__ void begin(int b) {
        const int lane = threadIdx.x % 32;
        const RowPlace place(p, b, channel, number, sizeof(T));
        row = b;
        x = static_cast<const T *>(p.x) + b * p.x_batch_stride + channel * p.x_dim_stride;
        out = static_cast<T *>(p.out) + b * p.out_batch_stride + channel * p.out_dim_stride;
        together = lead_of(x, 0, sizeof(T)) == lead_of(out, 0, sizeof(T));
        steps = (place.limit - place.start + ROW_STEP - 1) / ROW_STEP;
        token = place.start +
                (REVERSE ? steps * ROW_STEP - CONV_BATCH - lane * CONV_BATCH : lane * CONV_BATCH);
        before.clear();
    }
    __device__ __forceinline__ void load() {
        const int seqlen = static_cast<int>(p.seqlen);
#pragma unroll
        for (int k = 0; k < ROW_TILES; k++) {
            const int at = token_of(k);
            tile[k].load_if(x + at, at >= 0 && at + CONV_BATCH <= seqlen);
        }
    }
    // What is before a stretch inside of its row, for the last lane to hand it on.
    __device__ __forceinline__ void look_back() {
        const int first = __shfl_sync(0xffffffffu, token, 0);
        before.load_if(x + first + (REVERSE ? CONV_BATCH : -TAPS),
                       threadIdx.x % 32 == 31 && steps_before(first) >= CONV_BATCH);
    }
    // Makes what has been loaded and loads what comes next; false if nothing does.
    __device__ __forceinline__ bool step() {
        const int lane = threadIdx.x % 32, here = token, seqlen = static_cast<int>(p.seqlen);
        float xs[ROW_TILES][HALO + CONV_BATCH];
#pragma unroll
        for (int k = 0; k < ROW_TILES; k++) {
            Packed<T, TAPS> last, low;
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                last.word[i] = tile[k].word[REVERSE ? i : Packed<T, CONV_BATCH>::WORDS - WORDS + i];
                const u32 sent = lane == 31 ? before.word[i] : last.word[i];
                low.word[i] = __shfl_sync(0xffffffffu, sent, (lane + 31) % 32);
            }
            before = last;
#pragma unroll
            for (int i = 0; i < HALO; i++) {
                xs[k][i] = low.at(REVERSE ? HALO - 1 - i : i + 1);
            }
#pragma unroll
            for (int i = 0; i < CONV_BATCH; i++) {
                xs[k][HALO + i] = tile[k].at(REVERSE ? CONV_BATCH - 1 - i : i);
            }
            // From here on the registers of what was loaded are free for the next tiles.
            settle(xs[k]);
        }
        T *target = out + here;
        const bool whole = together, more = steps > 1 || rows > 1;
        if (more) {
            token += REVERSE ? -ROW_STEP : ROW_STEP;
            if (--steps == 0) {
                rows--;
                begin(row + 1);
            }
            load();
        }
#pragma unroll
        for (int k = 0; k < ROW_TILES; k++) {
            const int at = here + (REVERSE ? -k : k) * ROW_TILE;
            float results[CONV_BATCH];
            convolve(xs[k], results);
            if (makes_tile(at, REVERSE ? seqlen - at - CONV_BATCH : at, seqlen)) {
                store(target + (REVERSE ? -k : k) * ROW_TILE, whole, results);
            }
        }
        return more;
    }
    __device__ __forceinline__ void convolve(const float (&xs)[HALO + CONV_BATCH],
                                             float (&results)[CONV_BATCH]) const {
        const int width = static_cast<int>(p.width);
#pragma unroll
        for (int i = 0; i < CONV_BATCH; i++) {
            float sum = bias;
#pragma unroll
            for (int d = TAPS - 1; d >= 0; d--) {
                if (has_tap<TAPS>(d, width)) {
                    sum += tap[d] * xs[HALO + i - d];
                }
            }
            results[i] = sum;
        }
        if (p.silu) {
#pragma unroll
            for (int i = 0; i < CONV_BATCH; i++) {
                results[i] = scaled_silu(results[i]);
            }
        }
        if (REVERSE) {
            turn_around(results);
        }
    }
    static __device__ __forceinline__ void store(T *target, bool whole,
                                                 const float (&results)[CONV_BATCH]) {
        if (whole) {
            store_n<T, CONV_BATCH>(target, 0, 0, results);
        } else {
#pragma unroll
            for (int i = 0; i < CONV_BATCH; i++) {
                target[i] = from_float<T>(results[i]);
            }
        }
    }
};

template <typename T, int TAPS, bool REVERSE>
__device__ __forceinline__ void convolve_part(const Params &p, i64 channel, i64 part) {
    RowWalk<T, TAPS, REVERSE> walk(p, channel, part);
    const int first_row = walk.row, rows = walk.rows;
    WarpTaps<TAPS> taps;
    walk.load();
    taps.load(p, channel);
    walk.look_back();
    taps.mine *= p.silu ? -STATESCAN_LOG2E : 1.0f;
    taps.share(walk.tap, walk.bias);
#pragma unroll 1
    while (walk.step()) {
    }
    const u32 columns = static_cast<u32>(p.width) - 1u;
    // One part of a row, or of some rows, has the last steps of all its channels.
    if (!p.marks && walk.number == 0) {
#pragma unroll 1
        for (u32 i = threadIdx.x % 32; i < rows * columns; i += 32) {
            store_row_end(p, first_row + i / columns, channel, static_cast<int>(i % columns));
        }
    }
}

// The grid's x counts groups of 4 channels, a warp each, and y parts: stretches of some rows.
template <typename T, int TAPS> __device__ __forceinline__ void convolve_rows(const Params &p) {
    const i64 channel = static_cast<i64>(blockIdx.x) * (ROW_THREADS / 32) + threadIdx.x / 32;
    if (channel >= p.dim) {
        return;
    }
    if (p.reverse) {
        convolve_part<T, TAPS, true>(p, channel, blockIdx.y);
    } else {
        convolve_part<T, TAPS, false>(p, channel, blockIdx.y);
    }
}
