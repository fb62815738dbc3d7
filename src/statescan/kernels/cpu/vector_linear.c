/* SPDX-License-Identifier: Apache-2.0 */
/* A linear layer for a few vectors: x W^T + bias. A task is 64 rows of W, for all vectors.
 *
 * The time is that of reading W once; sums are float32. Scratch: the results of a task and the
 * vectors. */
#include "kernels.h"
#include "matvec.h"

#define TASK_ROWS 64

struct call {
    const struct statescan_vector_linear *p;
    const float *x;
};

static void run_task(const void *params, int64_t number, char *scratch) {
    const struct call *call = params;
    const struct statescan_vector_linear *p = call->p;
    float *sums = (float *)scratch;
    const int64_t first = number * TASK_ROWS;
    const int64_t end = smaller(first + TASK_ROWS, p->rows);
    matvec(sums, TASK_ROWS, &p->weight, first, end, call->x, p->weight.columns, p->batch,
           sums + TASK_ROWS * p->batch);
    add_bias(sums, TASK_ROWS, &p->bias, first, end - first, p->batch);
    store_matrix(&p->out, sums, TASK_ROWS, p->batch, first, end - first);
}

void AT_LEVEL(vector_linear)(const struct statescan_vector_linear *form, void *const *addresses) {
    struct statescan_vector_linear p;
    copy_words(&p, form, sizeof(p));
    p.x.data = addresses[0];
    p.out.data = addresses[1];
    p.weight.data = addresses[2];
    p.bias.data = addresses[3];
    float *x = (float *)p.workspace;
    load_matrix(x, p.weight.columns, &p.x, p.batch, p.weight.columns);
    const struct call call = {&p, x};
    pool_run(&p.workers, run_task, &call, divide_up(p.rows, TASK_ROWS));
}
