# SPDX-License-Identifier: Apache-2.0
"""The ladder of backends for one call: which is chosen and why each other is not.

It asks the same questions as ``select`` and runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from statescan.backends.base import OpRequest
from statescan.dispatch.registry import all_backends
from statescan.dispatch.select import AUTO, answer, choose, wanted
from statescan.errors import BackendUnavailableError


@dataclass(frozen=True)
class Row:
    """One backend's place on the ladder."""

    backend: str
    chosen: bool
    reason: str


@dataclass(frozen=True)
class Explanation:
    """The answer of ``explain``: rows in the order of asking. ``print`` it, or read ``rows``.

    ``chosen`` is the name of the backend that would run the call, "" when none would.
    """

    request: OpRequest
    rows: tuple[Row, ...]

    @property
    def chosen(self) -> str:
        return next((row.backend for row in self.rows if row.chosen), "")

    def __str__(self) -> str:
        request = self.request
        dims = ", ".join(f"{name} {size}" for name, size in request.dims.items())
        dtypes = ", ".join(sorted(set(request.dtypes.values())))
        flags = ", ".join(sorted(request.flags))
        facts = "; ".join(part for part in (dtypes, dims, flags and f"with {flags}") if part)
        lines = [f"{request.op} on {request.device}" + (f" ({facts})" if facts else "")]
        width = max(len(row.backend) for row in self.rows)
        for row in self.rows:
            mark = "chosen" if row.chosen else "-"
            lines.append(f"  {row.backend:<{width}}  {mark:<6}  {row.reason}".rstrip())
        return "\n".join(lines)


def explain_request(request: OpRequest, backend: str = AUTO) -> Explanation:
    """Ask every backend about ``request`` and say which one ``backend=`` would run it on."""
    name, source = wanted(backend)
    try:
        chosen = choose(backend, request)[0].name
    except BackendUnavailableError:
        chosen = ""
    rows = []
    for candidate in all_backends():
        support = answer(candidate, request)
        if candidate.name == chosen:
            reason = "the first that can" if name == AUTO else f"forced by {source}"
        elif not support.ok:
            reason = support.reason
        elif not candidate.automatic and name == AUTO:
            reason = "can run it; only when forced by name"
        elif name != AUTO:
            reason = f"can run it; '{name}' is forced by {source}"
        else:
            reason = "can run it; a faster one is chosen"
        rows.append(Row(candidate.name, candidate.name == chosen, reason))
    return Explanation(request, tuple(rows))
