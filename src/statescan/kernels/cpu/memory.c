/* SPDX-License-Identifier: Apache-2.0 */
/* The functions that a compiler may call without being asked, for a library that links to no libc:
 * gcc for aarch64 clears a struct of 400 bytes with memset, clang copies one with memcpy. They are
 * hidden from other libraries. Nothing here is fast; kernels move their data with vectors. */
#include <stddef.h>

void *memcpy(void *restrict target, const void *restrict source, size_t bytes);
void *memset(void *target, int value, size_t bytes);

void *memcpy(void *restrict target, const void *restrict source, size_t bytes) {
    char *to = target;
    const char *from = source;
    for (size_t i = 0; i < bytes; i++) {
        to[i] = from[i];
    }
    return target;
}

void *memset(void *target, int value, size_t bytes) {
    char *to = target;
    for (size_t i = 0; i < bytes; i++) {
        to[i] = (char)value;
    }
    return target;
}
