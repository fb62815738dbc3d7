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
#define STATESCAN_ABI_VERSION 2

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

/* Kinds of elements in a statescan_tensor. */
enum statescan_dtype { STATESCAN_FLOAT32 = 0, STATESCAN_BFLOAT16 = 1, STATESCAN_FLOAT16 = 2 };

/* Who runs the parts of a kernel; `function` is torch's or the OpenMP runtime's, already loaded. */
enum statescan_pool {
    STATESCAN_POOL_SERIAL = 0,
    STATESCAN_POOL_TORCH = 1, /* torch_parallel_for */
    STATESCAN_POOL_OPENMP = 2 /* GOMP_parallel */
};

/* The structs below have fields of 8 bytes only, so that Python packs one in a single call. Absent
 * tensors have a null address. Strides count elements. */

/* (batch, dim, seqlen) or (rows, dim, tokens), any strides. */
struct statescan_tensor {
    void *data;
    int64_t batch_stride;
    int64_t channel_stride;
    int64_t token_stride;
    int64_t dtype;
};

/* B or C of a scan. Per token: float32 (batch, ngroups, seqlen, dstate) with dense dstate.
 * Constant: float32 (dim, dstate), dense, with a token_stride of 0. */
struct statescan_weights {
    const float *data;
    int64_t batch_stride;
    int64_t group_stride;
    int64_t token_stride;
    int64_t ngroups; /* 0: constant */
};

/* Where the sequences of a call lie. `runs` holds {start, end, initial, final} for each run, in the
 * order of processing; row b has those from row_runs[b] to row_runs[b + 1]. `initial` and `final`
 * number states, -1 stands for zeros and for nobody; initial -2 marks a stretch of padding. Without
 * `runs` each row is one sequence with its own state. */
struct statescan_sequences {
    const int64_t *runs;
    const int64_t *row_runs;
    int64_t batch;
    int64_t seqlen;
    int64_t reverse;
};

/* `count` threads at most, each with `scratch_bytes` of its own in `scratch`. */
struct statescan_workers {
    int64_t count;
    char *scratch;
    int64_t scratch_bytes;
};

struct statescan_selective_scan_fwd {
    struct statescan_tensor x, dt, z, out;
    struct statescan_weights B, C;
    struct statescan_sequences sequences;
    struct statescan_workers workers;
    const float *A;              /* (dim, dstate) */
    const float *D;              /* (dim,) or null */
    const float *dt_bias;        /* (dim,) or null */
    const float *initial_states; /* (states, dim, dstate) or null */
    float *final_states;         /* the same shape */
    float *chunk_states;         /* (batch, nchunks, dim, dstate) or null */
    int64_t dim;
    int64_t dstate;
    int64_t chunk_size;
    int64_t unit_channels; /* neighbours that share B and C */
    int64_t dt_softplus;
};

struct statescan_selective_scan_bwd {
    struct statescan_tensor dout, x, dt, z, dx, ddt, dz;
    struct statescan_weights B, C;
    struct statescan_sequences sequences;
    struct statescan_workers workers;
    const float *A;
    const float *D;
    const float *dt_bias;
    const float *initial_states;
    const float *dfinal_states; /* null: zeros */
    const float *chunk_states;
    float *dinitial_states; /* null: not wanted */
    float *dA;              /* (row_groups, dim, dstate) */
    float *dD;              /* (row_groups, dim) */
    float *ddt_bias;        /* (row_groups, dim) */
    float *dB;              /* (parts of a group, batch, ngroups, seqlen, dstate) or as dA */
    float *dC;
    int64_t dim;
    int64_t dstate;
    int64_t chunk_size;
    int64_t unit_channels;
    int64_t part_channels; /* channels whose dB and dC are summed before they are stored */
    int64_t row_groups;    /* row b belongs to group b % row_groups */
    int64_t dt_softplus;
};

/* Any tensor of the state update: (rows, tokens, heads, channels, dstate), axes that it lacks
 * having stride 0. A pool of states has slots in place of rows. */
struct statescan_states {
    void *data;
    int64_t row_stride;
    int64_t token_stride;
    int64_t head_stride;
    int64_t channel_stride;
    int64_t state_stride;
    int64_t dtype;
};

/* Which slot each row of a decode op uses. Null lists stand for "row b, slot b". A row is padding
 * if an index is negative or `pad_slot`. `accepted` restarts a row from what an earlier call kept.
 */
struct statescan_slots {
    const int64_t *read;
    const int64_t *write;
    const int64_t *accepted;
    int64_t pad_slot;
};

struct statescan_selective_state_update {
    /* `start` is the pool that states are read from: `state`, or a copy of it where a row
     * reads a slot that another one writes. */
    struct statescan_states state, start, kept, x, dt, A, B, C, D, z, dt_bias, out;
    struct statescan_slots slots;
    struct statescan_workers workers;
    int64_t batch;
    int64_t num_tokens;
    int64_t num_heads;
    int64_t head_channels;
    int64_t dstate;
    int64_t B_heads; /* heads that share a group of B */
    int64_t C_heads;
    int64_t dt_softplus;
    int64_t A_is_log; /* A holds the logarithm of the decay rate: A = -exp of it */
};

/* `state` and `kept` have state_len columns as their last axis, `kept` a token in front of dim. */
struct statescan_causal_conv1d_update {
    struct statescan_tensor x, out, state, start, kept, weight, bias;
    struct statescan_slots slots;
    struct statescan_workers workers;
    const int64_t *positions; /* tokens that each ring has seen, or null: newest column last */
    int64_t kept_stride;
    int64_t batch;
    int64_t num_tokens;
    int64_t dim;
    int64_t width;
    int64_t state_len;
    int64_t silu;
};

struct statescan_causal_conv1d_fwd {
    struct statescan_tensor x, out;
    struct statescan_sequences sequences;
    struct statescan_workers workers;
    const float *weight;         /* (dim, width) */
    const float *bias;           /* (dim,) or null */
    const float *initial_states; /* (states, dim, width - 1) or null */
    void *final_states;          /* the same shape, in x's dtype */
    int64_t dim;
    int64_t width;
    int64_t silu;
};

struct statescan_causal_conv1d_bwd {
    struct statescan_tensor dout, x, dx;
    struct statescan_sequences sequences;
    struct statescan_workers workers;
    const float *weight;
    const float *bias;
    const float *initial_states;
    const float *dfinal_states; /* null: zeros */
    float *dinitial_states;     /* null: not wanted */
    float *dweight;             /* (row_groups, parts of the tokens, dim, width) */
    float *dbias;               /* (row_groups, parts of the tokens, dim) */
    int64_t dim;
    int64_t width;
    int64_t silu;
    int64_t part_channels; /* channels and tokens of a row that one task has */
    int64_t part_tokens;
    int64_t row_groups; /* row b belongs to group b % row_groups */
};

/* (rows, columns) with dense columns. */
struct statescan_matrix {
    void *data;
    int64_t row_stride;
    int64_t columns;
    int64_t dtype;
};

/* x (batch, columns), out (batch, rows), bias (rows,): tensors without a token axis. Addresses:
 * x, out, weight, bias. `workspace` holds x as float32. */
struct statescan_vector_linear {
    struct statescan_tensor x, out, bias;
    struct statescan_matrix weight;
    struct statescan_workers workers;
    char *workspace;
    int64_t batch;
    int64_t rows;
};

/* A Mamba-1 mixer and its states. `conv` and `state` describe conv1d, its state, the SSM state, A,
 * D and dt_bias; what they call x, dt, z, B, C and out lies in `workspace`, float32. Addresses:
 * hidden, out, conv state, SSM state, in_proj and bias, conv weight and bias, x_proj, dt_proj and
 * bias, A, D, out_proj and bias. */
struct statescan_mamba_step {
    struct statescan_tensor hidden, out, in_proj_bias, out_proj_bias;
    struct statescan_matrix in_proj, x_proj, dt_proj, out_proj;
    struct statescan_causal_conv1d_update conv;
    struct statescan_selective_state_update state;
    struct statescan_workers workers;
    char *workspace;
    int64_t batch;
    int64_t d_model;
    int64_t dim;
};

/* All layers of a model: `step` describes the mixer of each, its hidden and out being float32 in
 * the workspace. Addresses: hidden, out, the final norm's weight, then for each layer its norm's
 * weight and mamba_step's addresses from the conv state on. */
struct statescan_mamba_stack {
    struct statescan_tensor hidden, out, norm, final_norm;
    struct statescan_mamba_step step;
    const float *eps; /* of all norms */
    char *workspace;
    int64_t num_layers;
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
/* Chooses who runs the parts of kernels, for the whole process. */
STATESCAN_EXPORT void statescan_set_pool(int kind, void *function);
/* Runs kernels on a lower vector level than the processor's, or again on its own; answers with the
 * level in use. For tests. */
STATESCAN_EXPORT int statescan_use_isa(int level);
/* Bytes of one vector at the level in use, which sizes scratch memory. */
STATESCAN_EXPORT int statescan_vector_bytes(void);
STATESCAN_EXPORT void
statescan_selective_scan_fwd(const struct statescan_selective_scan_fwd *params);
STATESCAN_EXPORT void
statescan_selective_scan_bwd(const struct statescan_selective_scan_bwd *params);
/* Decode ops get the addresses of their tensors apart, in the order of the struct's first fields,
 * whose own `data` is not read: calls of one shape then share the rest, already packed. */
STATESCAN_EXPORT void
statescan_selective_state_update(const struct statescan_selective_state_update *form,
                                 void *const *addresses);
STATESCAN_EXPORT void
statescan_causal_conv1d_update(const struct statescan_causal_conv1d_update *form,
                               void *const *addresses);
STATESCAN_EXPORT void statescan_causal_conv1d_fwd(const struct statescan_causal_conv1d_fwd *params);
STATESCAN_EXPORT void statescan_causal_conv1d_bwd(const struct statescan_causal_conv1d_bwd *params);
STATESCAN_EXPORT void statescan_vector_linear(const struct statescan_vector_linear *form,
                                              void *const *addresses);
STATESCAN_EXPORT void statescan_mamba_step(const struct statescan_mamba_step *form,
                                           void *const *addresses);
STATESCAN_EXPORT void statescan_mamba_stack(const struct statescan_mamba_stack *form,
                                            void *const *addresses);
/* The table ends with a row whose `structure` is null. */
STATESCAN_EXPORT const struct statescan_layout_row *statescan_layout(void);

#endif
