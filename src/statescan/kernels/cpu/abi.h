/* SPDX-License-Identifier: Apache-2.0 */
/* What Python and the C library agree on: exported functions and the layout of every struct.
 * No code here. statescan/backends/native.py has the same table for ctypes; a test compares. */
#ifndef STATESCAN_ABI_H
#define STATESCAN_ABI_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define STATESCAN_EXPORT __declspec(dllexport)
#else
#define STATESCAN_EXPORT __attribute__((visibility("default")))
#endif

/* Raised by one whenever a struct or a function of this file changes, so that a library left over
 * from an older build is refused with a reason instead of being misread. */
#define STATESCAN_ABI_VERSION 1

/* Vector instructions that the processor has and the operating system saves on a task switch. */
enum statescan_isa {
    STATESCAN_ISA_BASELINE = 0,
    STATESCAN_ISA_AVX2 = 1,   /* AVX2, FMA, F16C */
    STATESCAN_ISA_AVX512 = 2, /* and AVX-512 F, BW, CD, DQ, VL */
    STATESCAN_ISA_NEON = 3    /* every aarch64 processor */
};

/* Signature of cuLaunchKernel with its handles as plain pointers. */
typedef int (*statescan_launch_function)(void *kernel, unsigned grid_x, unsigned grid_y,
                                         unsigned grid_z, unsigned block_x, unsigned block_y,
                                         unsigned block_z, unsigned shared_bytes, void *stream,
                                         void **kernel_params, void **extra);

/* One kernel launch. The kernel takes a single struct by value; `params` points to it, or is null
 * when the struct follows this request in memory, which lets Python pack both in one call. */
struct statescan_launch_request {
    statescan_launch_function launch;
    void *kernel;
    void *stream;
    const void *params;
    uint32_t grid_x;
    uint32_t grid_y;
    uint32_t grid_z;
    uint32_t block_x;
    uint32_t block_y;
    uint32_t block_z;
    uint32_t shared_bytes;
    uint32_t unused; /* fills up to 64 bytes: what follows keeps the alignment of the request */
};

/* One row of the layout table. `field` is "" in the row that gives the size of the whole struct. */
struct statescan_layout_row {
    const char *structure;
    const char *field;
    uint32_t offset;
    uint32_t size;
};

/* Returned by statescan_launch when no launch function was handed in; CUDA's own codes are >= 0. */
#define STATESCAN_LAUNCH_NO_FUNCTION (-1)

STATESCAN_EXPORT int statescan_abi_version(void);
STATESCAN_EXPORT int statescan_isa_level(void);
STATESCAN_EXPORT int statescan_launch(const struct statescan_launch_request *request);
/* The table ends with a row whose `structure` is null. */
STATESCAN_EXPORT const struct statescan_layout_row *statescan_layout(void);

#endif
