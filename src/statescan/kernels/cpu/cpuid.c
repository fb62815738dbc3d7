/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the vector instructions that may be used, by CPUID and XGETBV. Choosing a kernel by the
 * answer is the caller's part.
 *
 * __builtin_cpu_supports is avoided: under `zig cc` it answered 0 for every feature on an AVX-512
 * machine, which leaves the fast kernels dead without a sign. */
#include "abi.h"

#if defined(__x86_64__) || defined(_M_X64)

#if defined(_MSC_VER) && !defined(__clang__)
#include <immintrin.h>
#include <intrin.h>
#endif

struct cpuid_registers {
    uint32_t eax, ebx, ecx, edx;
};

static struct cpuid_registers cpuid(uint32_t leaf, uint32_t subleaf) {
    struct cpuid_registers r;
#if defined(_MSC_VER) && !defined(__clang__)
    int words[4];
    __cpuidex(words, (int)leaf, (int)subleaf);
    r.eax = (uint32_t)words[0];
    r.ebx = (uint32_t)words[1];
    r.ecx = (uint32_t)words[2];
    r.edx = (uint32_t)words[3];
#else
    __asm__ volatile("cpuid"
                     : "=a"(r.eax), "=b"(r.ebx), "=c"(r.ecx), "=d"(r.edx)
                     : "a"(leaf), "c"(subleaf));
#endif
    return r;
}

/* XCR0: which register sets the operating system saves. */
static uint32_t enabled_registers(void) {
#if defined(_MSC_VER) && !defined(__clang__)
    return (uint32_t)_xgetbv(0);
#else
    uint32_t eax, edx;
    /* The bytes of xgetbv: the mnemonic needs -mxsave, which would allow more than this line. */
    __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(eax), "=d"(edx) : "c"(0));
    return eax;
#endif
}

static int has_all(uint32_t value, uint32_t mask) {
    return (value & mask) == mask;
}

#define BIT(n) (UINT32_C(1) << (n))

int statescan_isa_level(void) {
    /* Leaf 1 ecx: FMA 12, OSXSAVE 27, AVX 28, F16C 29. Leaf 7 ebx: AVX2 5, AVX-512 F 16, DQ 17,
     * CD 28, BW 30, VL 31. XCR0: SSE 1, AVX 2, the three parts of AVX-512 5 to 7. */
    const uint32_t leaf1_avx2 = BIT(12) | BIT(27) | BIT(28) | BIT(29);
    const uint32_t leaf7_avx2 = BIT(5);
    const uint32_t leaf7_avx512 = BIT(16) | BIT(17) | BIT(28) | BIT(30) | BIT(31);
    const uint32_t saved_avx = BIT(1) | BIT(2);
    const uint32_t saved_avx512 = saved_avx | BIT(5) | BIT(6) | BIT(7);

    if (cpuid(0, 0).eax < 7 || !has_all(cpuid(1, 0).ecx, leaf1_avx2)) {
        return STATESCAN_ISA_BASELINE;
    }
    const uint32_t saved = enabled_registers();
    const uint32_t leaf7 = cpuid(7, 0).ebx;
    if (!has_all(saved, saved_avx) || !has_all(leaf7, leaf7_avx2)) {
        return STATESCAN_ISA_BASELINE;
    }
    if (has_all(saved, saved_avx512) && has_all(leaf7, leaf7_avx512)) {
        return STATESCAN_ISA_AVX512;
    }
    return STATESCAN_ISA_AVX2;
}

#elif defined(__aarch64__) || defined(_M_ARM64)

int statescan_isa_level(void) {
    return STATESCAN_ISA_NEON;
}

#else

int statescan_isa_level(void) {
    return STATESCAN_ISA_BASELINE;
}

#endif
