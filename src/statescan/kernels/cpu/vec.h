/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of floats and the elementary functions on them, for whatever instructions the file that
 * includes this is compiled for. No memory layouts (tile.h) and nothing that knows an op.
 *
 * The compiler's vector extensions carry the arithmetic, so one source serves every instruction
 * set; a * b + c in one expression becomes a fused multiply-add where there is one. Intrinsics
 * stand only where the extensions have no words: minimum, maximum, half precision, shuffles. */
#ifndef STATESCAN_VEC_H
#define STATESCAN_VEC_H

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VEC_LANES 16
#elif defined(__AVX2__)
#define VEC_LANES 8
#else
#define VEC_LANES 4
#endif

#define VEC_BYTES  (4 * VEC_LANES)
#define VEC_INLINE static inline __attribute__((always_inline))

#define VEC_LOG2E 1.44269504088896341f

typedef float vec __attribute__((vector_size(VEC_BYTES)));
typedef int32_t vec_int __attribute__((vector_size(VEC_BYTES)));
typedef uint32_t vec_bits __attribute__((vector_size(VEC_BYTES)));
typedef uint16_t vec_half __attribute__((vector_size(VEC_BYTES / 2)));

/* The same types at any address. */
typedef float vec_unaligned __attribute__((vector_size(VEC_BYTES), aligned(4), may_alias));
typedef uint16_t vec_half_unaligned
    __attribute__((vector_size(VEC_BYTES / 2), aligned(2), may_alias));
typedef uint32_t vec_pair_unaligned __attribute__((vector_size(VEC_BYTES), aligned(2), may_alias));

VEC_INLINE vec vec_load(const float *source) {
    return *(const vec_unaligned *)source;
}

VEC_INLINE void vec_store(float *target, vec value) {
    *(vec_unaligned *)target = value;
}

VEC_INLINE vec vec_all(float value) {
    return value - (vec){0};
}

/* A NaN in `value` stays one: the instructions return their second operand then. */
VEC_INLINE vec vec_at_least(vec value, vec bound) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)bound, (__m512)value);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)bound, (__m256)value);
#elif defined(__x86_64__)
    return (vec)_mm_max_ps((__m128)bound, (__m128)value);
#elif defined(__aarch64__)
    return (vec)vmaxq_f32((float32x4_t)bound, (float32x4_t)value);
#else
    const vec_int below = value < bound;
    return (vec)((below & (vec_int)bound) | (~below & (vec_int)value));
#endif
}

VEC_INLINE vec vec_at_most(vec value, vec bound) {
#if defined(__AVX512F__)
    return (vec)_mm512_min_ps((__m512)bound, (__m512)value);
#elif defined(__AVX2__)
    return (vec)_mm256_min_ps((__m256)bound, (__m256)value);
#elif defined(__x86_64__)
    return (vec)_mm_min_ps((__m128)bound, (__m128)value);
#elif defined(__aarch64__)
    return (vec)vminq_f32((float32x4_t)bound, (float32x4_t)value);
#else
    const vec_int above = value > bound;
    return (vec)((above & (vec_int)bound) | (~above & (vec_int)value));
#endif
}

VEC_INLINE vec vec_abs(vec value) {
    return (vec)((vec_bits)value & ((vec_bits){0} + 0x7fffffffu));
}

/* Sum over lanes by halves: a fixed tree, so equal bits every time. */
VEC_INLINE float vec_sum(vec v) {
#if VEC_LANES == 16
    v = v + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v = v + __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v = v + __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    v = v + __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif VEC_LANES == 8
    v = v + __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v = v + __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    v = v + __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
#else
    v = v + __builtin_shufflevector(v, v, 2, 3, 0, 1);
    v = v + __builtin_shufflevector(v, v, 1, 0, 3, 2);
#endif
    return v[0];
}

/* The value itself, but rounded: it takes no part in a fused multiply-add. */
VEC_INLINE vec vec_rounded(vec value) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(value));
#elif defined(__x86_64__)
    __asm__("" : "+x"(value));
#elif defined(__aarch64__)
    __asm__("" : "+w"(value));
#endif
    return value;
}

/* 2^t. With t = n + f, |f| <= 1/2: a polynomial for 2^f that is exactly 1 at f = 0, then n added to
 * the exponent. Its relative error is 9.2e-8 at most and 2.9e-7 |f| near 0, which is what a state
 * that decays slowly collects. Below 2^-126 the result stays there, above 2^128 it is infinite;
 * NaN stays NaN. Coefficients: minimax fit with that constraint. */
VEC_INLINE vec vec_exp2(vec t) {
    const vec magic = vec_all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    t = vec_at_most(vec_at_least(t, vec_all(-126.0f)), vec_all(128.0f));
    const vec shifted = t + magic;
    const vec f = t - (shifted - magic);
    vec p = vec_all(0.001326472731307149f);
    p = p * f + vec_all(0.009671512991189957f);
    p = p * f + vec_all(0.05550733581185341f);
    p = p * f + vec_all(0.24022242426872253f);
    p = p * f + vec_all(0.6931470036506653f);
    p = p * f + vec_all(1.0f);
    return (vec)((vec_int)p + ((vec_int)shifted << 23));
}

/* 2^(step * rate) in the innermost loops of scans, where it takes most of the time; `rate` comes
 * from vec_rate. AVX-512 scales by a power of two without clamps, whatever its size: 11 operations
 * instead of 13. The product is rounded before n is taken from it, so that f stays bounded when it
 * is huge; a fused f would be the product's rounding error there, and its fifth power infinite. */
VEC_INLINE vec vec_decay(vec step, vec rate) {
#if defined(__AVX512F__)
    const vec magic = vec_all(12582912.0f);
    const vec t = vec_rounded(step * rate);
    const vec n = (t + magic) - magic;
    const vec f = t - n;
    vec p = vec_all(0.001326472731307149f);
    p = p * f + vec_all(0.009671512991189957f);
    p = p * f + vec_all(0.05550733581185341f);
    p = p * f + vec_all(0.24022242426872253f);
    p = p * f + vec_all(0.6931470036506653f);
    p = p * f + vec_all(1.0f);
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return vec_exp2(step * rate);
#endif
}

/* A as a rate for vec_decay: times log2(e), and within bounds, so that its product with a step is
 * finite and a rate of -infinity decays to 0 instead of meeting itself in a difference. */
VEC_INLINE vec vec_rate(vec A) {
    const vec rate = vec_at_least(A * vec_all(VEC_LOG2E), vec_all(-1e25f));
    return vec_at_most(rate, vec_all(1e25f));
}

/* e^x: x = n ln 2 + r with ln 2 in two parts, so that r has no error of the product with log2(e),
 * which 2^x of a rounded x log2(e) carries: for x = 30 that is 20 times the error of the rest. */
VEC_INLINE vec vec_exp(vec x) {
    const vec magic = vec_all(12582912.0f);
    const vec high = vec_all(88.72284f), low = vec_all(-87.33654f);
    const vec shifted = vec_at_most(vec_at_least(x, low), high) * vec_all(VEC_LOG2E) + magic;
    const vec n = shifted - magic;
    vec r = x - n * vec_all(0.693359375f);
    r = r - n * vec_all(-2.12194440e-4f);
    const vec f = r * vec_all(VEC_LOG2E);
    vec p = vec_all(0.001326472731307149f);
    p = p * f + vec_all(0.009671512991189957f);
    p = p * f + vec_all(0.05550733581185341f);
    p = p * f + vec_all(0.24022242426872253f);
    p = p * f + vec_all(0.6931470036506653f);
    p = p * f + vec_all(1.0f);
    const vec_int bits = (vec_int)p + ((vec_int)shifted << 23);
    /* Beyond the ends what stands in `bits` is no number. NaN is neither above nor below. */
    const vec_int above = x > high, below = x < low;
    const vec_int infinity = (vec_int){0} + 0x7f800000;
    return (vec)((above & infinity) | (~(above | below) & bits));
}

/* 1 / v for v >= 1 or infinite. The 512-bit division takes 16 cycles; an estimate of 14 bits and
 * one step of Newton's take 3, with an error of about one unit in the last place. */
VEC_INLINE vec vec_reciprocal(vec v) {
#if defined(__AVX512F__)
    const vec estimate = (vec)_mm512_rcp14_ps((__m512)v);
    /* Infinity has the estimate 0, and 0 times infinity must not come in. */
    const vec bounded = vec_at_most(v, vec_all(1e38f));
    return estimate * (vec_all(2.0f) - bounded * estimate);
#else
    return vec_all(1.0f) / v;
#endif
}

VEC_INLINE vec vec_sigmoid(vec value) {
    return vec_reciprocal(vec_all(1.0f) + vec_exp(-value));
}

/* max(v, 0) + log(1 + e), e = exp(-|v|). With s = e / (2 + e), log(1 + e) = 2 atanh(s), whose
 * series keeps its relative accuracy when e is tiny: the left tail is right down to the smallest
 * floats. */
VEC_INLINE vec vec_softplus(vec value) {
    /* Squared, so that the result fades out through the subnormal numbers as it should. */
    const vec half = vec_exp(vec_abs(value) * vec_all(-0.5f));
    const vec e = half * half;
    const vec s = e * vec_reciprocal(vec_all(2.0f) + e);
    const vec u = s * s;
    vec p = vec_all(0.14012211561203003f);
    p = p * u + vec_all(0.1399957537651062f);
    p = p * u + vec_all(0.20010849833488464f);
    p = p * u + vec_all(0.3333320617675781f);
    p = p * u + vec_all(1.0f);
    return vec_at_least(value, vec_all(0.0f)) + vec_all(2.0f) * s * p;
}

/* Square root, without the library call that a compiler adds for negative numbers. */
VEC_INLINE float root(float value) {
#if defined(__x86_64__)
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(value)));
#elif defined(__aarch64__)
    return vget_lane_f32(vsqrt_f32(vdup_n_f32(value)), 0);
#else
    return __builtin_sqrtf(value);
#endif
}

VEC_INLINE float bits_as_float(uint32_t bits) {
    union {
        uint32_t bits;
        float value;
    } both = {.bits = bits};
    return both.value;
}

VEC_INLINE uint32_t float_as_bits(float value) {
    union {
        float value;
        uint32_t bits;
    } both = {.value = value};
    return both.bits;
}

VEC_INLINE float float_from_bf16(uint16_t half) {
    return bits_as_float((uint32_t)half << 16);
}

/* To the nearest, ties to even; a NaN keeps a set bit of its fraction. */
VEC_INLINE uint16_t bf16_from_float(float value) {
    const uint32_t bits = float_as_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((bits >> 16) | 0x40u);
    }
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* Subnormal halves become exact by a multiplication: the exponent moves up by 112 and the product
 * with 2^-112 ... normalises. Infinity and NaN get the full exponent. */
VEC_INLINE float float_from_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t rest = half & 0x7fffu;
    if (rest >= 0x7c00u) {
        return bits_as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    }
    const float scaled = bits_as_float(rest << 13) * 0x1p112f;
    return bits_as_float(sign | float_as_bits(scaled));
}

VEC_INLINE uint16_t f16_from_float(float value) {
    const uint32_t bits = float_as_bits(value);
    const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
    const uint32_t size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) {
        return sign | 0x7e00u;
    }
    if (size >= 0x477ff000u) { /* 65520, half way between the largest half and the next power */
        return sign | 0x7c00u;
    }
    if (size < 0x38800000u) { /* below 2^-14: adding 0.5 rounds to multiples of 2^-24 */
        const float shifted = bits_as_float(size) + 0.5f;
        return sign | (uint16_t)(float_as_bits(shifted) - 0x3f000000u);
    }
    return sign | (uint16_t)((size + 0xfffu + ((size >> 13) & 1u) - 0x38000000u) >> 13);
}

VEC_INLINE vec vec_from_bf16(const uint16_t *source) {
    /* gcc 12 splits __builtin_convertvector into halves. */
#if defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)source)),
                                  16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)source)), 16);
#else
    const vec_half half = *(const vec_half_unaligned *)source;
    return (vec)(__builtin_convertvector(half, vec_bits) << 16);
#endif
}

/* Two vectors of bfloat16: the numbers at even places, and those at odd ones. No shuffle is needed.
 */
VEC_INLINE void vec_pair_from_bf16(const uint16_t *source, vec *even, vec *odd) {
    const vec_bits both = *(const vec_pair_unaligned *)source;
    *even = (vec)(both << 16);
    *odd = (vec)(both & 0xffff0000u);
}

/* The numbers at even and at odd places of two vectors. */
VEC_INLINE void vec_unzip(vec a, vec b, vec *even, vec *odd) {
#if VEC_LANES == 16
    *even =
        __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    *odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif VEC_LANES == 8
    *even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
    *odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    *even = __builtin_shufflevector(a, b, 0, 2, 4, 6);
    *odd = __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

VEC_INLINE void vec_to_bf16(uint16_t *target, vec value) {
    const vec_bits bits = (vec_bits)value;
    const vec_bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const vec_bits quiet = (bits >> 16) | 0x40u;
    const vec_bits is_nan = (vec_bits)((bits & 0x7fffffffu) > 0x7f800000u);
    const vec_bits chosen = (is_nan & quiet) | (~is_nan & rounded);
    *(vec_half_unaligned *)target = __builtin_convertvector(chosen, vec_half);
}

VEC_INLINE vec vec_from_f16(const uint16_t *source) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)source));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)source));
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(source)));
#else
    vec value;
    for (int lane = 0; lane < VEC_LANES; lane++) {
        value[lane] = float_from_f16(source[lane]);
    }
    return value;
#endif
}

VEC_INLINE void vec_to_f16(uint16_t *target, vec value) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((void *)target, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    _mm_storeu_si128((void *)target, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    vst1_u16(target, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)value)));
#else
    for (int lane = 0; lane < VEC_LANES; lane++) {
        target[lane] = f16_from_float(value[lane]);
    }
#endif
}

/* Turns a square of VEC_LANES vectors round its diagonal, in place. Each pass interleaves row i
 * with row i + half; log2(VEC_LANES) passes make the transpose. AVX2 interleaves within 128 bits
 * only, where three kinds of shuffles take half as many instructions. */
#if defined(__AVX2__) && !defined(__AVX512F__)
VEC_INLINE void vec_transpose(vec r[VEC_LANES]) {
    vec pair[8], quad[8];
    for (int i = 0; i < 8; i += 2) {
        pair[i] = (vec)_mm256_unpacklo_ps((__m256)r[i], (__m256)r[i + 1]);
        pair[i + 1] = (vec)_mm256_unpackhi_ps((__m256)r[i], (__m256)r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        quad[i] = (vec)_mm256_shuffle_ps((__m256)pair[i], (__m256)pair[i + 2], 0x44);
        quad[i + 1] = (vec)_mm256_shuffle_ps((__m256)pair[i], (__m256)pair[i + 2], 0xee);
        quad[i + 2] = (vec)_mm256_shuffle_ps((__m256)pair[i + 1], (__m256)pair[i + 3], 0x44);
        quad[i + 3] = (vec)_mm256_shuffle_ps((__m256)pair[i + 1], (__m256)pair[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = (vec)_mm256_permute2f128_ps((__m256)quad[i], (__m256)quad[i + 4], 0x20);
        r[i + 4] = (vec)_mm256_permute2f128_ps((__m256)quad[i], (__m256)quad[i + 4], 0x31);
    }
}
#else
VEC_INLINE void vec_transpose(vec r[VEC_LANES]) {
    for (int pass = 1; pass < VEC_LANES; pass *= 2) {
        vec next[VEC_LANES];
        for (int i = 0; i < VEC_LANES / 2; i++) {
            const vec a = r[i], b = r[i + VEC_LANES / 2];
#if defined(__AVX512F__)
            next[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6,
                                                  22, 7, 23);
            next[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                                      13, 29, 14, 30, 15, 31);
#else
            next[2 * i] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            next[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
        }
        for (int i = 0; i < VEC_LANES; i++) {
            r[i] = next[i];
        }
    }
}
#endif

/* Sums over lanes of [count][VEC_LANES] into `count` numbers; a square of vectors at a time. */
static inline void vec_sum_rows(float *target, const float *source, int64_t count) {
    int64_t i = 0;
    for (; i + VEC_LANES <= count; i += VEC_LANES) {
        vec square[VEC_LANES];
        for (int lane = 0; lane < VEC_LANES; lane++) {
            square[lane] = vec_load(source + (i + lane) * VEC_LANES);
        }
        vec_transpose(square);
        for (int width = VEC_LANES / 2; width > 0; width /= 2) {
            for (int lane = 0; lane < width; lane++) {
                square[lane] = square[lane] + square[lane + width];
            }
        }
        vec_store(target + i, square[0]);
    }
    for (; i < count; i++) {
        target[i] = vec_sum(vec_load(source + i * VEC_LANES));
    }
}

#endif
