/* SPDX-License-Identifier: Apache-2.0 */
/* Slots of the decode ops: where each row starts from and where its state goes. */
#ifndef STATESCAN_DECODE_H
#define STATESCAN_DECODE_H

#include "abi.h"

/* Rows of at most this many numbers in all stay on the calling thread: waking another takes about
 * as long as they do. */
#define DECODE_SERIAL (INT64_C(1) << 15)

struct row_slots {
    int64_t read;
    int64_t write;
    int64_t accepted; /* 0: from the pool, n: from what was kept after token n - 1 */
    int padding;
};

static inline struct row_slots slots_of(const struct statescan_slots *slots, int64_t row) {
    struct row_slots found = {row, row, 0, 0};
    if (slots->read != NULL) {
        found.read = found.write = slots->read[row];
    }
    if (slots->write != NULL) {
        found.write = slots->write[row];
    }
    const int64_t pad = slots->pad_slot;
    const int read_pads = slots->read != NULL && (found.read < 0 || found.read == pad);
    const int write_pads =
        (slots->read != NULL || slots->write != NULL) && (found.write < 0 || found.write == pad);
    found.padding = read_pads || write_pads;
    if (slots->accepted != NULL && !found.padding) {
        found.accepted = slots->accepted[row];
    }
    return found;
}

#endif
