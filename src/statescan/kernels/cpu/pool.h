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

/* Several rounds of tasks with one start of the pool. Every thread of the team runs the same
 * script, which calls team_round for one round after the other; a round begins when the tasks of
 * the one before are done. The script itself must write nothing that another thread reads: what is
 * to be done once is a round of one task. */
struct team_member;
typedef void (*team_script)(struct team_member *member, const void *params);

void team_run(const struct statescan_workers *workers, team_script script, const void *params);
void team_round(struct team_member *member, pool_task task, const void *params, int64_t num_tasks);

#endif
