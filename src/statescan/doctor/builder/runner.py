# SPDX-License-Identifier: Apache-2.0
"""Runs one program of a build: its output into the log and to a watcher, its whole tree ended.

What the program is and what its output means is not known here.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

TICK = 1.0
"""Seconds after which the watcher is called though there is no output."""
GRACE = 10.0
"""Seconds between asking a tree of processes to end and ending it."""

Watch = Callable[[bytes], None]


def run(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], log: Path, watch: Watch
) -> int:
    """Run a program to its end.

    Args:
        command: Program and arguments.
        folder: Where it runs.
        variables: All of its environment.
        log: Gets every byte of its output, at its end.
        watch: Called for each line, and with nothing while there is none.

    Returns:
        Its exit code; 127 when it cannot be started. An interrupt of this process ends the program
        with all that it started, and goes on as the same KeyboardInterrupt.
    """
    with log.open("ab") as sink:
        try:
            child = subprocess.Popen(
                list(command),
                cwd=folder,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # A group of its own: compilers are great-grandchildren of this process.
                start_new_session=True,
            )
        except OSError as error:
            sink.write(f"{command[0]}: cannot be run: {error.strerror}\n".encode())
            return 127
        assert child.stdout is not None
        # The tree ends before the pipe is closed: closing waits for the thread that reads it.
        with child.stdout as output, _ended_with_us(child):
            for line in _lines(output):
                if line:
                    sink.write(line)
                    sink.flush()
                watch(line)
            return child.wait()


def _lines(output: IO[bytes]) -> Iterator[bytes]:
    """Lines as they come, and an empty one each TICK without any."""
    ready: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        # A reader of its own, because a pipe cannot be waited for with a limit everywhere.
        for line in iter(output.readline, b""):
            ready.put(line)
        ready.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = ready.get(timeout=TICK)
        except queue.Empty:
            yield b""
            continue
        if line is None:
            return
        yield line


@contextmanager
def _ended_with_us(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends the child's whole group when this process is interrupted, asked to end, or fails."""

    def stop(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        # A closed terminal or a job limit would leave compilers running for an hour; what nohup
        # made this process ignore stays ignored.
        before = {
            number: signal.signal(number, stop)
            for number in (signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        }
    try:
        yield
    except BaseException:
        _end(child)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child's session: ninja gives each compiler a process group of its own."""
    session = child.pid
    _signal_group(session, signal.SIGTERM)
    limit = time.monotonic() + GRACE
    # ninja passes the signal on to its compilers; killed at once, it could not.
    while time.monotonic() < limit:
        child.poll()
        if child.returncode is not None and not _members(session):
            return
        time.sleep(0.05)
    for process in _members(session):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    _signal_group(session, signal.SIGKILL)
    child.wait()


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _members(session: int) -> list[int]:
    """Living processes of a session, by /proc; none where there is no such folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            # It ended meanwhile.
            continue
        # The name in parentheses may hold anything; behind it stand state, parent, group, session.
        fields = text.rpartition(")")[2].split()
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(file.parent.name))
    return found
