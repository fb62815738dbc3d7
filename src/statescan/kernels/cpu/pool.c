/* SPDX-License-Identifier: Apache-2.0 */
/* Shares numbered tasks between borrowed threads; this library never makes one.
 *
 * A worker takes the next task when it is done with one, instead of a fixed share: a thread that
 * another process keeps from running then holds up one task, not half of the work. Which worker
 * runs a task has no influence on its result. */
#include "pool.h"

typedef void (*range_function)(int64_t begin, int64_t end, void *context);
typedef int (*torch_parallel_for)(int64_t begin, int64_t end, int64_t grain_size,
                                  range_function function, void *context);
typedef void (*gomp_parallel)(void (*function)(void *), void *context, unsigned num_threads,
                              unsigned flags);

static struct {
    int kind;
    void *function;
} pool;

void statescan_set_pool(int kind, void *function) {
    pool.kind = function != NULL ? kind : STATESCAN_POOL_SERIAL;
    pool.function = function;
}

struct work {
    const struct statescan_workers *workers;
    pool_task task;
    const void *params;
    int64_t num_tasks;
    int64_t next_task;
    int64_t next_worker;
};

static int64_t take(int64_t *counter) {
    return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

static void work_on(void *context) {
    struct work *work = context;
    const int64_t worker = take(&work->next_worker);
    if (worker >= work->workers->count) {
        return;
    }
    char *scratch = work->workers->scratch + worker * work->workers->scratch_bytes;
    for (int64_t task = take(&work->next_task); task < work->num_tasks;
         task = take(&work->next_task)) {
        work->task(work->params, task, scratch);
    }
}

static void work_on_range(int64_t begin, int64_t end, void *context) {
    (void)begin;
    (void)end;
    work_on(context);
}

void pool_run(const struct statescan_workers *workers, pool_task task, const void *params,
              int64_t num_tasks) {
    struct work work = {workers, task, params, num_tasks, 0, 0};
    const int64_t threads = workers->count < num_tasks ? workers->count : num_tasks;
    if (threads > 1 && pool.kind == STATESCAN_POOL_TORCH) {
        ((torch_parallel_for)pool.function)(0, threads, 1, work_on_range, &work);
    } else if (threads > 1 && pool.kind == STATESCAN_POOL_OPENMP) {
        ((gomp_parallel)pool.function)(work_on, &work, (unsigned)threads, 0);
    }
    /* The serial case, and whatever a pool left undone because it was stopped or had no thread. */
    work.next_worker = 0;
    work_on(&work);
}
