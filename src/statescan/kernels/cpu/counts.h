/* SPDX-License-Identifier: Apache-2.0 */
/* Three things that are done with counts everywhere in these kernels. */
#ifndef STATESCAN_COUNTS_H
#define STATESCAN_COUNTS_H

#include <stdint.h>

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Parts of `size` that `count` things make, the last one perhaps not full. */
static inline int64_t divide_up(int64_t count, int64_t size) {
    return (count + size - 1) / size;
}

#endif
