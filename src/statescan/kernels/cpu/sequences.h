/* SPDX-License-Identifier: Apache-2.0 */
/* Walks the runs of one row and cuts them into stretches of tokens that a tile can hold.
 *
 * Steps count tokens in the order of processing: in a run from `start` to `end`, step s is token s,
 * or start + end - 1 - s in reverse. Stretches end at multiples of TILE_STEPS, which is where
 * states are saved, so a saved state always lies between two stretches. */
#ifndef STATESCAN_SEQUENCES_H
#define STATESCAN_SEQUENCES_H

#include "tile.h"

#define TILE_STEPS  64
#define RUN_PADDING (-2)

struct run {
    int64_t start;
    int64_t end;
    int64_t initial;
    int64_t final;
};

VEC_INLINE int64_t num_runs(const struct statescan_sequences *sequences, int64_t row) {
    if (sequences->runs == 0) {
        return sequences->seqlen > 0;
    }
    return sequences->row_runs[row + 1] - sequences->row_runs[row];
}

VEC_INLINE struct run get_run(const struct statescan_sequences *sequences, int64_t row,
                              int64_t number) {
    if (sequences->runs == 0) {
        return (struct run){0, sequences->seqlen, row, row};
    }
    const int64_t *fields = sequences->runs + 4 * (sequences->row_runs[row] + number);
    return (struct run){fields[0], fields[1], fields[2], fields[3]};
}

/* First step after the stretch that `step` lies in. */
VEC_INLINE int64_t stretch_end(const struct run *run, int64_t step) {
    const int64_t next = (step / TILE_STEPS + 1) * TILE_STEPS;
    return next < run->end ? next : run->end;
}

/* First step of the stretch that ends before `end`. */
VEC_INLINE int64_t stretch_start(const struct run *run, int64_t end) {
    const int64_t before = (end - 1) / TILE_STEPS * TILE_STEPS;
    return before > run->start ? before : run->start;
}

/* Lowest token in memory of steps `step` to `end`. */
VEC_INLINE int64_t first_token(const struct run *run, int64_t step, int64_t end, int64_t reverse) {
    return reverse ? run->start + run->end - end : step;
}

#endif
