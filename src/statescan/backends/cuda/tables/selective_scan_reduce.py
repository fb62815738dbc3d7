# SPDX-License-Identifier: Apache-2.0
"""The last step of the backward selective scan: adds up what its blocks left."""

from __future__ import annotations

from statescan.backends.cuda.tables.base import INTEGER, POINTER, Instance, Kernel

JOBS = 5
"""Gradients that one launch can fill; jobs that are not used have no blocks."""

COLUMNS = 128
"""Neighbours that a block adds up."""

KERNEL = Kernel(
    stem="selective_scan_reduce",
    fields=tuple(
        field
        for job in range(JOBS)
        for field in (
            (f"source_{job}", "const float*"),
            (f"target_{job}", POINTER),
            *(
                (f"{name}_{job}", INTEGER)
                for name in (
                    *("dtype", "rows", "row_stride", "length", "states", "groups"),
                    *("batch_stride", "group_stride", "state_stride", "reverse", "blocks"),
                )
            ),
        )
    ),
    instances=(Instance(suffix="sums", template="", threads=256),),
)
