# SPDX-License-Identifier: Apache-2.0
"""Asks child processes for what only an import or a call into a driver shows.

What a child does is in ``child``; here its answers, its death and its silence become facts.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from statescan.doctor.facts import extensions
from statescan.doctor.facts.machine import Machine, Ran
from statescan.doctor.model import Fact

PROGRAM = Path(__file__).with_name("child.py")
SECONDS = 120.0
"""For a whole child: torch on a cold network disk has taken more than a minute."""
DRIVER_SECONDS = 20.0

_START = (
    "import sys; exec(compile(open(sys.argv[1], encoding='utf-8').read(), sys.argv[1], 'exec'))"
)
# With it set, statescan itself would answer for the originals.
_WITHOUT = ("STATESCAN_COMPAT", "PYTHONWARNINGS")
_SOURCE = "a child process"

Answers = Mapping[str, Mapping[str, Any]]


def ask(machine: Machine, steps: Sequence[str], seconds: float = SECONDS) -> dict[str, Any]:
    """The answers to these steps; a step in which the process dies is left out the next time.

    Returns:
        For each step its result; ``{"ok": False, "error": ...}`` where there is none.
    """
    answers: dict[str, Any] = {}
    left = list(steps)
    while left:
        ran = _start(machine, left, seconds)
        begun = _read(ran, answers)
        rest = [step for step in left if step not in answers]
        if not rest:
            break
        dead = begun if begun in rest else rest[0]
        answers[dead] = {"ok": False, "error": _death(ran)}
        # A step that every later one begins with would only die again.
        first_died = dead == left[0] and dead in ("torch", "nvml")
        if first_died or ran.problem:
            for step in rest:
                answers.setdefault(step, {"ok": False, "error": f"not tried after {dead!r} failed"})
            break
        kept = [step for step in left if step in ("torch",) and step in answers]
        left = [*kept, *(step for step in rest if step != dead)]
        if left == kept:
            break
        for step in kept:
            answers.pop(step)
    return answers


def _start(machine: Machine, steps: Sequence[str], seconds: float) -> Ran:
    folders = [str(folder) for folder in machine.search_path]
    if machine.sees_cwd:
        folders.insert(0, str(machine.cwd))
    # Looking must not write compiled files into folders that it imports from.
    options = ["-B", "-c", _START, str(PROGRAM), json.dumps(list(steps)), json.dumps(folders)]
    hidden = ("CUDA_VISIBLE_DEVICES",) if steps and steps[0] in ("nvml", "driver") else ()
    return machine.run([machine.executable, *options], seconds, (*_WITHOUT, *hidden))


def _read(ran: Ran, answers: dict[str, Any]) -> str:
    """Collect the answers; returns the last step that was begun."""
    begun = ""
    for line in ran.out.splitlines():
        try:
            step, result = json.loads(line)
        except ValueError:
            continue
        if step == "begin":
            begun = str(result)
        else:
            answers[str(step)] = result
    return begun


def _death(ran: Ran) -> str:
    """Why a process ended before its answer."""
    if ran.problem:
        return ran.problem
    lines = [line.strip() for line in ran.err.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("Fatal Python error")]
    # Python's own trace has the place of the crash first.
    frames = [line for line in lines if line.startswith("File ") and "<frozen" not in line]
    shown = [*fatal[:1], *frames[:1]] if fatal else lines[-8:]
    code = ran.code or 0
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        ended = f"the process was ended by {name}"
    else:
        ended = f"the process ended with exit status {code}"
    return "\n".join([*shown, ended])


def driver(machine: Machine) -> dict[str, Any]:
    """What NVML or else the driver says: version, cuda, gpus, source, and problem for neither."""
    first = ask(machine, ["nvml"], DRIVER_SECONDS)["nvml"]
    if first.get("ok"):
        return {**first, "source": "NVML"}
    second = ask(machine, ["driver"], DRIVER_SECONDS)["driver"]
    source = "libcuda" if machine.os == "linux" else "nvcuda.dll"
    problem = "" if second.get("ok") else str(second.get("error", ""))
    return {**second, "source": source, "problem": problem}


def torch_and_originals(machine: Machine, smoke: bool) -> dict[str, Any]:
    """Answers of one child: the import of torch, its GPUs, and imports of the originals."""
    packages = extensions.importable_packages(machine)
    steps = ["torch", "devices"]
    steps += [f"import:{name}" for name in (*extensions.importable_modules(machine), *packages)]
    if smoke:
        steps += [
            step
            for step, name in (("scan", "mamba_ssm"), ("conv", "causal_conv1d"))
            if name in packages
        ]
    return ask(machine, steps)


def with_answers(found: Mapping[str, Fact], answers: Answers) -> dict[str, Fact]:
    """The facts that files gave, with what the imports showed."""
    facts = _torch_facts(answers)
    for name in ("extensions.modules", "extensions.python"):
        seen = found[name]
        rows = {key: {**row, **_imported(answers, key)} for key, row in (seen.value or {}).items()}
        facts[name] = Fact(name, rows, f"files, and {_SOURCE}", seen.problem)
    _add_use(facts["extensions.python"].value, answers)
    amd, names = found["driver.amd"], answers.get("devices", {}).get("gfx")
    if names and not (amd.value or {}).get("gpus"):
        row = {"rocm": None, **(amd.value or {}), "gpus": names}
        facts["driver.amd"] = Fact("driver.amd", row, _SOURCE)
    return facts


def _torch_facts(answers: Answers) -> dict[str, Fact]:
    imported, seen = answers["torch"], answers.get("devices", {})
    problem = str(seen.get("problem") or seen.get("error") or "") if imported.get("ok") else ""
    row = {"ok": bool(imported.get("ok")), "error": str(imported.get("error", ""))}
    values: dict[str, Any] = {
        "torch.import": {**row, "seconds": imported.get("seconds")},
        "torch.arch_list": seen.get("archs"),
        "torch.devices": seen.get("devices"),
        "torch.cuda_available": seen.get("available"),
    }
    found = {name: Fact(name, value, _SOURCE) for name, value in values.items()}
    if problem:
        found["torch.devices"] = Fact("torch.devices", seen.get("devices"), _SOURCE, problem)
    return found


def _imported(answers: Answers, name: str) -> dict[str, Any]:
    answer = answers.get(f"import:{name}")
    if answer is None or not answers["torch"].get("ok"):
        # Nothing is known of a module that needs a torch which cannot be imported.
        return {}
    found = {"importable": bool(answer.get("ok")), "error": str(answer.get("error", ""))}
    if name in extensions.PACKAGES and answer.get("file"):
        found["file"] = answer["file"]
    return found


def _add_use(rows: Mapping[str, dict[str, Any]], answers: Answers) -> None:
    """What became of the test computations; without a GPU none could have worked."""
    ops = {"mamba_ssm": ("scan", "selective_scan"), "causal_conv1d": ("conv", "causal_conv1d")}
    for name, (step, op) in ops.items():
        answer = answers.get(step)
        if name in rows and answer is not None and answers.get("devices", {}).get("available"):
            rows[name]["usable"] = {op: answer.get("outcome") or str(answer.get("error", ""))}


def own(machine: Machine, smoke: bool, with_torch: bool = True) -> dict[str, Fact]:
    """Facts of the other child: statescan's library, backends, and a small computation."""
    steps = ["native"]
    if with_torch:
        steps += ["backends", *(["smoke"] if smoke else [])]
    answers = ask(machine, steps)
    native = answers["native"]
    died = native.get("ok") is False
    found = {
        "statescan.native": Fact(
            *("statescan.native", None if died else native, _SOURCE),
            str(native["error"]) if died else "",
        )
    }
    if "backends" in answers:
        rows, error = answers["backends"].get("rows"), answers["backends"].get("error", "")
        problem = "" if rows is not None else str(error)
        found["statescan.backends"] = Fact("statescan.backends", rows, _SOURCE, problem)
    if "smoke" in answers:
        row = {"ok": False, "error": "", "seconds": None, **answers["smoke"]}
        found["statescan.smoke"] = Fact("statescan.smoke", row, _SOURCE)
    return found


def unseen(names: Sequence[str], reason: str) -> dict[str, Fact]:
    """Facts for which no child was started, with the reason as their source."""
    return {name: Fact(name, None, reason) for name in names}
