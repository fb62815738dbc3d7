# SPDX-License-Identifier: Apache-2.0
"""Reads the tensors of a ``torch.save`` file without running anything that the file asks for.

``torch.load(weights_only=True)`` is not used: before torch 2.6 it could be made to execute code
(CVE-2025-32434), before 2.10 to write outside its memory (CVE-2026-24747). Writing is torch's.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from statescan.errors import CheckpointError
from statescan.models.safe_files import check_regular, one_line, reason

MAX_PICKLE_BYTES = 64 * 2**20
"""The part with names and shapes; that of a model with 600 tensors takes 60 kB."""

_STORAGES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}
_REBUILD_TENSOR = "torch._utils _rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils _rebuild_parameter"
_ORDERED_DICT = "collections OrderedDict"
_KNOWN = {*_STORAGES, _REBUILD_TENSOR, _REBUILD_PARAMETER, _ORDERED_DICT}

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS_AND_TEXT = {
    *("BININT", "BININT1", "BININT2", "LONG1", "INT", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Name(NamedTuple):
    """A class or function that the file names; only ever compared, never looked up."""

    text: str


class _Storage(NamedTuple):
    """The bytes of one or several tensors."""

    content: Tensor
    dtype: torch.dtype


class _RefusedError(Exception):
    """The file holds something that is not needed for tensors."""


def read_torch_file(path: Path) -> dict[str, Tensor]:
    """Tensors by name.

    Raises:
        CheckpointError: the file is damaged, or holds anything but a table of tensors.
    """
    size = check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            table = _Interpreter(_storages(archive, size)).run(_pickle(archive))
    except _RefusedError as error:
        raise CheckpointError(f"{path} holds more than tensors: {error}") from error
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} is damaged, or was written before PyTorch 1.6 and must be saved again: "
            f"{reason(error)}"
        ) from error
    except MemoryError as error:
        raise CheckpointError(f"{path} does not fit into memory") from error
    except Exception as error:
        # Damaged archives raise almost anything, from struct.error to NotImplementedError.
        raise CheckpointError(f"{path} is damaged: {reason(error)}") from error
    named = isinstance(table, dict) and all(isinstance(name, str) for name in table)
    if not named or not all(isinstance(value, Tensor) for value in table.values()):
        raise CheckpointError(f"{path} is not a table of named tensors")
    return dict(table)


def _pickle(archive: zipfile.ZipFile) -> bytes:
    names = [name for name in archive.namelist() if name.endswith("data.pkl")]
    if len(names) != 1:
        raise _RefusedError(f"it has {len(names)} entries data.pkl, a file of torch.save has one")
    if archive.getinfo(names[0]).file_size > MAX_PICKLE_BYTES:
        raise _RefusedError(f"its data.pkl is larger than {MAX_PICKLE_BYTES} bytes")
    return archive.read(names[0])


def _storages(archive: zipfile.ZipFile, size: int) -> Mapping[str, bytearray]:
    """Content of the archive's data by key, read at first use."""
    entries = archive.infolist()
    # torch.save stores without compression, so that a small file cannot unfold to a large one.
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise _RefusedError("it is compressed, which torch.save never does")
    if sum(entry.file_size for entry in entries) > size:
        raise _RefusedError("its parts overlap")
    for entry in entries:
        if entry.filename.endswith("byteorder") and archive.read(entry) != b"little":
            raise _RefusedError("its byte order is not little-endian")
    return _ArchiveData(archive)


class _ArchiveData(dict[str, bytearray]):
    def __init__(self, archive: zipfile.ZipFile) -> None:
        super().__init__()
        self._archive = archive
        self._entries = {
            name.rpartition("/data/")[2]: name for name in archive.namelist() if "/data/" in name
        }

    def __missing__(self, key: str) -> bytearray:
        # Read into memory of its own: tensors over immutable bytes could not be trained.
        content = self[key] = bytearray(self._archive.read(self._entries[key]))
        return content


class _Interpreter:
    """A stack machine for the few pickle instructions that a table of tensors needs."""

    def __init__(self, storages: Mapping[str, bytearray]) -> None:
        self._storages = storages
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, code: bytes) -> Any:
        """What the pickle describes."""
        for opcode, argument, _ in pickletools.genops(code):
            if opcode.name == "STOP":
                return self._stack.pop()
            self._step(opcode.name, argument)
        raise _RefusedError("its description has no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _NUMBERS_AND_TEXT:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            stack.append(tuple(self._pop(_TUPLES[name])))
        elif hasattr(self, f"_do_{name.lower()}"):
            getattr(self, f"_do_{name.lower()}")(argument)
        else:
            raise _RefusedError(f"the pickle instruction {name}")

    def _pop(self, count: int) -> list[Any]:
        values = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        if len(values) != count:
            raise IndexError("the stack is too short")
        return values

    def _pop_to_mark(self) -> list[Any]:
        return self._pop(len(self._stack) - self._marks.pop())

    def _do_proto(self, _: Any) -> None:
        return

    _do_frame = _do_proto

    def _do_mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def _do_empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _do_empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _do_empty_tuple(self, _: Any) -> None:
        self._stack.append(())

    def _do_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def _do_binput(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    _do_long_binput = _do_binput

    def _do_memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _do_binget(self, index: int) -> None:
        self._stack.append(self._memo[index])

    _do_long_binget = _do_binget

    def _do_global(self, name: str) -> None:
        if name not in _KNOWN:
            raise _RefusedError(f"it names {one_line(name)}")
        self._stack.append(_Name(name))

    def _do_stack_global(self, _: Any) -> None:
        module, name = self._pop(2)
        self._do_global(f"{module} {name}")

    def _do_setitem(self, _: Any) -> None:
        self._set(self._pop(2))

    def _do_setitems(self, _: Any) -> None:
        self._set(self._pop_to_mark())

    def _set(self, flat: list[Any]) -> None:
        table = self._stack[-1]
        if type(table) is not dict:
            raise _RefusedError("it puts items into what is no table")
        table.update(zip(flat[::2], flat[1::2]))

    def _do_build(self, _: Any) -> None:
        # Attributes of a state_dict: the versions of its modules, which change no tensor.
        self._stack.pop()

    def _do_binpersid(self, _: Any) -> None:
        kind, name, key, _, numel = self._stack.pop()
        if kind != "storage" or name.text not in _STORAGES:
            raise _RefusedError(f"data of the kind {one_line(name)}")
        dtype = _STORAGES[name.text]
        content = self._storages[key]
        if len(content) != numel * dtype.itemsize:
            raise ValueError(f"{len(content)} bytes are stored for {numel} values of {dtype}")
        flat = torch.frombuffer(content, dtype=dtype) if numel else torch.empty(0, dtype=dtype)
        self._stack.append(_Storage(flat, dtype))

    def _do_reduce(self, _: Any) -> None:
        name, arguments = self._pop(2)
        if name == _Name(_ORDERED_DICT) and arguments == ():
            self._stack.append({})
        elif name == _Name(_REBUILD_TENSOR):
            self._stack.append(_tensor(*arguments[:4]))
        elif name == _Name(_REBUILD_PARAMETER) and isinstance(arguments[0], Tensor):
            self._stack.append(arguments[0])
        else:
            raise _RefusedError(f"it calls {one_line(getattr(name, 'text', name))}")


def _tensor(
    storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    """A tensor over a storage that holds every one of its values."""
    if len(size) != len(stride) or not all(
        type(number) is int and number >= 0 for number in (offset, *size, *stride)
    ):
        raise ValueError(f"a tensor has the size {size} and the strides {stride}")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride))
    # The count is compared as well: strides of 0 make an endless tensor out of a few bytes.
    count = math.prod(size)
    if count and (count > storage.content.numel() or last >= storage.content.numel()):
        raise ValueError(f"a tensor of the size {size} is larger than its data")
    return storage.content.as_strided(size, stride, offset if count else 0)
