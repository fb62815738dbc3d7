// SPDX-License-Identifier: Apache-2.0
// What the backward scan is made of: the layout of its shared memory, loads under a condition, sums
// over channels by the matrix unit. The walk itself is in selective_scan_bwd.cu.

constexpr int CHANNELS = 32;
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int TILE = 64;
constexpr int SUB = 8;     // steps held in registers
constexpr int STRIPE = 16; // steps between two visits of the activations
constexpr int GROUP = 16;  // states of a block at a time
constexpr int PITCH = TILE + 4;
constexpr int STRIPE_PITCH = STRIPE + 4;

// Places of the block's first channel and the tile's first step: dout, x, dt, z, dx, ddt, dz.
constexpr int TENSORS = 7;
enum : int { DOUT, X, DT, Z, DX, DDT, DZ };

// Of the first pass over segments: dt', dy and C of a tile.
struct SummaryShared {
    struct Part {
        float dt[CHANNELS][PITCH];
        float dy[CHANNELS][PITCH];
    };
    Part parts[1];
    float C[TILE][GROUP];
    u32 marks[TILE];
    char *places[2][TENSORS + 1]; // of this tile and of the one before
};

template <bool LARGE, int PARTS> struct BackwardShared {
    static constexpr int LATE = LARGE ? PITCH : STRIPE_PITCH;
    // Of 32 channels. Behind their steps, dt and input have each thread's part of dD and of
    // ddt_bias, and dy has D and dt_bias.
    struct Part {
        float dt[CHANNELS][PITCH];
        float input[CHANNELS][PITCH]; // dt x, then the sum of B g unless LARGE
        float dy[CHANNELS][LATE];     // then y unless LARGE
        float sum_A[CHANNELS][LATE];
        float sum_B[LARGE ? CHANNELS : 1][LARGE ? PITCH : 4];
        float y[LARGE ? CHANNELS : 1][LARGE ? PITCH : 4];
        float2 sums[3][WARPS][2][32];          // y, B g and A p of 4 steps by warp
        float4 tables[WARPS][2][32];           // of ChannelSums
        float starts[TILE / SUB][THREADS * 4]; // each thread's states before eight steps
        float channel_sums[2][GROUP][STRIPE_PITCH];
    };
    Part parts[PARTS];
    float B[TILE][GROUP];
    float C[TILE][GROUP];
    u32 marks[TILE];
    char *places[2][TENSORS + 1]; // of this tile and of the one before
};

// Loads and stores under a condition, without a branch. What is not loaded is 0.
template <int WORDS>
__device__ __forceinline__ void load_if(u32 *words, const void *source, bool wanted) {
    if constexpr (WORDS == 2) {
        load_64_if(words, source, wanted);
    } else {
        load_128_if(words, source, wanted);
    }
}
__device__ __forceinline__ u32 load_bits_if(const float *source, bool wanted) {
    return load_32_if(source, wanted);
}
template <typename T> __device__ __forceinline__ u32 load_bits_if(const T *source, bool wanted) {
    return load_16_if(source, wanted);
}
template <int WORDS>
__device__ __forceinline__ void store_if(void *target, const u32 *words, bool wanted) {
    if constexpr (WORDS == 2) {
        store_64_if(target, words, wanted);
    } else {
        store_128_if(target, words, wanted);
    }
}
__device__ __forceinline__ void store_bits_if(float *target, float value, bool wanted) {
    store_32_if(target, __float_as_uint(value), wanted);
}
template <typename T>
__device__ __forceinline__ void store_bits_if(T *target, T value, bool wanted) {
    store_16_if(target, value.bits, wanted);
}

template <bool FIRST, typename A, typename B> struct Pick {
    using type = A;
};
template <typename A, typename B> struct Pick<false, A, B> {
    using type = B;
};

// What the matrix unit's operands keep of a number, subtracted from it.
__device__ __forceinline__ float rest_of(float value) {
    return value - __uint_as_float(__float_as_uint(value) & 0xffffe000u);
}

// Sums over a warp's lanes of pairs of numbers (one of dB and one of dC), STATES of them a step.
//
// The matrix unit adds over lane % 4: left operands are two pairs of every lane, the right one has
// ones in the column that a pair shall get. So up to 8 pairs share a table: in its rows, the 8
// groups of 4 lanes for dB and again for dC. Tables go to shared memory, where one warp of the
// four adds over the groups.
//
// An operand has 11 bits, which is too few even where dB and dC are bfloat16: terms of both signs
// leave sums that are small beside them (at dstate 64 the error was 2.8e-3 where rounding the
// result makes 2.2e-3). So a second product adds the rest of each number. Before sm_80, and where
// NaN must not reach the table's other columns, shuffles do the same.
template <int STATES> struct ChannelSums {
    static constexpr int PAIRS = 4 * STATES < 8 ? 4 * STATES : 8; // of a table
    static constexpr int STEPS = PAIRS / STATES;                  // of a table
    float table[4], held[2];

    // Ones for pairs 2 i and 2 i + 1.
    static __device__ __forceinline__ void make_selection(float (&select)[4][2]) {
        const int group = static_cast<int>(threadIdx.x & 31) >> 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            select[i][0] = group == 2 * i ? 1.0f : 0.0f;
            select[i][1] = group == 2 * i + 1 ? 1.0f : 0.0f;
        }
    }
    // Called for steps from the last to the first, for a step's states in their order.
    __device__ __forceinline__ void add(int step, int state, float dB, float dC,
                                        const float (&select)[4][2], bool by_shuffles) {
        const int pair = (step * STATES + state) % PAIRS;
#if __CUDA_ARCH__ >= 800
        if (!by_shuffles) {
            // With one state, the pair before is of the step after.
            const bool second = STATES > 1 ? pair % 2 == 1 : pair % 2 == 0;
            if (!second) {
                held[0] = dB, held[1] = dC;
                return;
            }
            const bool swap = STATES == 1;
            const float B0 = swap ? dB : held[0], C0 = swap ? dC : held[1];
            const float B1 = swap ? held[0] : dB, C1 = swap ? held[1] : dC;
            const float s0 = select[pair / 2][0], s1 = select[pair / 2][1];
            const bool fresh = STATES > 1 ? pair == PAIRS - STATES + 1 : pair == PAIRS - 2;
            if (fresh) {
                multiply(table, B0, C0, B1, C1, s0, s1);
            } else {
                multiply_add(table, B0, C0, B1, C1, s0, s1);
            }
            multiply_add(table, rest_of(B0), rest_of(C0), rest_of(B1), rest_of(C1), s0, s1);
            return;
        }
#endif
        const int lane = static_cast<int>(threadIdx.x) & 31;
        dB += __shfl_xor_sync(0xffffffffu, dB, 1);
        dC += __shfl_xor_sync(0xffffffffu, dC, 1);
        dB += __shfl_xor_sync(0xffffffffu, dB, 2);
        dC += __shfl_xor_sync(0xffffffffu, dC, 2);
        if ((lane & 3) == pair / 2) {
            table[pair % 2] = dB;
            table[2 + pair % 2] = dC;
        }
    }
    // After the first step of a table.
    __device__ __forceinline__ void leave(int step, float4 (*tables)[32]) const {
        if (step % STEPS == 0) {
            tables[step % 4 / STEPS][threadIdx.x & 31] =
                make_float4(table[0], table[1], table[2], table[3]);
        }
    }
    // The tables of 4 steps of all warps; target[which of dB, dC][state][step].
    static __device__ __forceinline__ void add_groups(const float4 (*tables)[2][32],
                                                      float (*target)[GROUP][STRIPE_PITCH],
                                                      int first_step) {
        const int lane = static_cast<int>(threadIdx.x) & 31;
        const int warp = lane >> 3, number = (lane >> 2) & 1, column = lane & 3;
        if (number * STEPS >= 4 || 2 * column >= PAIRS) {
            return;
        }
        // Both tables at once without a conflict of banks.
        float4 total = tables[warp][number][number * 4 + column];
#pragma unroll
        for (int group = 1; group < 8; group++) {
            const float4 more = tables[warp][number][(group ^ number) * 4 + column];
            total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
        }
        const float sums[2][2] = {{total.x, total.y}, {total.z, total.w}};
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int pair = 2 * column + odd;
            const int state = warp * STATES + pair % STATES;
            const int step = first_step + number * STEPS + pair / STATES;
            target[0][state][step] = sums[0][odd];
            target[1][state][step] = sums[1][odd];
        }
    }
};

template <int COUNT>
__device__ __forceinline__ void read_states(float (&values)[COUNT], const float *source) {
    if constexpr (COUNT == 4) {
        const float4 all = *reinterpret_cast<const float4 *>(source);
        values[0] = all.x, values[1] = all.y, values[2] = all.z, values[3] = all.w;
    } else if constexpr (COUNT == 2) {
        const float2 both = *reinterpret_cast<const float2 *>(source);
        values[0] = both.x, values[1] = both.y;
    } else {
        values[0] = source[0];
    }
}

template <int COUNT>
__device__ __forceinline__ void write_states(float *target, const float (&values)[COUNT]) {
    if constexpr (COUNT == 4) {
        *reinterpret_cast<float4 *>(target) =
            make_float4(values[0], values[1], values[2], values[3]);
    } else if constexpr (COUNT == 2) {
        *reinterpret_cast<float2 *>(target) = make_float2(values[0], values[1]);
    } else {
        target[0] = values[0];
    }
}
