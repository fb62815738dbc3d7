# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile checkpoints: every one gives one clear line, and nothing in them runs."""

import json
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import tiny_lm
from safetensors.torch import load_file, save_file

from statescan.errors import CheckpointError
from statescan.models import MambaConfig, MambaLM, checkpoint, load_model, save_model

LONGEST_LINE = 900


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a sound checkpoint in each format."""
    folder = tmp_path_factory.mktemp("sound")
    model = tiny_lm()
    save_model(model, folder / "a")
    save_model(model, folder / "b", weights="torch")
    files = [*(folder / "a").iterdir(), folder / "b" / "pytorch_model.bin"]
    return {path.name: path.read_bytes() for path in files}


@pytest.fixture
def folder(tmp_path: Path, saved: dict[str, bytes]) -> Path:
    """A sound checkpoint in safetensors, to be damaged."""
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).write_bytes(saved[name])
    return path


def refusal(folder: Path) -> str:
    """The one line with which the checkpoint is refused."""
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    line = str(caught.value)
    assert str(folder) in line
    assert line.isprintable()
    assert len(line) - line.count(str(folder)) * len(str(folder)) < LONGEST_LINE
    return line


def refused_or_sound(folder: Path) -> bool:
    """For damage that may hit bytes that do not matter: nothing but a model or a refusal."""
    try:
        load_model(folder)
    except CheckpointError:
        refusal(folder)
        return False
    return True


def test_the_sound_checkpoints_load(folder: Path) -> None:
    load_model(folder)


# Truncation and random damage.


def cuts(size: int) -> list[int]:
    """Where to cut a file: the beginning byte by byte, then ever rarer, then the end."""
    return [*range(20), *range(20, size, max(1, size // 40)), size - 2, size - 1]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_cut_anywhere_is_refused(folder: Path, saved: dict[str, bytes], name: str) -> None:
    (folder / "model.safetensors").unlink()
    for cut in cuts(len(saved[name])):
        (folder / name).write_bytes(saved[name][:cut])
        assert name in refusal(folder)


def test_a_config_cut_anywhere_is_refused(folder: Path, saved: dict[str, bytes]) -> None:
    text = saved["config.json"].rstrip()
    for cut in range(len(text)):
        (folder / "config.json").write_bytes(text[:cut])
        assert "config.json" in refusal(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_random_damage_is_refused_or_harmless(
    folder: Path, saved: dict[str, bytes], name: str
) -> None:
    draw = random.Random(0)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    # Headers and descriptions are where damage can lead readers astray.
    reach = len(saved[name]) if name == "config.json" else 3000
    outcomes = set()
    for _ in range(150):
        content = bytearray(saved[name])
        for _ in range(draw.choice((1, 1, 2, 8))):
            content[draw.randrange(reach)] = draw.randrange(256)
        (folder / name).write_bytes(content)
        outcomes.add(refused_or_sound(folder))
    assert False in outcomes


# safetensors headers that lie.


def write_safetensors(folder: Path, header: object, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    content = struct.pack("<Q", size) + text + data
    (folder / "model.safetensors").write_bytes(content)


def parts(content: bytes) -> tuple[dict, bytes]:
    """Header and data of a safetensors file."""
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


@pytest.mark.parametrize("length", [0, 1, 2, 10**4, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
def test_wrong_header_lengths(folder: Path, saved: dict[str, bytes], length: int) -> None:
    header, data = parts(saved["model.safetensors"])
    write_safetensors(folder, header, data, length)
    assert "damaged" in refusal(folder)


LIES: dict[str, dict] = {
    "overlap": {"data_offsets": [0, 64]},
    "beyond the end": {"data_offsets": [10**6, 10**6 + 64]},
    "huge offsets": {"data_offsets": [2**63, 2**63 + 64]},
    "backwards": {"data_offsets": [64, 0]},
    "negative": {"data_offsets": [-64, 0]},
    "one offset": {"data_offsets": [0]},
    "offsets as text": {"data_offsets": ["0", "64"]},
    "huge shape": {"shape": [2**40, 2**40]},
    "shape that overflows": {"shape": [2**63, 2]},
    "negative shape": {"shape": [-16]},
    "shape of fractions": {"shape": [16.5]},
    "endless shape": {"shape": [1] * 100000},
    "unknown dtype": {"dtype": "F31"},
    "another dtype": {"dtype": "I32"},
    "eight bits": {"dtype": "F8_E4M3"},
    "dtype as number": {"dtype": 7},
}


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie(folder: Path, saved: dict[str, bytes], lie: str) -> None:
    header, data = parts(saved["model.safetensors"])
    header["backbone.norm_f.weight"].update(LIES[lie])
    write_safetensors(folder, header, data)
    refusal(folder)


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b"{}", b'{"a": 1}', b"[" * 50000, b'{"a":' * 50000],
    ids=lambda text: repr(text[:8]),
)
def test_headers_that_are_none(folder: Path, header: bytes) -> None:
    write_safetensors(folder, header, b"\0" * 64)
    refusal(folder)


def test_names_with_control_characters_are_shown_harmless(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), "evil\x1b[2J\nname" + "x" * 5000: torch.ones(1)}, path)
    assert "evil\ufffd[2J name" in refusal(folder)


# Tensors that do not belong to the configuration.

NORM = "backbone.norm_f.weight"


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.uint8, torch.bool, torch.float8_e5m2, torch.complex64],
    ids=str,
)
def test_dtypes_that_cannot_be_weights(folder: Path, dtype: torch.dtype) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), NORM: torch.ones(16).to(dtype)}, path)
    assert f"{NORM} is {dtype}" in refusal(folder)


def test_missing_unknown_and_misshapen_tensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    sound = load_file(path)
    save_file({name: value for name, value in sound.items() if name != NORM}, path)
    assert f"lacks {NORM}" in refusal(folder)
    save_file({**sound, "extra.weight": torch.ones(1)}, path)
    assert "unknown tensor extra.weight" in refusal(folder)
    for shape in ((17,), (4, 4), (), (0,)):
        save_file({**sound, NORM: torch.ones(shape)}, path)
        assert f"{shape}" in refusal(folder)
    save_file({}, path)
    assert "the checkpoint has 0 layers" in refusal(folder)


def test_layers_are_built_only_once_all_their_tensors_are_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million names fit into a file of 100 MB, and as modules would not fit into memory."""
    names = {f"backbone.layers.{i}.mixer.D": torch.empty(0) for i in range(300)}
    save_file({**load_file(folder / "model.safetensors"), **names}, folder / "model.safetensors")
    edit(folder, n_layer=300)
    built: list[int] = []

    def build(config: MambaConfig) -> MambaLM:
        built.append(config.n_layer)
        return MambaLM(config)

    monkeypatch.setattr(checkpoint, "MambaLM", build)
    # Nine tensors of 298 layers, of which only the first three names are shown.
    assert "and 2679 more" in refusal(folder)
    assert built == [1]


# Shards.


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "../../x", "/etc/passwd", "a/b", "a\\b", "C:x", "..", ".", "", "-x",
     "~", "a\0b", "a\nb", 3, None, [], {}],
    ids=repr,
)  # fmt: skip
def test_shards_outside_the_folder(folder: Path, shard: object) -> None:
    (folder.parent / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    write_index(folder, {NORM: shard})
    assert "not in its folder" in refusal(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [], "a", 3], ids=repr)
def test_indexes_without_a_map(folder: Path, weight_map: object) -> None:
    write_index(folder, weight_map)
    assert "no weight_map" in refusal(folder)


def test_shards_that_are_missing_or_differ_from_the_index(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    shard = folder / "one.safetensors"
    write_index(folder, dict.fromkeys(tensors, "one.safetensors"))
    assert "of which one.safetensors is missing" in refusal(folder)
    shard.mkdir()
    assert "not a regular file" in refusal(folder)
    shard.rmdir()
    save_file({name: value for name, value in tensors.items() if name != NORM}, shard)
    assert f"one.safetensors lacks {NORM}" in refusal(folder)
    save_file({**tensors, "extra": torch.ones(1)}, shard)
    assert "against the index, extra" in refusal(folder)
    save_file(tensors, shard)
    load_model(folder)


# Files that are no files.

NAMES = ("config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


def replace(folder: Path, name: str) -> Path:
    """The path of a file to be replaced, made the one that is read."""
    if name != "config.json":
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    return folder / name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", ["nowhere", "/dev/zero", "itself", ".", "fifo", "folder"])
def test_links_pipes_devices_and_folders(folder: Path, name: str, target: str) -> None:
    path = replace(folder, name)
    if target == "fifo":
        if not hasattr(os, "mkfifo"):
            pytest.skip("this system has no named pipes; nothing to do")
        os.mkfifo(path)
    elif target == "folder":
        path.mkdir()
    else:
        path.symlink_to(name if target == "itself" else target)
    assert name in refusal(folder)


def test_links_to_sound_files_are_followed_as_the_hubs_cache_needs(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        blob = folder.parent / f"blob-{name}"
        (folder / name).rename(blob)
        (folder / name).symlink_to(blob)
    load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_too_large_or_too_deep(folder: Path, name: str) -> None:
    path = replace(folder, name)
    for text in ("[" * 10**6, '{"a":' * 10**6, '{"a": ' + "1" * 10**5 + "}", '{"a": 1e400, }'):
        path.write_text(text)
        assert "not valid JSON" in refusal(folder)
    with path.open("wb") as file:
        file.truncate(2**31)
    assert "the most that is read" in refusal(folder)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe{\0", b"\x80", b'{"d_model": "\xc3"}', b"\xed\xa0\x80"], ids=repr
)
def test_json_that_is_not_utf8(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert "cannot be read" in refusal(folder)


# Configurations that ask for the impossible.

WRONG_VALUES: list[object] = [
    *("16", -1, 0, 1.5, float("nan"), float("inf"), None, True, [], {}, 10**18, 10**400, 2**31),
]
NUMBERS = ("d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple")
MIXER_NUMBERS = ("d_state", "d_conv", "expand", "dt_rank")


def edit(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


@pytest.mark.parametrize("name", NUMBERS)
def test_impossible_sizes(folder: Path, name: str) -> None:
    for value in WRONG_VALUES:
        edit(folder, **{name: value})
        refusal(folder)
    for value in (2**31 - 1, 12345):
        edit(folder, **{name: value})
        assert refusal(folder)


@pytest.mark.parametrize("name", MIXER_NUMBERS)
def test_impossible_sizes_of_the_mixer(folder: Path, name: str) -> None:
    fine = {"expand": {1.5, True}}.get(name, set())
    for value in [*WRONG_VALUES, 2**31 - 1, 12345, "auto" if name != "dt_rank" else "al"]:
        if isinstance(value, (list, dict)) or value not in fine:
            edit(folder, ssm_cfg={"d_state": 4, name: value})
            refusal(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"ssm_cfg": None}, {"ssm_cfg": []}, {"ssm_cfg": "x"}, {"ssm_cfg": {"layer": "Mamba2"}},
        {"ssm_cfg": {"layer": {}}}, {"ssm_cfg": {"bias": "no"}}, {"ssm_cfg": {"dt_init": 3}},
        {"ssm_cfg": {"dt_min": float("nan")}}, {"ssm_cfg": {"unknown": 1}}, {"rms_norm": "yes"},
        {"tie_embeddings": 1}, {"residual_in_fp32": None}, {"attn_cfg": {"x": "y" * 10**5}},
        {"k" * 10**5: 1}, {"model_type": "llama"}, {"model_type": 3}, {"model_type": "mamba"},
    ],
    ids=lambda changes: str(changes)[:60],
)  # fmt: skip
def test_wrong_types_and_unknown_keys(folder: Path, changes: dict) -> None:
    edit(folder, **changes)
    assert "config.json" in refusal(folder)
