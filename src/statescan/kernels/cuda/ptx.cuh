// SPDX-License-Identifier: Apache-2.0
// Instructions that CUDA C++ without headers has no name for. All inline assembly is here, so that
// another file of the same names (tests/helpers/simt_ptx.h) lets kernels run on a CPU.

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

#if __CUDA_ARCH__ >= 800
// The rest of the line is needed a few steps later, since all channels walk time together.
#define STATESCAN_LOAD ".global.nc.L2::128B"
#else
#define STATESCAN_LOAD ".global.nc"
#endif

// Formats, by their bits. Before sm_80 nothing converts to bfloat16, or two numbers at once.
__device__ __forceinline__ float half_to_float(u16 bits) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
    return result;
}
__device__ __forceinline__ u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ u16 float_to_bfloat(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ u32 floats_to_bfloats(float low, float high) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}
__device__ __forceinline__ u32 floats_to_halves(float low, float high) {
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}
#endif

__device__ __forceinline__ float exp2_approx(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}
__device__ __forceinline__ float log2_approx(float value) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}
__device__ __forceinline__ float reciprocal_approx(float value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// The larger; NaN if one is. Before sm_80 no instruction keeps NaN.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a < b ? b : a;
#endif
}

// Loads through the read-only path, of memory that nothing writes meanwhile.
__device__ __forceinline__ u32 load_32(const void *source) {
    u32 bits;
    asm volatile("ld" STATESCAN_LOAD ".b32 %0, [%1];" : "=r"(bits) : "l"(source));
    return bits;
}
__device__ __forceinline__ u16 load_16(const void *source) {
    u16 bits;
    asm volatile("ld" STATESCAN_LOAD ".b16 %0, [%1];" : "=h"(bits) : "l"(source));
    return bits;
}
__device__ __forceinline__ void load_64(u32 *words, const void *source) {
    asm volatile("ld" STATESCAN_LOAD ".v2.b32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(source));
}
__device__ __forceinline__ void load_128(u32 *words, const void *source) {
    asm volatile("ld" STATESCAN_LOAD ".v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(source));
}

// Loads and stores under a condition, without a branch: those of several tensors are in flight at
// once. What is not loaded is 0.
__device__ __forceinline__ u16 load_16_if(const void *source, bool wanted) {
    u16 bits;
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; mov.b16 %0, 0; "
                 "@p ld" STATESCAN_LOAD ".b16 %0, [%1]; }"
                 : "=h"(bits)
                 : "l"(source), "r"(static_cast<int>(wanted)));
    return bits;
}
__device__ __forceinline__ u32 load_32_if(const void *source, bool wanted) {
    u32 bits;
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; mov.b32 %0, 0; "
                 "@p ld" STATESCAN_LOAD ".b32 %0, [%1]; }"
                 : "=r"(bits)
                 : "l"(source), "r"(static_cast<int>(wanted)));
    return bits;
}
__device__ __forceinline__ void load_64_if(u32 *words, const void *source, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; "
                 "@p ld" STATESCAN_LOAD ".v2.b32 {%0, %1}, [%2]; }"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(source), "r"(static_cast<int>(wanted)));
}
__device__ __forceinline__ void load_128_if(u32 *words, const void *source, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; "
                 "mov.b32 %2, 0; mov.b32 %3, 0; "
                 "@p ld" STATESCAN_LOAD ".v4.b32 {%0, %1, %2, %3}, [%4]; }"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(source), "r"(static_cast<int>(wanted)));
}
__device__ __forceinline__ void store_16_if(void *target, u16 bits, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.b16 [%1], %0; }"
                 :
                 : "h"(bits), "l"(target), "r"(static_cast<int>(wanted))
                 : "memory");
}
__device__ __forceinline__ void store_32_if(void *target, u32 bits, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.b32 [%1], %0; }"
                 :
                 : "r"(bits), "l"(target), "r"(static_cast<int>(wanted))
                 : "memory");
}
__device__ __forceinline__ void store_64_if(void *target, const u32 *words, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %3, 0; @p st.global.v2.b32 [%2], {%0, %1}; }"
                 :
                 : "r"(words[0]), "r"(words[1]), "l"(target), "r"(static_cast<int>(wanted))
                 : "memory");
}
__device__ __forceinline__ void store_128_if(void *target, const u32 *words, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; "
                 "@p st.global.v4.b32 [%4], {%0, %1, %2, %3}; }"
                 :
                 : "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "l"(target),
                   "r"(static_cast<int>(wanted))
                 : "memory");
}
__device__ __forceinline__ void prefetch_line(const void *place) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(place));
}

// Waits for `threads` of the block at a barrier of their own; 0 is __syncthreads.
__device__ __forceinline__ void meet_at(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#if __CUDA_ARCH__ >= 800
// d = a b and d += a b of 16 x 8 by 8 x 8 numbers, of which the unit takes the upper 19 bits.
__device__ __forceinline__ void multiply(float (&d)[4], float a0, float a1, float a2, float a3,
                                         float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
          "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)), "f"(0.0f));
}
__device__ __forceinline__ void multiply_add(float (&d)[4], float a0, float a1, float a2, float a3,
                                             float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
          "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
#endif
