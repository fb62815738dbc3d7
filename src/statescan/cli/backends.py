# SPDX-License-Identifier: Apache-2.0
"""``statescan backends``: the backends in the order of asking, and why each is or is not usable.

What a single call would run on is ``explain``'s.
"""

from __future__ import annotations

import argparse
from typing import Any

from statescan.cli import options, render


def configure_parser(subparsers: options.Subparsers) -> None:
    """Add the command."""
    parser = options.add_command(
        *(subparsers, "backends", execute, "List the backends and why each is usable or not."),
        "Exit code 1 when STATESCAN_BACKEND names a backend that does not exist or cannot run.",
    )
    options.add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    rows, native = backend_rows(), native_row()
    fault = environment_fault(rows)
    if args.json:
        render.document(
            "backends", {"backends": rows, "native_library": native, "error": fault or None}
        )
    else:
        print_backends(rows, native)
        print_offers(rows)
    if fault:
        render.error(fault)
        return 1
    return 0


def backend_rows() -> list[dict[str, Any]]:
    """One row a backend, ready for JSON."""
    from statescan import dispatch

    rows = []
    for backend in dispatch.all_backends():
        support = backend.availability()
        reason = support.reason or (
            "chosen by 'auto' where it can run the call"
            if backend.automatic
            else "never chosen by 'auto'; force it by name"
        )
        rows.append(
            {
                "backend": backend.name,
                "usable": support.ok,
                "automatic": backend.automatic,
                "reason": reason,
                "ops": sorted(backend.modules),
            }
        )
    return rows


def native_row() -> dict[str, Any]:
    """The C library: not a backend, but what native ones load."""
    from statescan.backends import native

    found = native.status()
    if found.library is None:
        return {"usable": False, "isa": None, "path": None, "reason": found.reason}
    library = found.library
    return {
        "usable": True,
        "isa": library.isa,
        "path": str(library.path),
        "reason": f"vector level {library.isa}",
    }


def environment_fault(rows: list[dict[str, Any]]) -> str:
    """What is wrong with STATESCAN_BACKEND, "" when nothing is."""
    from statescan import settings

    forced = settings.backend()
    by_name = {row["backend"]: row for row in rows}
    if forced == "auto" or (forced in by_name and by_name[forced]["usable"]):
        return ""
    if forced in by_name:
        problem = f"which is not usable here: {by_name[forced]['reason']}"
    else:
        problem = "which is not a backend"
    return (
        f"the environment variable STATESCAN_BACKEND is {forced!r}, {problem}.\n"
        f"It must be 'auto' or one of: {', '.join(by_name)}.\n"
        "Unset it, or set it to a usable backend; every op raises until then."
    )


def print_backends(rows: list[dict[str, Any]], native: dict[str, Any]) -> None:
    """The table of backends, with the C library as its last row."""
    cells = [(row["backend"], "yes" if row["usable"] else "no", row["reason"]) for row in rows]
    cells.append(("(C library)", "yes" if native["usable"] else "no", native["reason"]))
    render.table(("backend", "usable", "reason"), cells)


def print_offers(rows: list[dict[str, Any]]) -> None:
    """Which op each backend offers."""
    from statescan.backends.base import ALL_OPS

    render.say()
    names = [row["backend"] for row in rows]
    offered = {row["backend"]: row["ops"] for row in rows}
    render.table(
        ("op", *names),
        [(op, *("yes" if op in offered[name] else "-" for name in names)) for op in ALL_OPS],
    )
