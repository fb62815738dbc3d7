/* SPDX-License-Identifier: Apache-2.0 */
/* Shares numbered tasks between borrowed threads; this library never makes one.
 *
 * A worker takes the next task when it is done with one, instead of a fixed share: a thread that
 * another process keeps from running then holds up one task, not half of the work. Which worker
 * runs a task has no influence on its result.
 *
 * For the same reason a team's rounds end when their tasks are done, not when every thread has
 * come: one that is kept from running between two tasks misses rounds, and nobody waits for it. A
 * decode step of 24 layers has about 120 rounds. With a start of the pool for each, two foreign
 * processes on two cores brought it from 40 tokens/s to 1.3. */
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

/* What the threads share, each counter on a cache line of its own. Both count from the first task
 * of the first round on, so that a thread that comes late finds out which rounds it missed. */
struct team {
    int64_t taken;
    char apart[56];
    int64_t done;
};

struct team_member {
    struct team *team;
    char *scratch;
    int64_t first; /* number of the coming round's first task */
};

struct team_work {
    const struct statescan_workers *workers;
    team_script script;
    const void *params;
    struct team team;
};

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

/* Waiting threads leave the core's other thread alone, and now and then the core itself: the one
 * that they wait for may need it. */
static void wait_a_little(int64_t turn) {
#if defined(__linux__) && defined(__x86_64__)
    __builtin_ia32_pause();
    if ((turn & 1023) == 1023) {
        long number = 24; /* sched_yield */
        __asm__ volatile("syscall" : "+a"(number) : : "rcx", "r11", "memory");
    }
#elif defined(__linux__) && defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
    if ((turn & 1023) == 1023) {
        register long number __asm__("x8") = 124; /* sched_yield */
        register long result __asm__("x0");
        __asm__ volatile("svc 0" : "=r"(result) : "r"(number) : "memory");
    }
#elif defined(__x86_64__)
    (void)turn;
    __builtin_ia32_pause();
#else
    (void)turn;
#endif
}

void team_round(struct team_member *member, pool_task task, const void *params, int64_t num_tasks) {
    struct team *team = member->team;
    const int64_t first = member->first, end = first + num_tasks;
    member->first = end;
    int64_t number = __atomic_load_n(&team->taken, __ATOMIC_RELAXED);
    while (number < end) {
        /* On failure `number` becomes the present count. */
        if (__atomic_compare_exchange_n(&team->taken, &number, number + 1, 0, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
            task(params, number - first, member->scratch);
            __atomic_fetch_add(&team->done, 1, __ATOMIC_RELEASE);
            number = __atomic_load_n(&team->taken, __ATOMIC_RELAXED);
        }
    }
    for (int64_t turn = 0; __atomic_load_n(&team->done, __ATOMIC_ACQUIRE) < end; turn++) {
        wait_a_little(turn);
    }
}

static void join_team(const void *params, int64_t number, char *scratch) {
    struct team_work *work = (struct team_work *)params;
    (void)number;
    struct team_member member = {&work->team, scratch, 0};
    work->script(&member, work->params);
}

void team_run(const struct statescan_workers *workers, team_script script, const void *params) {
    struct team_work work = {workers, script, params, {0, {0}, 0}};
    pool_run(workers, join_team, &work, workers->count);
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
