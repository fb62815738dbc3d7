# SPDX-License-Identifier: Apache-2.0
"""The reader of pytorch_model.bin gives the tensors that ``torch.save`` was given."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import tiny_lm
from torch import Tensor, nn

from statescan.errors import CheckpointError
from statescan.models import load_model, save_model
from statescan.models.torch_files import read_torch_file


def check(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The file holds just these tensors, in this order."""
    tensors = read_torch_file(path)
    assert list(tensors) == list(expected)
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        assert tensor.shape == expected[name].shape
        assert torch.equal(tensor, expected[name])
    return tensors


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_dtype_and_shape(tmp_path: Path, protocol: int) -> None:
    tensors = {str(dtype): torch.arange(12).view(3, 4).to(dtype) for dtype in DTYPES}
    wide = torch.randn(40, 30)
    tensors |= {
        "one number": torch.tensor(3.0),
        "nothing": torch.empty(0, 5),
        "transposed": wide.t(),
        "part": wide[3:7, ::2],
        "expanded row": wide[:1],
        "long name " + "x" * 1000: torch.ones(1),
        "Ünïcode": torch.ones(2),
        "parameter": nn.Parameter(torch.ones(3)),
    }
    torch.save(tensors, tmp_path / "x.bin", pickle_protocol=protocol)
    check(tmp_path / "x.bin", tensors)
    if protocol == 2:
        # torch.load itself reads the other protocols in part only.
        check(tmp_path / "x.bin", torch.load(tmp_path / "x.bin", weights_only=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_dict_with_its_versions_and_tied_weights(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = tiny_lm().to(dtype)
    state = model.state_dict()
    assert isinstance(state, OrderedDict)
    assert state._metadata
    torch.save(state, tmp_path / "x.bin")
    tensors = check(tmp_path / "x.bin", state)
    head, embedding = tensors["lm_head.weight"], tensors["backbone.embedding.weight"]
    assert head.data_ptr() == embedding.data_ptr()


def test_many_tensors(tmp_path: Path) -> None:
    """Beyond 256 entries pickle changes its instructions."""
    tensors = {f"t{i}": torch.full((2,), float(i)) for i in range(700)}
    torch.save(tensors, tmp_path / "x.bin")
    check(tmp_path / "x.bin", tensors)


@pytest.mark.parametrize("value", [torch.ones(2), {"a": 1}, {1: torch.ones(1)}, 3])
def test_what_is_no_table_of_tensors(tmp_path: Path, value: object) -> None:
    torch.save(value, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match="not a table of named tensors"):
        read_torch_file(tmp_path / "x.bin")


def test_sparse_and_quantised_tensors_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match="_rebuild_sparse_tensor"):
        read_torch_file(tmp_path / "x.bin")


def test_shards_with_an_index_are_read(tmp_path: Path) -> None:
    model = tiny_lm()
    save_model(model, tmp_path, weights="torch")
    state = read_torch_file(tmp_path / "pytorch_model.bin")
    (tmp_path / "pytorch_model.bin").unlink()
    names = list(state)
    shards = {"one.bin": names[::2], "two.bin": names[1::2]}
    for shard, part in shards.items():
        torch.save({name: state[name].clone() for name in part}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    loaded = load_model(tmp_path).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.items())


def test_models_are_saved_for_mamba_ssm_as_it_reads_them(tmp_path: Path) -> None:
    """It asks for config.json and pytorch_model.bin with every tensor, tied ones by both names."""
    model = tiny_lm()
    save_model(model, tmp_path, weights="torch")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "pytorch_model.bin"]
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    size = (tmp_path / "pytorch_model.bin").stat().st_size
    embedding = model.lm_head.weight.numel() * 4
    assert size < sum(value.numel() * 4 for value in state.values()) - embedding + 20000
    loaded = load_model(tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    loaded.train()
    ids = torch.arange(6).view(1, 6)
    loaded(ids, labels=ids).loss.backward()
