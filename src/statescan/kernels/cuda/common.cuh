// SPDX-License-Identifier: Apache-2.0
// Number formats, their conversion and vector access. No kernel, and nothing of one op only.
//
// Compiled by NVRTC without any header, so the half formats are plain structs and the conversions
// those of ptx.cuh; arithmetic is float32 everywhere.

struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

#define STATESCAN_LOG2E 1.4426950408889634f
#define STATESCAN_LN2   0.6931471805599453f

__device__ __forceinline__ float to_float(float value) {
    return value;
}
__device__ __forceinline__ float to_float(bf16 value) {
    return __uint_as_float(static_cast<u32>(value.bits) << 16);
}
__device__ __forceinline__ float to_float(f16 value) {
    return half_to_float(value.bits);
}

template <typename T> __device__ __forceinline__ T from_float(float value);
template <> __device__ __forceinline__ float from_float<float>(float value) {
    return value;
}
template <> __device__ __forceinline__ f16 from_float<f16>(float value) {
    return f16{float_to_half(value)};
}
// Before sm_80 there is no instruction: round to nearest even by hand, keep NaN a NaN.
template <> __device__ __forceinline__ bf16 from_float<bf16>(float value) {
#if __CUDA_ARCH__ >= 800
    return bf16{float_to_bfloat(value)};
#else
    u32 bits = __float_as_uint(value);
    u32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return bf16{static_cast<u16>(value != value ? 0x7fffu : rounded >> 16)};
#endif
}

// Two neighbours in one register, the first in the low half.
template <typename T> __device__ __forceinline__ u32 pack2(float low, float high) {
    return static_cast<u32>(from_float<T>(low).bits) |
           (static_cast<u32>(from_float<T>(high).bits) << 16);
}
#if __CUDA_ARCH__ >= 800
template <> __device__ __forceinline__ u32 pack2<bf16>(float low, float high) {
    return floats_to_bfloats(low, high);
}
template <> __device__ __forceinline__ u32 pack2<f16>(float low, float high) {
    return floats_to_halves(low, high);
}
#endif
template <typename T> __device__ __forceinline__ float low2(u32 pair);
template <typename T> __device__ __forceinline__ float high2(u32 pair);
template <> __device__ __forceinline__ float low2<bf16>(u32 pair) {
    return __uint_as_float(pair << 16);
}
template <> __device__ __forceinline__ float high2<bf16>(u32 pair) {
    return __uint_as_float(pair & 0xffff0000u);
}
template <> __device__ __forceinline__ float low2<f16>(u32 pair) {
    return to_float(f16{static_cast<u16>(pair & 0xffffu)});
}
template <> __device__ __forceinline__ float high2<f16>(u32 pair) {
    return to_float(f16{static_cast<u16>(pair >> 16)});
}

// Eight values at once from an address of 16 bytes alignment (float32: two accesses of 16 bytes).
__device__ __forceinline__ void load8(const float *source, float (&values)[8]) {
    float4 first = reinterpret_cast<const float4 *>(source)[0];
    float4 second = reinterpret_cast<const float4 *>(source)[1];
    values[0] = first.x, values[1] = first.y, values[2] = first.z, values[3] = first.w;
    values[4] = second.x, values[5] = second.y, values[6] = second.z, values[7] = second.w;
}
template <typename T> __device__ __forceinline__ void load8(const T *source, float (&values)[8]) {
    uint4 packed = *reinterpret_cast<const uint4 *>(source);
    const u32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        values[2 * i] = low2<T>(pairs[i]);
        values[2 * i + 1] = high2<T>(pairs[i]);
    }
}
__device__ __forceinline__ void store8(float *target, const float (&values)[8]) {
    reinterpret_cast<float4 *>(target)[0] = make_float4(values[0], values[1], values[2], values[3]);
    reinterpret_cast<float4 *>(target)[1] = make_float4(values[4], values[5], values[6], values[7]);
}
template <typename T> __device__ __forceinline__ void store8(T *target, const float (&values)[8]) {
    uint4 packed;
    packed.x = pack2<T>(values[0], values[1]);
    packed.y = pack2<T>(values[2], values[3]);
    packed.z = pack2<T>(values[4], values[5]);
    packed.w = pack2<T>(values[6], values[7]);
    *reinterpret_cast<uint4 *>(target) = packed;
}

// An element whose format is known at run time only: 0 float32, 1 bfloat16, 2 float16.
__device__ __forceinline__ float load_any(const void *data, i64 offset, int dtype) {
    if (dtype == 0) {
        return static_cast<const float *>(data)[offset];
    }
    u16 bits = static_cast<const u16 *>(data)[offset];
    return dtype == 1 ? to_float(bf16{bits}) : to_float(f16{bits});
}
__device__ __forceinline__ void store_any(void *data, i64 offset, int dtype, float value) {
    if (dtype == 0) {
        static_cast<float *>(data)[offset] = value;
    } else if (dtype == 1) {
        static_cast<bf16 *>(data)[offset] = from_float<bf16>(value);
    } else {
        static_cast<f16 *>(data)[offset] = from_float<f16>(value);
    }
}

__device__ __forceinline__ float sigmoid(float value) {
    return reciprocal_approx(1.0f + exp2_approx(-value * STATESCAN_LOG2E));
}

// log(1 + e) for e >= 0, without a branch. The unit's logarithm of a number near 1 is off by up to
// 2^-22 whatever its size, and the sum rounds: at e = 1/32 that is 4e-6 of the result, in every
// token alike. So up to 1/4 it is e + e^2 times a polynomial, 1e-7 off with rounding; from there on
// the unit is off by 7e-7 at most. A polynomial up to 1 cost the forward scan 14 % (H200).
__device__ __forceinline__ float log_1_plus(float e) {
    float sum = fmaf(e, -0.097546144f, 0.184945471f);
    sum = fmaf(e, sum, -0.248485196f);
    sum = fmaf(e, sum, 0.333270546f);
    sum = fmaf(e, sum, -0.499999297f);
    const float logarithm = log2_approx(1.0f + e) * STATESCAN_LN2;
    return e < 0.25f ? fmaf(e * e, sum, e) : logarithm;
}

// exp(value) of small and middling values. What rounding takes from the power of 2 is put back: at
// -16 it is 7e-7 of the result.
__device__ __forceinline__ float exponential(float value) {
    const float bounded = larger_or_nan(value, -100.0f);
    const float power = bounded * STATESCAN_LOG2E, e = exp2_approx(power);
    return fmaf(e, fmaf(power, -STATESCAN_LN2, bounded), e);
}

__device__ __forceinline__ float softplus(float value) {
    return value > 20.0f ? value : log_1_plus(exponential(value));
}
