/* SPDX-License-Identifier: Apache-2.0 */
/* Publishes the version and the struct layouts of abi.h, so that a test can compare them with the
 * ctypes table. Every struct that crosses the border has its rows here; no computation. */
#include "abi.h"

#define WHOLE(type) {#type, "", 0, (uint32_t)sizeof(struct type)}
#define FIELD(type, field)                                                                         \
    {#type, #field, (uint32_t)offsetof(struct type, field),                                        \
     (uint32_t)sizeof(((struct type *)0)->field)}

static const struct statescan_layout_row layout[] = {
    WHOLE(statescan_launch_request),
    FIELD(statescan_launch_request, launch),
    FIELD(statescan_launch_request, kernel),
    FIELD(statescan_launch_request, stream),
    FIELD(statescan_launch_request, params),
    FIELD(statescan_launch_request, grid_x),
    FIELD(statescan_launch_request, grid_y),
    FIELD(statescan_launch_request, grid_z),
    FIELD(statescan_launch_request, block_x),
    FIELD(statescan_launch_request, block_y),
    FIELD(statescan_launch_request, block_z),
    FIELD(statescan_launch_request, shared_bytes),
    FIELD(statescan_launch_request, unused),
    WHOLE(statescan_layout_row),
    FIELD(statescan_layout_row, structure),
    FIELD(statescan_layout_row, field),
    FIELD(statescan_layout_row, offset),
    FIELD(statescan_layout_row, size),
    {NULL, NULL, 0, 0},
};

/* A parameter struct packed right behind a request must keep 16-byte alignment. */
_Static_assert(sizeof(void *) != 8 || sizeof(struct statescan_launch_request) == 64,
               "a launch request is one cache line on 64-bit platforms");

int statescan_abi_version(void) {
    return STATESCAN_ABI_VERSION;
}

const struct statescan_layout_row *statescan_layout(void) {
    return layout;
}
