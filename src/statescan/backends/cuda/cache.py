# SPDX-License-Identifier: Apache-2.0
"""Keeps compiled code on disk between processes, where the user's cache folder allows it.

Bytes by key only: what is compiled, and what must be in a key, is said in ``cubins``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from statescan import settings

_log = logging.getLogger("statescan.cuda")
_MAGIC = b"statescan-code-1"
_DIGEST = 32
_told: set[str] = set()


def key_of(parts: Sequence[str]) -> str:
    """Name of what these parts decide; they may hold any text."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        # With its length in front, no part can reach into its neighbour.
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def read(key: str) -> bytes | None:
    """What is kept under a key; None if nothing is, or if the file is damaged."""
    path = _path(key)
    if path is None:
        return None
    try:
        data = path.read_bytes()
    # Where there can be no folder there is no file either, and writing tells why.
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _tell(f"{path.parents[1]} cannot be read ({error.strerror})")
        return None
    head = len(_MAGIC) + _DIGEST
    payload = data[head:]
    if data[:head] != _MAGIC + hashlib.sha256(payload).digest():
        # Half a file after a full disk, or none of ours: it is written anew after the compilation.
        _log.warning("%s is damaged; the kernel is compiled again", path)
        return None
    return payload


def write(key: str, payload: bytes) -> None:
    """Keep bytes under a key. Readers see the old file or the new one, never a part.

    Where the folder cannot be written the bytes are not kept, which is said once.
    """
    path = _path(key)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{key[:16]}-")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _tell(f"{path.parents[1]} cannot be written ({error.strerror})")


def _path(key: str) -> Path | None:
    try:
        folder = settings.cache_dir()
    # Of a user without a home folder, as in some containers.
    except RuntimeError as error:
        _tell(f"there is no cache folder ({error})")
        return None
    return folder / "cuda" / key[:2] / f"{key}.bin"


def _tell(reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        _log.warning(
            "%s: CUDA kernels that are compiled here are compiled again in the next process; "
            "STATESCAN_CACHE_DIR names another folder",
            reason,
        )
