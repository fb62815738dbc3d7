// SPDX-License-Identifier: Apache-2.0
// What both directions of the selective scan share: how a lane gets and puts its tokens. No kernel.
//
// A step is a token in the order of processing: token = step, or seqlen - 1 - step in reverse. A
// lane owns COUNT neighbouring steps of one channel. Its raw loads stay as they came until they are
// needed, so that they may be in flight while the lane does something else: by vectors where
// neighbours in time are neighbours in memory and aligned, else one by one with any stride.

__device__ __forceinline__ u32 load_bits(const float *source) {
    return load_32(source);
}
template <typename T> __device__ __forceinline__ u32 load_bits(const T *source) {
    return load_16(source);
}

// softplus up to `linear_from` and the value itself from there on, without a branch: 20 as usual,
// or -infinity for no softplus at all.
__device__ __forceinline__ float softplus_until(float linear_from, float value) {
    const float small = log_1_plus(exponential(value));
    return value >= linear_from ? value : small;
}

// A value whose bits lie at the bottom of a register.
template <typename T> __device__ __forceinline__ float from_bits(u32 bits);
template <> __device__ __forceinline__ float from_bits<float>(u32 bits) {
    return __uint_as_float(bits);
}
template <> __device__ __forceinline__ float from_bits<bf16>(u32 bits) {
    return __uint_as_float(bits << 16);
}
template <> __device__ __forceinline__ float from_bits<f16>(u32 bits) {
    return to_float(f16{static_cast<u16>(bits)});
}

// WORDS whole registers from an address aligned to them, or to 16 bytes if they are more.
template <int WORDS> __device__ __forceinline__ void load_words(const void *source, u32 *words) {
    static_assert(WORDS == 1 || WORDS == 2 || WORDS % 4 == 0, "no such vector");
    if constexpr (WORDS == 1) {
        words[0] = load_32(source);
    } else if constexpr (WORDS == 2) {
        load_64(words, source);
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            load_128(words + i, static_cast<const u32 *>(source) + i);
        }
    }
}
template <int WORDS> __device__ __forceinline__ void store_words(void *target, const u32 *words) {
    u32 *place = static_cast<u32 *>(target);
    if constexpr (WORDS == 1) {
        *place = words[0];
    } else if constexpr (WORDS == 2) {
        *reinterpret_cast<uint2 *>(place) = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            *reinterpret_cast<uint4 *>(place + i) =
                make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
        }
    }
}

// How many registers COUNT values of T fill, and whether they fill whole ones.
template <typename T, int COUNT> struct Packed {
    static constexpr bool whole = COUNT * sizeof(T) % 4 == 0;
    static constexpr int words = whole ? COUNT * static_cast<int>(sizeof(T)) / 4 : 1;
};

// COUNT values from whole registers.
template <typename T, int COUNT>
__device__ __forceinline__ void unpack_words(float (&values)[COUNT], const u32 *words) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if constexpr (sizeof(T) == 4) {
            values[i] = __uint_as_float(words[i]);
        } else {
            values[i] = i % 2 == 0 ? low2<T>(words[i / 2]) : high2<T>(words[i / 2]);
        }
    }
}

// The raw bits of COUNT steps. `first` is the lane's first step; `stride` leads from step to step
// (below 0 in reverse); steps from `valid` on do not exist and come as 0. With `vector`, stride is
// 1 or -1, the address is aligned, and all of the steps exist or none.
template <typename T, int COUNT>
__device__ __forceinline__ void fetch_steps(u32 (&raw)[COUNT], const T *first, i64 stride,
                                            int valid, bool vector) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        raw[i] = 0u;
    }
    if (vector && Packed<T, COUNT>::whole) {
        if (valid > 0) {
            load_words<Packed<T, COUNT>::words>(stride < 0 ? first - (COUNT - 1) : first, raw);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (i < valid) {
                raw[i] = load_bits(first + i * stride);
            }
        }
    }
}

template <int COUNT> __device__ __forceinline__ void turn_around(float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
        float kept = values[i];
        values[i] = values[COUNT - 1 - i];
        values[COUNT - 1 - i] = kept;
    }
}

// The values of what fetch_steps got, in the order of steps.
template <typename T, int COUNT>
__device__ __forceinline__ void unpack_steps(float (&values)[COUNT], const u32 (&raw)[COUNT],
                                             bool vector, bool reverse) {
    if (vector && Packed<T, COUNT>::whole) {
        if constexpr (sizeof(T) == 2 && COUNT % 2 == 0) {
#pragma unroll
            for (int i = 0; i < COUNT; i += 2) {
                values[i] = low2<T>(raw[i / 2]);
                values[i + 1] = high2<T>(raw[i / 2]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                values[i] = from_bits<T>(raw[i]);
            }
        }
        if (reverse) {
            turn_around(values);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            values[i] = from_bits<T>(raw[i]);
        }
    }
}

// Puts COUNT values where fetch_steps would read them; `values` is used up.
template <typename T, int COUNT>
__device__ __forceinline__ void put_steps(T *first, i64 stride, float (&values)[COUNT], int valid,
                                          bool vector) {
    if (vector && Packed<T, COUNT>::whole) {
        if (valid > 0) {
            if (stride < 0) {
                turn_around(values);
            }
            u32 words[Packed<T, COUNT>::words];
            if constexpr (sizeof(T) == 2 && COUNT % 2 == 0) {
#pragma unroll
                for (int i = 0; i < COUNT; i += 2) {
                    words[i / 2] = pack2<T>(values[i], values[i + 1]);
                }
            } else if constexpr (sizeof(T) == 4) {
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    words[i] = __float_as_uint(values[i]);
                }
            }
            store_words<Packed<T, COUNT>::words>(stride < 0 ? first - (COUNT - 1) : first, words);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (i < valid) {
                first[i * stride] = from_float<T>(values[i]);
            }
        }
    }
}
