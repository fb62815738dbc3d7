// SPDX-License-Identifier: Apache-2.0
// How a block of threads brings B and C, which all its channels share, into shared memory. No
// kernel.
//
// A tile has a row of floats for each of its tokens, all states in it; B's tile lies before C's. A
// Shape tells TILE (tokens), GROUPS (of 4 states), ROW (floats from row to row), TILE_FLOATS,
// ITEMS (groups in a tile) and THREADS.

// How a thread takes its part of a tile of B and C, see the launcher.
enum : int { WEIGHTS_SINGLY = 0, WEIGHTS_TOKEN_PAIRS = 1, WEIGHTS_STATE_QUADS = 2 };

// B and C for the whole block of threads, which keeps the next tile of both in its registers.
template <typename Params, typename T, typename Shape, bool CONSTANT, bool SUMMARY>
struct WeightTiles {
    static constexpr int BOTH = SUMMARY ? Shape::ITEMS : 2 * Shape::ITEMS;
    static constexpr int SINGLES =
        (BOTH + Shape::THREADS - 1) / Shape::THREADS; // groups of 4 states of a token
    static constexpr int PAIRS = (BOTH / 2 + Shape::THREADS - 1) / Shape::THREADS;
    static constexpr int PARTS = (SINGLES + 3) / 4; // of a tile: as much as registers hold at once
    static constexpr int PART_SINGLES = SINGLES / PARTS;
    static constexpr int PART_PAIRS = (PAIRS + PARTS - 1) / PARTS;
    static constexpr int PAIR_WORDS = static_cast<int>(sizeof(T)) / 2;
    static constexpr int QUAD_WORDS = static_cast<int>(sizeof(T));
    static constexpr int FROM_PAIRS = PART_PAIRS * 4 * PAIR_WORDS;
    static constexpr int WORDS = PART_SINGLES * 4 > FROM_PAIRS ? PART_SINGLES * 4 : FROM_PAIRS;
    const T *B, *C; // at step 0
    u32 raw[WORDS];

    __device__ __forceinline__ void begin(const Params &p, i64 row, i64 channel) {
        B = static_cast<const T *>(p.B) + row * p.B_batch_stride +
            channel / p.B_group_size * p.B_group_stride;
        C = static_cast<const T *>(p.C) + row * p.C_batch_stride +
            channel / p.C_group_size * p.C_group_stride;
    }

    struct Item {
        bool is_c, exists;
        int token, group;
    };
    // The k-th of the thread's items where a tile has `tokens` rows; neighbours take neighbours.
    template <int TOKENS>
    static __device__ __forceinline__ Item item(const Params &p, int k, bool states_first) {
        constexpr int ONE = TOKENS * Shape::GROUPS;
        const int number = static_cast<int>(threadIdx.x) + k * Shape::THREADS;
        Item found;
        found.is_c = !SUMMARY && number >= ONE;
        const int index = found.is_c ? number - ONE : number;
        found.token = states_first ? index / Shape::GROUPS : index % TOKENS;
        found.group = states_first ? index % Shape::GROUPS : index / TOKENS;
        found.exists = index < ONE && number < (SUMMARY ? ONE : 2 * ONE);
        if (CONSTANT) {
            found.exists = found.exists && (found.is_c ? p.C_constant : p.B_constant) == 0;
        }
        return found;
    }
    __device__ __forceinline__ const T *source(const Params &p, const Item &at, int step) const {
        return (at.is_c ? C : B) + step * (at.is_c ? p.C_seqlen_stride : p.B_seqlen_stride) +
               4 * at.group * (at.is_c ? p.C_dstate_stride : p.B_dstate_stride);
    }
    static __device__ __forceinline__ float *target(const Item &at, int token, float *tiles) {
        return tiles + (at.is_c ? Shape::TILE_FLOATS : 0) + token * Shape::ROW + 4 * at.group;
    }
    static __device__ __forceinline__ bool states_first(const Params &p) {
        return p.B_dstate_stride == 1;
    }

    // Padding and what lies outside become 0.
    __device__ __forceinline__ void fetch(const Params &p, int tile_step, const int *marks,
                                          int part = 0) {
        const int mode = static_cast<int>(p.weights_mode), dstate = static_cast<int>(p.dstate);
        const int seqlen = static_cast<int>(p.seqlen);
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            raw[i] = 0u;
        }
        if (mode == WEIGHTS_TOKEN_PAIRS) {
#pragma unroll
            for (int k = 0; k < PART_PAIRS; k++) {
                const Item at = item<Shape::TILE / 2>(p, k + part * PART_PAIRS, false);
                const int step = tile_step + 2 * at.token;
                const T *data = source(p, at, step);
                const i64 stride = at.is_c ? p.C_dstate_stride : p.B_dstate_stride;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (at.exists && step < seqlen && 4 * at.group + j < dstate) {
                        load_words<PAIR_WORDS>(data + j * stride, raw + (4 * k + j) * PAIR_WORDS);
                    }
                }
            }
        } else if (mode == WEIGHTS_STATE_QUADS) {
#pragma unroll
            for (int k = 0; k < PART_SINGLES; k++) {
                const Item at = item<Shape::TILE>(p, k + part * PART_SINGLES, true);
                const int step = tile_step + at.token;
                if (at.exists && step < seqlen && 4 * at.group < dstate) {
                    load_words<QUAD_WORDS>(source(p, at, step), raw + 4 * k);
                }
            }
        } else {
#pragma unroll
            for (int k = 0; k < PART_SINGLES; k++) {
                const Item at = item<Shape::TILE>(p, k + part * PART_SINGLES, states_first(p));
                const int step = tile_step + at.token;
                bool exists = at.exists && step < seqlen;
                if (marks != nullptr && exists) {
                    const u32 mark = static_cast<u32>(marks[step * p.marks_stride]);
                    exists = (mark & MARK_PADDING) == 0u;
                }
                const T *data = source(p, at, step);
                const i64 stride = at.is_c ? p.C_dstate_stride : p.B_dstate_stride;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (exists && 4 * at.group + j < dstate) {
                        raw[4 * k + j] = load_bits(data + j * stride);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void put(const Params &p, float *tiles, int part = 0) const {
        const int mode = static_cast<int>(p.weights_mode);
        if (mode == WEIGHTS_TOKEN_PAIRS) {
#pragma unroll
            for (int k = 0; k < PART_PAIRS; k++) {
                const Item at = item<Shape::TILE / 2>(p, k + part * PART_PAIRS, false);
                float values[4][2];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    unpack_words<T, 2>(values[j], raw + (4 * k + j) * PAIR_WORDS);
                }
#pragma unroll
                for (int i = 0; i < 2 && at.exists; i++) {
                    *reinterpret_cast<float4 *>(target(at, 2 * at.token + i, tiles)) =
                        make_float4(values[0][i], values[1][i], values[2][i], values[3][i]);
                }
            }
        } else {
            const bool quads = mode == WEIGHTS_STATE_QUADS;
#pragma unroll
            for (int k = 0; k < PART_SINGLES; k++) {
                const Item at =
                    item<Shape::TILE>(p, k + part * PART_SINGLES, quads || states_first(p));
                float values[4];
                if (quads) {
                    unpack_words<T, 4>(values, raw + 4 * k);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        values[j] = from_bits<T>(raw[4 * k + j]);
                    }
                }
                if (at.exists) {
                    *reinterpret_cast<float4 *>(target(at, at.token, tiles)) =
                        make_float4(values[0], values[1], values[2], values[3]);
                }
            }
        }
    }
};
