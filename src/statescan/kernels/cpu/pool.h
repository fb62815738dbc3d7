/* SPDX-License-Identifier: Apache-2.0 */
/* Shares numbered tasks between the threads of a pool that somebody else owns. */
#ifndef STATESCAN_POOL_H
#define STATESCAN_POOL_H

#include "abi.h"

typedef void (*pool_task)(const void *params, int64_t task, char *scratch);

/* Runs task 0 to num_tasks - 1, each once, and returns when all are done. Two tasks never use the
 * same scratch memory at the same time. */
void pool_run(const struct statescan_workers *workers, pool_task task, const void *params,
              int64_t num_tasks);

#endif
