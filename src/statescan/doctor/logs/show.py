# SPDX-License-Identifier: Apache-2.0
"""How the answer about a log looks in a terminal: cause, line, fix, what it is not, confidence.

Returns lines and prints nothing; nothing is decided here.
"""

from __future__ import annotations

from statescan.doctor.logs.diagnosis import Diagnosis
from statescan.doctor.model import Severity
from statescan.doctor.render import text


def lines(diagnosis: Diagnosis, shell: str, width: int, coloured: bool) -> list[str]:
    """The whole answer.

    Args:
        diagnosis: Of a log.
        shell: For which the commands are written.
        width: Of the terminal.
        coloured: Whether it understands colours.
    """
    ok = diagnosis.root_cause == "success"
    kind: Severity | str = "ok" if ok else diagnosis.problem.severity
    head = f"{diagnosis.problem.code} {diagnosis.root_cause}: {diagnosis.summary}"
    mark = text.mark(kind, coloured)
    first, *rest = text.paragraph(head, width - len(text.MARKS[kind]) - 1)
    shown = [f"{mark} {first}", *(f"  {line}" for line in rest)]
    for place, line in enumerate(diagnosis.evidence):
        label = f"line {line.number}: " if line.number else "log: "
        if place == 1:
            shown.append("  also:")
        shown += text.paragraph(line.text or "(blank)", width, "  " if not place else "    ", label)
    shown.append("")
    shown += text.fix_lines(diagnosis.fix, shell, width, "")
    if diagnosis.not_causes:
        shown.append("")
    for row in diagnosis.not_causes:
        where = f" (line {', '.join(map(str, row.lines))})" if row.lines else ""
        name = row.id or row.what
        shown += text.paragraph(f"{name}{where}: {row.reason}", width, "", "not the cause: ")
    shown.append("")
    shown += text.paragraph(
        f"{diagnosis.confidence}: {diagnosis.reason}", width, "", "confidence: "
    )
    return shown
