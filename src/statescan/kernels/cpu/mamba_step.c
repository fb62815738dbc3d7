/* SPDX-License-Identifier: Apache-2.0 */
/* One decode step of a whole Mamba-1 mixer, for a few rows.
 *
 *     x, z = in_proj hidden     x = silu(conv(x))     dt, B, C = x_proj x
 *     y = state update(x, softplus(dt_proj dt + bias), A, B, C, D, z)     out = out_proj y
 *
 * Work: four rounds of tasks, each waiting for the one before: in_proj and convolution by 64
 * channels, x_proj by 8 rows, dt_proj and state update by 64 channels, out_proj by 32 rows. One
 * more comes before them where hidden is not dense float32. What passes between them is float32 in
 * the workspace, (batch, ...) each: hidden, x, z, x after the convolution, x_proj's result, dt, y.
 * Convolution and state update are those ops' own tasks. The time is that of reading the four
 * matrices. */
#include "kernels.h"
#include "matvec.h"

#define CHANNELS       DECODE_CHANNELS
#define PROJECTED_ROWS 8
#define OUT_ROWS       32

struct step {
    struct statescan_mamba_step p;
    float *hidden, *x, *z, *convolved, *projected, *dt, *y;
    int64_t projected_rows;
};

static int is_dense_float32(const struct statescan_tensor *tensor, int64_t width) {
    return tensor->dtype == STATESCAN_FLOAT32 && tensor->channel_stride == 1 &&
           tensor->batch_stride == width;
}

static void run_load(const void *params, int64_t number, char *scratch) {
    const struct step *step = params;
    (void)number;
    (void)scratch;
    load_matrix(step->hidden, step->p.d_model, &step->p.hidden, step->p.batch, step->p.d_model);
}

static void run_in_proj(const void *params, int64_t number, char *scratch) {
    const struct step *step = params;
    const struct statescan_mamba_step *p = &step->p;
    const int64_t dim = p->dim, first = number * CHANNELS, end = smaller(first + CHANNELS, dim);
    float *halves[] = {step->x, step->z};
    for (int half = 0; half < 2; half++) {
        float *out = halves[half] + first;
        const int64_t row = half * dim + first;
        matvec(out, dim, &p->in_proj, row, row + end - first, step->hidden, p->d_model, p->batch,
               (float *)scratch);
        add_bias(out, dim, &p->in_proj_bias, row, end - first, p->batch);
    }
    for (int64_t b = 0; b < p->batch; b++) {
        AT_LEVEL(causal_conv1d_update_task)(&p->conv, b * (divide_up(dim, CHANNELS)) + number,
                                            scratch);
    }
}

static void run_x_proj(const void *params, int64_t number, char *scratch) {
    const struct step *step = params;
    const int64_t rows = step->projected_rows, first = number * PROJECTED_ROWS;
    matvec(step->projected + first, rows, &step->p.x_proj, first,
           smaller(first + PROJECTED_ROWS, rows), step->convolved, step->p.dim, step->p.batch,
           (float *)scratch);
}

static void run_state(const void *params, int64_t number, char *scratch) {
    const struct step *step = params;
    const struct statescan_mamba_step *p = &step->p;
    const int64_t first = number * CHANNELS, end = smaller(first + CHANNELS, p->dim);
    matvec(step->dt + first, p->dim, &p->dt_proj, first, end, step->projected, step->projected_rows,
           p->batch, (float *)scratch);
    for (int64_t b = 0; b < p->batch; b++) {
        AT_LEVEL(selective_state_update_task)(&p->state, b * (divide_up(p->dim, CHANNELS)) + number,
                                              scratch);
    }
}

static void run_out_proj(const void *params, int64_t number, char *scratch) {
    const struct step *step = params;
    const struct statescan_mamba_step *p = &step->p;
    float *sums = (float *)scratch;
    const int64_t first = number * OUT_ROWS, end = smaller(first + OUT_ROWS, p->d_model);
    matvec(sums, OUT_ROWS, &p->out_proj, first, end, step->y, p->dim, p->batch,
           sums + OUT_ROWS * p->batch);
    add_bias(sums, OUT_ROWS, &p->out_proj_bias, first, end - first, p->batch);
    store_matrix(&p->out, sums, OUT_ROWS, p->batch, first, end - first);
}

/* A (batch, channels) part of the workspace, as the two ops see their tensors. */
static struct statescan_tensor as_tensor(float *data, int64_t row_stride) {
    return (struct statescan_tensor){data, row_stride, 1, 0, STATESCAN_FLOAT32};
}

static void point_at(struct statescan_states *states, float *data, int64_t row_stride,
                     int64_t channel_stride, int64_t state_stride) {
    states->data = data;
    states->row_stride = row_stride;
    states->token_stride = states->head_stride = 0;
    states->channel_stride = channel_stride;
    states->state_stride = state_stride;
    states->dtype = STATESCAN_FLOAT32;
}

static void lay_out(struct step *step) {
    struct statescan_mamba_step *p = &step->p;
    const int64_t rank = p->dt_proj.columns;
    step->projected_rows = rank + 2 * p->state.dstate;
    float *memory = (float *)p->workspace;
    float **parts[] = {&step->hidden, &step->x,         &step->z, &step->convolved,
                       &step->dt,     &step->projected, &step->y};
    const int64_t sizes[] = {p->d_model,           p->dim, p->dim, p->dim, p->dim,
                             step->projected_rows, p->dim};
    for (int i = 0; i < 7; i++) {
        *parts[i] = memory;
        memory += p->batch * sizes[i];
    }
    p->conv.x = as_tensor(step->x, p->dim);
    p->conv.out = as_tensor(step->convolved, p->dim);
    point_at(&p->state.x, step->convolved, p->dim, 1, 0);
    point_at(&p->state.z, step->z, p->dim, 1, 0);
    point_at(&p->state.dt, step->dt, p->dim, 1, 0);
    point_at(&p->state.out, step->y, p->dim, 1, 0);
    point_at(&p->state.B, step->projected + rank, step->projected_rows, 0, 1);
    point_at(&p->state.C, step->projected + rank + p->state.dstate, step->projected_rows, 0, 1);
}

void AT_LEVEL(mamba_step_rounds)(struct team_member *member,
                                 const struct statescan_mamba_step *form, void *const *addresses) {
    struct step step;
    struct statescan_mamba_step *p = &step.p;
    copy_words(p, form, sizeof(*p));
    void **targets[] = {&p->hidden.data,      &p->out.data,           &p->conv.state.data,
                        &p->state.state.data, &p->in_proj.data,       &p->in_proj_bias.data,
                        &p->conv.weight.data, &p->conv.bias.data,     &p->x_proj.data,
                        &p->dt_proj.data,     &p->state.dt_bias.data, &p->state.A.data,
                        &p->state.D.data,     &p->out_proj.data,      &p->out_proj_bias.data};
    for (int i = 0; i < 15; i++) {
        *targets[i] = addresses[i];
    }
    p->conv.start.data = p->conv.state.data;
    p->state.start.data = p->state.state.data;
    lay_out(&step);
    if (is_dense_float32(&p->hidden, p->d_model)) {
        step.hidden = p->hidden.data;
    } else {
        team_round(member, run_load, &step, 1);
    }
    const int64_t blocks = divide_up(p->dim, CHANNELS);
    team_round(member, run_in_proj, &step, blocks);
    team_round(member, run_x_proj, &step, divide_up(step.projected_rows, PROJECTED_ROWS));
    team_round(member, run_state, &step, blocks);
    team_round(member, run_out_proj, &step, divide_up(p->d_model, OUT_ROWS));
}

struct call {
    const struct statescan_mamba_step *form;
    void *const *addresses;
};

static void run_script(struct team_member *member, const void *params) {
    const struct call *call = params;
    AT_LEVEL(mamba_step_rounds)(member, call->form, call->addresses);
}

void AT_LEVEL(mamba_step)(const struct statescan_mamba_step *form, void *const *addresses) {
    const struct call call = {form, addresses};
    team_run(&form->workers, run_script, &call);
}
