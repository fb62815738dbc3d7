# SPDX-License-Identifier: Apache-2.0
import json
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers.tiny_models import tiny_lm
from safetensors.torch import load_file, save_file

from statescan.errors import ArgumentError, CheckpointError, MissingExtraError
from statescan.models import MambaLM, embedded, load_embedded, load_model, save_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model."""
    save_model(tiny_lm(), tmp_path / "model")
    return tmp_path / "model"


def same(a: MambaLM, b: MambaLM) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_comes_back_the_same(tmp_path: Path, tied: bool) -> None:
    model = tiny_lm(tie_embeddings=tied, rms_norm=False, ssm_cfg={"bias": True})
    save_model(model, tmp_path / "new" / "folder")
    back = load_model(tmp_path / "new" / "folder")
    assert same(model, back)
    assert back.config == model.config
    assert not back.training
    assert (back.lm_head.weight is back.backbone.embedding.weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "new/folder/model.safetensors")) != tied
    back.train()
    ids = torch.arange(6).view(1, 6)
    back(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in back.parameters())
    marked = [n for n, p in back.named_parameters() if getattr(p, "_no_weight_decay", False)]
    assert len(marked) == 2 * 3


def test_half_precision_files_keep_state_space_parameters(tmp_path: Path) -> None:
    model = tiny_lm()
    save_model(model, tmp_path, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    wide = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert {name.split("mixer.")[1] for name in wide} == {"A_log", "D", "dt_proj.bias"}
    assert same(load_model(tmp_path), model.bfloat16())
    loaded = load_model(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_files_that_are_half_precision_throughout_are_widened(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: t.bfloat16() for name, t in load_file(path).items()}, path)
    mixer = next(load_model(folder).backbone.blocks()).mixer
    assert mixer.A_log.dtype == mixer.dt_proj.bias.dtype == torch.float32
    assert mixer.in_proj.weight.dtype == torch.bfloat16


def test_saving_over_a_loaded_model_is_safe(folder: Path) -> None:
    model = load_model(folder)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    save_model(model, folder)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_failed_save_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (folder / "model.safetensors").read_bytes()

    def full_disk(tensors: dict, path: Path, metadata: dict) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_model(tiny_lm(seed=1), folder)
    monkeypatch.undo()
    assert (folder / "model.safetensors").read_bytes() == before
    assert len(list(folder.iterdir())) == 2


def test_shards_and_torch_files_are_read(folder: Path) -> None:
    model = load_model(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    torch.save({**tensors, "lm_head.weight": tensors["backbone.embedding.weight"]},
               folder / "pytorch_model.bin")  # fmt: skip
    assert same(load_model(folder), model)
    (folder / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for name, part in halves.items():
        save_file({key: tensors[key] for key in part}, folder / name)
    index = {"weight_map": {key: name for name, part in halves.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(load_model(folder), model)


def test_the_models_own_methods_do_the_same(tmp_path: Path) -> None:
    model = tiny_lm()
    for layout in ("state-spaces", "transformers"):
        folder = tmp_path / layout
        model.save_pretrained(folder, layout=layout, dtype=torch.bfloat16, max_shard_size="4KB")
        back = MambaLM.from_pretrained(folder, dtype=torch.float32, device="cpu")
        assert same(back, load_model(folder, dtype=torch.float32))
        assert back.config == load_model(folder).config


@pytest.mark.parametrize(
    ("limit", "most"),
    [(1, 0), ("4KB", 4000), ("4 KiB", 4096), ("0.01MB", 10_000), (10**9, 10**9), ("1gb", 10**9)],
)
def test_shards_are_no_larger_than_asked(tmp_path: Path, limit: int | str, most: int) -> None:
    model = tiny_lm(tie_embeddings=False)
    save_model(model, tmp_path, max_shard_size=limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    shards = [load_file(path) for path in files]
    for shard in shards:
        # A tensor that is larger than the limit stands alone.
        size = sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
        assert size <= most or len(shard) == 1
    count = len(files)
    if count == 1:
        assert [path.name for path in tmp_path.iterdir() if "index" in path.name] == []
    else:
        assert files[0].name == f"model-00001-of-{count:05}.safetensors"
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 4 * sum(
            tensor.numel() for shard in shards for tensor in shard.values()
        )
    assert (count == 1) == (most == 10**9)
    assert same(load_model(tmp_path), model)


def test_a_save_replaces_every_file_that_would_be_read_instead(tmp_path: Path) -> None:
    """Whatever was saved before, and in how many pieces, the last save is what loads."""
    (tmp_path / "notes-of-mine.safetensors").write_bytes(b"")
    ways = [{}, {"max_shard_size": 4000}, {"max_shard_size": 9000}, {"weights": "torch"}, {},
            {"max_shard_size": 4000}, {"weights": "torch"}]  # fmt: skip
    for seed, options in enumerate(ways):
        model = tiny_lm(seed=seed)
        save_model(model, tmp_path, **options)
        assert same(load_model(tmp_path), model)
    kept = ["config.json", "notes-of-mine.safetensors", "pytorch_model.bin"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float8_e5m2}, "float8"),
        ({"layout": "gguf"}, "layout='gguf'"),
        ({"weights": "pickle"}, "weights='pickle'"),
        ({"weights": "torch", "max_shard_size": 5}, "Only safetensors"),
        *(
            ({"max_shard_size": size}, "max_shard_size")
            for size in (0, -1, True, 1.5, "", "5", "5TB", "-1GB", "GB", "1e3GB")
        ),
    ],
    ids=str,
)
def test_options_that_cannot_be(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        save_model(tiny_lm(), tmp_path / "model", **options)
    assert not (tmp_path / "model").exists()


def damage_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8")


def edit_config(folder: Path, **changes) -> None:
    values = json.loads((folder / "config.json").read_text())
    damage_config(folder, json.dumps({**values, **changes}))


def damage_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


class Bomb:
    """Runs code when unpickled."""

    def __reduce__(self):
        return (print, ("boom",))


def put_bomb(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Bomb()}, folder / "pytorch_model.bin")


def put_escaping_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


NORM = "backbone.norm_f.weight"
DAMAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
    "bad JSON": (lambda f: damage_config(f, "{"), "valid JSON"),
    "a list": (lambda f: damage_config(f, "[]"), "not an object"),
    "not text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "cannot be read"),
    "unknown key": (lambda f: damage_config(f, '{"d_modl": 1}'), "d_modl"),
    "another depth": (lambda f: edit_config(f, n_layer=10**9), "has 2 layers"),
    "another width": (lambda f: edit_config(f, d_model=8), r"asks for floating-point \("),
    "no width": (lambda f: edit_config(f, ssm_cfg={"expand": 0.01}), "describes no model"),
    "text for a number": (lambda f: edit_config(f, ssm_cfg={"dt_min": "x"}), "dt_min='x'"),
    "wrong type": (lambda f: damage_config(f, '{"ssm_cfg": 3}'), "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds none of"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:99]
        ),
        "damaged",
    ),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "damaged"),
    "missing tensor": (lambda f: damage_weights(f, lambda t: t.pop(NORM)), f"lacks {NORM}"),
    "extra tensor": (
        lambda f: damage_weights(f, lambda t: t.update(extra=torch.ones(1))),
        "unknown tensor extra",
    ),
    "wrong shape": (
        lambda f: damage_weights(f, lambda t: t.update({NORM: torch.ones(17)})),
        r"norm_f.weight is torch.float32 \(17,\).*\(16,\)",
    ),
    "integers": (
        lambda f: damage_weights(f, lambda t: t.update({NORM: torch.ones(16, dtype=torch.int8)})),
        "int8",
    ),
    "code in a pickle": (put_bomb, "holds more than tensors"),
    "index outside its folder": (put_escaping_index, "not in its folder"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders_give_one_line(folder: Path, name: str, capsys) -> None:
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)
    assert "boom" not in capsys.readouterr().out


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        load_model(tmp_path / "nowhere")


def test_a_dtype_that_cannot_hold_weights(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="int8"):
        save_model(tiny_lm(), tmp_path, dtype=torch.int8)


def test_without_safetensors_the_extra_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: load_model(folder), lambda: save_model(tiny_lm(), folder)):
        with pytest.raises(MissingExtraError, match=r"statescan\[models\]"):
            call()


def test_embedded_model_says_when_it_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "embedded_directory", lambda: tmp_path)
    with pytest.raises(CheckpointError, match="statescan train"):
        load_embedded()
    with pytest.raises(CheckpointError, match="card"):
        embedded.embedded_card()


def test_embedded_model_is_read_from_the_package_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny_lm(), tmp_path, dtype=torch.bfloat16)
    monkeypatch.setattr(embedded, "embedded_directory", lambda: tmp_path)
    model, tokenizer = load_embedded()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert tokenizer.decode(tokenizer.encode("Grüße")) == "Grüße"
    assert load_embedded(dtype=None)[0].backbone.embedding.weight.dtype == torch.bfloat16
