# SPDX-License-Identifier: Apache-2.0
"""Carries out a build stage by stage, tries once more where that is safe, and tells what happened.

What the stages are is in ``stages``, what may be tried again in ``retry``; nothing is printed.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from statescan.doctor.builder import environment, files, proof, retry, runner, stages, wrapper
from statescan.doctor.builder.model import DONE, FAILED, SKIPPED, Outcome, Setup, Stage
from statescan.doctor.builder.progress import Progress, State
from statescan.doctor.builder.stages import Places
from statescan.doctor.logs.analyse import analyse
from statescan.doctor.logs.diagnosis import Diagnosis
from statescan.doctor.model import Facts


class Watcher(Protocol):
    """Who is told of a build while it goes on."""

    def stage(self, stage: Stage) -> None:
        """A stage starts, is skipped, or has ended; its status tells which."""

    def compiling(self, state: State) -> None:
        """The compilation goes on; called about once a second."""

    def note(self, text: str) -> None:
        """Something worth telling."""


@dataclass
class _Build:
    """What a build has come to so far."""

    setup: Setup
    facts: Facts
    python: str
    outer: Mapping[str, str]
    watcher: Watcher
    variables: dict[str, str] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    wheel: Path | None = None
    tree: Path | None = None
    nvcc: wrapper.Wrapper | None = None
    diagnosis: Diagnosis | None = None
    retried: str = ""

    @property
    def places(self) -> Places:
        return Places(self.setup.folder)


def run(
    setup: Setup, facts: Facts, python: str, outer: Mapping[str, str], watcher: Watcher
) -> Outcome:
    """Build, install and prove a package.

    Args:
        setup: Of ``before.prepare``, without findings.
        facts: Of this machine.
        python: The interpreter to build for.
        outer: Environment variables of this process.
        watcher: Is told what happens.
    """
    build = _Build(setup, facts, python, outer, watcher)
    _open(build)
    steps = (_tools, _source, _compile, _install, _import, _smoke)
    status = "built"
    try:
        for step in steps:
            if not step(build):
                status = "failed"
                break
    except KeyboardInterrupt:
        status = "interrupted"
    if status == "built":
        # Objects and sources are large, and whoever wants them has the log and the source package.
        shutil.rmtree(build.places.source, ignore_errors=True)
    done = {row.name for row in build.stages}
    rest = [row for row in stages.plan(setup, facts, python) if row.name not in done]
    return Outcome(
        status,
        setup,
        (*build.stages, *(replace(row, status=SKIPPED, note="not reached") for row in rest)),
        build.wheel,
        build.diagnosis,
        build.retried,
        _kernels(build),
        files.tail(setup.log) if status == "failed" else (),
    )


def _open(build: _Build) -> None:
    """Make the folder, the wrapper and the first lines of the log."""
    setup = build.setup
    setup.folder.mkdir(parents=True, exist_ok=True)
    build.nvcc = _wrapper(build)
    build.variables = environment.of_child(setup.environment, build.outer)
    build.variables["PYTORCH_NVCC"] = build.nvcc.variable
    head = [f"{setup.release.package} {setup.release.version} for {build.python}"]
    head += [f"{name}={value}" for name, value in sorted(setup.environment.set.items())]
    head += [
        f"{name}={value} (as it was)" for name, value in sorted(setup.environment.kept.items())
    ]
    setup.log.write_text("".join(f"# {line}\n" for line in head), encoding="utf-8")


def _wrapper(build: _Build, threads: int | None = None) -> wrapper.Wrapper:
    setup = build.setup
    given = setup.environment.kept.get("PYTORCH_NVCC")
    real = shlex.split(given) if given else [f"{setup.toolkit}/bin/nvcc"]
    threads = setup.environment.threads if threads is None else threads
    return wrapper.generate(setup.folder, real, setup.targets.pairs, threads)


def _tools(build: _Build) -> bool:
    stage = stages.tools(build.facts, build.python)
    return _skipped(build, stage) or _done(build, stage)


def _source(build: _Build) -> bool:
    stage = stages.source(build.setup, build.python)
    if not _done(build, stage):
        change = retry.change("source", build.diagnosis) if build.diagnosis else None
        if change is None:
            return False
        _again(build, change)
        if not _done(build, stages.source(build.setup, build.python, no_cache=change.no_cache)):
            return False
    archives = sorted(build.places.sdist.glob("*.tar.gz"))
    build.tree = files.unpacked(archives[-1], build.places.source) if archives else None
    if build.tree is not None and any(build.tree.rglob("*.cu")):
        return True
    name = archives[-1].name if archives else "what was fetched"
    _fail(build, f"{name} holds no CUDA sources.")
    return False


def _compile(build: _Build) -> bool:
    assert build.tree is not None and build.nvcc is not None
    stage = stages.compilation(build.setup, build.python, build.tree)
    if not _compiled(build, stage):
        roomier = retry.is_roomier(build.places.folder, build.variables)
        cause = build.diagnosis
        change = retry.change("compile", cause, roomier=roomier) if cause else None
        if change is None:
            return False
        _again(build, change)
        if not _compiled(build, stage):
            return False
    wheels = sorted(build.places.wheel.glob("*.whl"))
    if not wheels:
        _fail(build, "pip said that it succeeded, and there is no wheel.")
        return False
    build.wheel = wheels[-1]
    count = sum(row.code == 0 for row in build.nvcc.compilations())
    if not count:
        build.watcher.note("nvcc was not called: setup.py took a published wheel")
    build.stages[-1] = replace(build.stages[-1], note=f"{count} files by nvcc; {build.wheel.name}")
    return True


def _compiled(build: _Build, stage: Stage) -> bool:
    assert build.tree is not None and build.nvcc is not None
    jobs = build.variables.get("MAX_JOBS", "1")
    progress = Progress(build.nvcc, build.tree, int(jobs) if jobs.isdigit() else 1)

    told = 0.0

    def watch(line: bytes) -> None:
        nonlocal told
        # Verbose compilers write thousands of lines; those that change nothing need no look.
        if progress.line(line) or time.monotonic() - told > runner.TICK / 2:
            told = time.monotonic()
            build.watcher.compiling(progress.state())

    return _done(build, stage, watch=watch)


def _install(build: _Build) -> bool:
    assert build.wheel is not None
    return _done(build, stages.install(build.setup, build.python, build.wheel))


def _import(build: _Build) -> bool:
    release = build.setup.release
    build.places.imports.write_text(proof.loads(release), encoding="utf-8")
    said: list[str] = []
    if not _done(build, stages.imports(build.setup, build.python), watch=_collect(said)):
        return False
    proved = [line.removeprefix(proof.SAID) for line in said if line.startswith(proof.SAID)]
    file = Path(proved[0]) if proved and Path(proved[0]).is_file() else None
    lacking = proof.lacking(file, build.setup.targets) if file else ()
    if lacking:
        _fail(build, f"{file} has no code for {', '.join(lacking)}.")
        return False
    held = [f"code for {', '.join(proof.inside(file))}"] if file else []
    build.stages[-1] = replace(build.stages[-1], note="; ".join([*held, *proved[1:]]))
    return True


def _smoke(build: _Build) -> bool:
    stage = stages.smoke(build.setup, build.facts, build.python)
    if _skipped(build, stage):
        return True
    build.places.computes.write_text(proof.computes(build.setup.release), encoding="utf-8")
    said: list[str] = []
    passed = _done(build, stage, watch=_collect(said))
    build.stages[-1] = replace(build.stages[-1], note="; ".join(said[-2:]))
    return passed


def _skipped(build: _Build, stage: Stage) -> bool:
    if stage.status != SKIPPED:
        return False
    build.stages.append(stage)
    build.watcher.stage(stage)
    return True


def _done(build: _Build, stage: Stage, watch: Callable[[bytes], None] = lambda _: None) -> bool:
    """Run the commands of a stage; on a failure its part of the log is read for the cause."""
    build.watcher.stage(stage)
    started = time.monotonic()
    log = build.setup.log
    # A second attempt takes the row of the first.
    build.stages[:] = [row for row in build.stages if row.name != stage.name]
    build.stages.append(replace(stage, status=FAILED, note="interrupted"))
    offset, code = log.stat().st_size, 0
    for command in stage.commands:
        files.append(log, f"\n$ {shlex.join(command.run)}\n")
        code = runner.run(command.run, build.setup.folder, build.variables, log, watch)
        if code:
            break
    ended = replace(
        stage,
        status=FAILED if code else DONE,
        seconds=time.monotonic() - started,
        note=f"exit code {code}" if code else "",
    )
    build.stages[-1] = ended
    build.diagnosis = _diagnosed(log, offset) if code else None
    build.watcher.stage(ended)
    return not code


def _fail(build: _Build, why: str) -> None:
    """Turn the stage that just ended into a failed one, for a reason that no program told."""
    files.append(build.setup.log, f"# {why}\n")
    build.stages[-1] = replace(build.stages[-1], status=FAILED, note=why)
    build.watcher.stage(build.stages[-1])


def _again(build: _Build, change: retry.Change) -> None:
    """Prepare the second attempt; what is compiled already is kept by ninja."""
    build.retried = change.text
    build.variables.update(change.set)
    if change.temporary:
        build.places.temporary.mkdir(exist_ok=True)
        build.variables["TMPDIR"] = str(build.places.temporary)
    if change.threads is not None:
        build.nvcc = _wrapper(build, change.threads)
    files.append(build.setup.log, f"\n# second attempt: {change.text}\n")
    build.watcher.note(f"trying once more with {change.text}")


def _diagnosed(log: Path, offset: int) -> Diagnosis:
    with log.open("rb") as stream:
        stream.seek(offset)
        return analyse(stream)


def _collect(said: list[str]) -> Callable[[bytes], None]:
    def watch(line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").strip()
        if text:
            said.append(text)

    return watch


def _kernels(build: _Build) -> tuple[Mapping[str, object], ...]:
    rows: Sequence[wrapper.Compilation] = build.nvcc.compilations() if build.nvcc else ()
    return tuple(
        {"source": r.source, "seconds": r.seconds, "code": r.code, "memory_mb": r.memory_mb}
        for r in rows
    )
