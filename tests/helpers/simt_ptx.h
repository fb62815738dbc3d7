/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels/cuda/ptx.cuh has, for a CPU: the same names, the same results but for the last bit
 * of approximations. Vectors must be aligned as the instructions demand. */
#pragma once

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

inline void check_aligned(const void *place, std::size_t bytes) {
    if (reinterpret_cast<std::uintptr_t>(place) % bytes != 0) {
        simt::stop("a vector is not aligned");
    }
}

inline float half_to_float(u16 bits) {
    return static_cast<float>(bits_as<_Float16>(bits));
}
inline u16 float_to_half(float value) {
    return bits_as<u16>(static_cast<_Float16>(value));
}
inline u16 float_to_bfloat(float value) {
    const u32 bits = __float_as_uint(value);
    return static_cast<u16>(value != value ? 0x7fffu
                                           : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline u32 floats_to_bfloats(float low, float high) {
    return float_to_bfloat(low) | static_cast<u32>(float_to_bfloat(high)) << 16;
}
inline u32 floats_to_halves(float low, float high) {
    return float_to_half(low) | static_cast<u32>(float_to_half(high)) << 16;
}

/* .ftz: numbers too small to be normal are zero, before and after. */
inline float flushed(float value) {
    return std::fabs(value) < 1.17549435e-38f ? std::copysign(0.0f, value) : value;
}
inline float exp2_approx(float value) {
    return flushed(exp2f(flushed(value)));
}
// Between 0.5 and 2 the unit has an absolute error of 2^-22, below 0 here as it is there on average;
// what a kernel makes of the logarithm of a number near 1 shows in its error.
inline float log2_approx(float value) {
    const float exact = flushed(std::log2(flushed(value)));
    return value > 0.5f && value < 2.0f ? std::floor(exact * 0x1p22f) * 0x1p-22f : exact;
}
inline float larger_or_nan(float a, float b) {
    return a < b ? b : a;
}
inline float reciprocal_approx(float value) {
    return flushed(1.0f / flushed(value));
}

template <typename T> inline T loaded(const void *source) {
    check_aligned(source, sizeof(T));
    T value;
    std::memcpy(&value, source, sizeof value);
    return value;
}
inline u32 load_32(const void *source) {
    return loaded<u32>(source);
}
inline u16 load_16(const void *source) {
    return loaded<u16>(source);
}
inline void load_64(u32 *words, const void *source) {
    const uint2 two = loaded<uint2>(source);
    words[0] = two.x, words[1] = two.y;
}
inline void load_128(u32 *words, const void *source) {
    const uint4 four = loaded<uint4>(source);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
}
inline u16 load_16_if(const void *source, bool wanted) {
    return wanted ? load_16(source) : u16{0};
}
inline u32 load_32_if(const void *source, bool wanted) {
    return wanted ? load_32(source) : 0u;
}
inline void load_64_if(u32 *words, const void *source, bool wanted) {
    words[0] = 0u, words[1] = 0u;
    if (wanted) {
        load_64(words, source);
    }
}
inline void load_128_if(u32 *words, const void *source, bool wanted) {
    words[0] = 0u, words[1] = 0u, words[2] = 0u, words[3] = 0u;
    if (wanted) {
        load_128(words, source);
    }
}
inline void store_16_if(void *target, u16 bits, bool wanted) {
    if (wanted) {
        check_aligned(target, 2);
        std::memcpy(target, &bits, sizeof bits);
    }
}
inline void store_32_if(void *target, u32 bits, bool wanted) {
    if (wanted) {
        check_aligned(target, 4);
        std::memcpy(target, &bits, sizeof bits);
    }
}
inline void store_64_if(void *target, const u32 *words, bool wanted) {
    if (wanted) {
        check_aligned(target, 8);
        std::memcpy(target, words, 8);
    }
}
inline void store_128_if(void *target, const u32 *words, bool wanted) {
    if (wanted) {
        check_aligned(target, 16);
        std::memcpy(target, words, 16);
    }
}
inline void prefetch_line(const void *) {
}

/* Lane 4 g + t of the left operand has rows g and g + 8 of columns t and t + 4; of the right one
 * rows t and t + 4 of column g; of the result columns 2 t and 2 t + 1 of rows g and g + 8. */
inline void multiply_add(float (&d)[4], float a0, float a1, float a2, float a3, float b0,
                         float b1) {
    struct Operands {
        float a[4], b[2];
    };
    const auto upper = [](float value) {
        return __uint_as_float(__float_as_uint(value) & 0xffffe000u);
    };
    const Operands own{{upper(a0), upper(a1), upper(a2), upper(a3)}, {upper(b0), upper(b1)}};
    const auto where = simt::meet_warp(0xffffffffu, simt::MATRIX, own);
    const int lane = simt::number() % simt::WARP, group = lane / 4, quad = lane % 4;
    for (int i = 0; i < 4; i++) {
        const int column = 2 * quad + i % 2;
        double sum = d[i];
        for (int k = 0; k < 8; k++) {
            const Operands left = simt::value_of<Operands>(where, group * 4 + k % 4);
            const Operands right = simt::value_of<Operands>(where, column * 4 + k % 4);
            sum += static_cast<double>(left.a[k / 4 * 2 + i / 2]) * right.b[k / 4];
        }
        d[i] = static_cast<float>(sum);
    }
}
inline void multiply(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    d[0] = d[1] = d[2] = d[3] = 0.0f;
    multiply_add(d, a0, a1, a2, a3, b0, b1);
}
