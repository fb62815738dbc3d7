# SPDX-License-Identifier: Apache-2.0
"""A program in front of nvcc: replaces the GPU targets of a compilation and writes a journal.

Run as a file by ``wrapper``, with a configuration and nvcc's own arguments; standard library only,
and nothing of statescan, since it starts once for every source file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

SOURCES = (".cu", ".hip")
_PAIR_OPTIONS = ("-gencode", "--generate-code")
_THREAD_OPTIONS = ("-t", "--threads")


def filtered(arguments: list[str], targets: list[str], threads: int | None) -> list[str]:
    """nvcc's arguments with other targets.

    Args:
        arguments: As the build wrote them.
        targets: Values of ``-gencode``, such as "arch=compute_90,code=sm_90"; none to keep
            those that are there.
        threads: Parallel steps of one nvcc; None to keep what is there.

    Returns:
        The same without every ``-gencode`` pair and with one for each target, unless there was
        none: then it is not a compilation for a GPU, and nothing is touched.
    """
    kept: list[str] = []
    pairs = 0
    rest = iter(arguments)
    for word in rest:
        name, _, value = word.partition("=")
        if targets and name in _PAIR_OPTIONS:
            pairs += 1
            if not value:
                next(rest, None)
        elif threads is not None and name in _THREAD_OPTIONS:
            if not value:
                next(rest, None)
            kept += ["--threads", str(threads)]
        else:
            kept.append(word)
    if not pairs:
        return kept
    return kept + [word for target in targets for word in ("-gencode", target)]


def source_of(arguments: list[str]) -> str:
    """File name of the source that is compiled; empty where none is."""
    if not {"-c", "--compile", "-dc", "--device-c"} & set(arguments):
        return ""
    return next((Path(word).name for word in arguments if word.endswith(SOURCES)), "")


def main(arguments: list[str]) -> NoReturn:
    """Run nvcc as the configuration (the first argument) says, and end as it ends."""
    configuration = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    given = arguments[1:]
    words = filtered(given, configuration["targets"], configuration["threads"])
    source = source_of(given)
    journal = Path(configuration["journal"])
    if source:
        _write(journal, {"event": "start", "source": source, "time": time.time()})
    started = time.monotonic()
    code = _call([*configuration["nvcc"], *words])
    if source:
        end = {
            "event": "end",
            "source": source,
            "time": time.time(),
            "seconds": round(time.monotonic() - started, 3),
            "code": code,
            "memory_mb": _memory(),
        }
        _write(journal, end)
    sys.exit(code if code >= 0 else 128 - code)


def _call(command: list[str]) -> int:
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: cannot be run: {error.strerror}\n")
        return 127

    def end(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    # Whoever ends this process means nvcc; without this it would go on by itself.
    signal.signal(signal.SIGTERM, end)
    code = child.wait()
    if code < 0:
        # ninja only tells that the command failed; this line tells of what.
        name = signal.Signals(-code).name
        sys.stderr.write(f"nvcc error   : nvcc died due to signal {-code} ({name})\n")
    return code


def _memory() -> int | None:
    """The largest process among nvcc's, in MB; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return int(used // (1024 * 1024 if sys.platform == "darwin" else 1024))


def _write(journal: Path, event: dict[str, Any]) -> None:
    # One write in append mode is whole even when several compilers end at once.
    line = json.dumps(event) + "\n"
    descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1:])
