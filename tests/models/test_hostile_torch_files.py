# SPDX-License-Identifier: Apache-2.0
"""Hostile pytorch_model.bin: pickles that run code, tensors that lie, archives that unfold."""

import os
import pickle
import random
import re
import struct
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import tiny_lm

from statescan.errors import CheckpointError
from statescan.models import load_model, save_model
from statescan.models.torch_files import read_torch_file


@pytest.fixture
def torch_folder(tmp_path: Path) -> Path:
    """A sound checkpoint with pytorch_model.bin, to be damaged."""
    save_model(tiny_lm(), tmp_path / "model", weights="torch")
    return tmp_path / "model"


def check_refusal(folder: Path, message: str) -> None:
    """The checkpoint is refused in one line with this message."""
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)
    assert str(caught.value).isprintable()


class Attack:
    """Creates a file when unpickled by a reader that runs what it reads."""

    def __init__(self, call: Callable, *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple:
        return self.call, self.arguments


def attacks(mark: Path) -> dict[str, object]:
    command = f"touch {mark}"
    return {
        "os.system": Attack(os.system, command),
        "eval": Attack(eval, f"open({str(mark)!r}, 'w')"),
        "getattr": Attack(getattr, dict, "update"),
        "torch": Attack(torch.load, command),
        "storage": Attack(torch.UntypedStorage.from_file, str(mark), True, 10),
        "nested": OrderedDict(a=[(1, {"b": Attack(os.system, command)})]),
    }


@pytest.mark.parametrize("kind", attacks(Path()))
@pytest.mark.parametrize("protocol", [2, 4])
def test_code_in_a_torch_file_is_not_run(torch_folder: Path, kind: str, protocol: int) -> None:
    mark = torch_folder / "mark"
    state = {**tiny_lm().state_dict(), "x": attacks(mark)[kind]}
    torch.save(state, torch_folder / "pytorch_model.bin", pickle_protocol=protocol)
    check_refusal(torch_folder, "holds more than tensors")
    assert not mark.exists()


def test_formats_before_torch_1_6_are_refused_unread(torch_folder: Path) -> None:
    mark, path = torch_folder / "mark", torch_folder / "pytorch_model.bin"
    attack = attacks(mark)["os.system"]
    torch.save({"x": attack}, path, _use_new_zipfile_serialization=False)
    check_refusal(torch_folder, "before PyTorch 1.6")
    path.write_bytes(pickle.dumps(attack))
    check_refusal(torch_folder, "before PyTorch 1.6")
    (torch_folder / "sys_info").write_bytes(pickle.dumps(attack))
    with tarfile.open(path, "w") as archive:
        archive.add(torch_folder / "sys_info", "sys_info")
    check_refusal(torch_folder, "before PyTorch 1.6")
    assert not mark.exists()


def write_archive(path: Path, code: bytes, compression: int = 0, **files: bytes) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", code)
        for name, content in files.items():
            archive.writestr(f"archive/{name.replace('__', '/')}", content)


def word(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def one_tensor(numel: int, size: bytes, stride: bytes, offset: int = 0) -> bytes:
    """A pickle of {"x": tensor} whose numbers can be anything."""
    storage = b"(%bctorch\nFloatStorage\n%b%bI%d\ntQ" % (
        *(word("storage"), word("0"), word("cpu"), numel),
    )
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(%bI%d\n%b%b" % (storage, offset, size, stride)
    return b"}%b%bI00\nccollections\nOrderedDict\n)RtRs." % (word("x"), call)


def shape(*numbers: int) -> bytes:
    return b"(" + b"".join(b"I%d\n" % number for number in numbers) + b"t"


@pytest.mark.parametrize(
    ("numel", "size", "stride", "offset"),
    [
        (4, (2**40,), (0,), 0),
        (4, (2**20, 2**20), (0, 0), 0),
        (4, (2,), (10**6,), 0),
        (4, (4,), (1,), 1),
        (4, (4,), (1,), 2**62),
        (4, (2,), (2**63,), 0),
        (4, (-1,), (1,), 0),
        (4, (4,), (-1,), 3),
        (4, (4,), (1,), -4),
        (4, (2, 2), (2,), 0),
        (2**60, (4,), (1,), 0),
        (-4, (4,), (1,), 0),
        (5, (4,), (1,), 0),
    ],
)
def test_tensors_that_reach_outside_their_data(
    tmp_path: Path, numel: int, size: tuple, stride: tuple, offset: int
) -> None:
    path = tmp_path / "x.bin"
    code = one_tensor(4, shape(4), shape(1))
    write_archive(path, code, data__0=bytes(16))
    assert torch.equal(read_torch_file(path)["x"], torch.zeros(4))
    write_archive(path, one_tensor(numel, shape(*size), shape(*stride), offset), data__0=bytes(16))
    with pytest.raises(CheckpointError, match=r"x\.bin is damaged"):
        read_torch_file(path)


def test_archives_that_are_not_of_torch_save(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    code = one_tensor(4, shape(4), shape(1))
    write_archive(path, code, zipfile.ZIP_DEFLATED, data__0=bytes(10**6))
    with pytest.raises(CheckpointError, match="compressed"):
        read_torch_file(path)
    write_archive(path, code, data__0=bytes(16), byteorder=b"big")
    with pytest.raises(CheckpointError, match="byte order"):
        read_torch_file(path)
    write_archive(path, code, more__data=b"")
    with pytest.raises(CheckpointError, match="damaged"):
        read_torch_file(path)
    write_archive(path, code, other__data=b"", data__0=bytes(16), **{"x__data.pkl": code})
    with pytest.raises(CheckpointError, match=r"2 entries data\.pkl"):
        read_torch_file(path)


@pytest.mark.parametrize(
    "code",
    [
        b"", b".", b"}", b"N.", b"].", b"}I1\nI2\ns.", b"0.", b"1.", b"(t(t(t.", b"a.", b"s.",
        b"R.", b"\x80\xff.", b"r\xff\xff\xff\x7f.", b"j\xff\xff\xff\x7f.",
        b"\x96" + b"\xff" * 8 + b".", b"B\xff\xff\xff\x7fx.", b"\x8a\xffx.", b"(ios\nsystem\nx.",
        b"cos\nsystem\n(S'x'\ntR.",
        b"]NN\x86R.", b"Pa\n.", b"}(I1\nt\x81.", b"\x82\x01.", b"]Q.", b"NNR.", b"](a.",
        b"Vos\nVsystem\n\x93(Vx\ntR.",
    ],
    ids=repr,
)  # fmt: skip
def test_pickles_of_anything_else(tmp_path: Path, code: bytes) -> None:
    path = tmp_path / "x.bin"
    write_archive(path, code)
    with pytest.raises(CheckpointError, match=r"x\.bin"):
        read_torch_file(path)


def test_random_pickles_are_refused(tmp_path: Path) -> None:
    draw = random.Random(0)
    path = tmp_path / "x.bin"
    code = one_tensor(4, shape(4), shape(1))
    for _ in range(300):
        damaged = bytearray(code)
        for _ in range(draw.choice((1, 2, 5))):
            damaged[draw.randrange(len(code))] = draw.randrange(256)
        write_archive(path, bytes(damaged), data__0=bytes(16))
        try:
            tensors = read_torch_file(path)
        except CheckpointError:
            continue
        assert all(value.untyped_storage().nbytes() <= 16 for value in tensors.values())
