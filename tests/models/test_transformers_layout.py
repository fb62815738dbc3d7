# SPDX-License-Identifier: Apache-2.0
"""transformers' layout: its models give the same logits here, and ours give the same there.

The first half reads checkpoints that transformers saved (``make_transformers_fixtures.py`` in
tests/helpers made them); the second runs transformers itself, where it is installed.
"""

import json
import logging
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import tiny_lm
from safetensors.torch import load_file
from torch import Tensor

from statescan.errors import ArgumentError, CheckpointError
from statescan.generation import decode_one_token, prefill
from statescan.models import MambaConfig, MambaLM, load_model, save_model
from statescan.models.config_transformers import config_from_transformers, config_to_transformers

DATA = Path(__file__).parent / "data"
FIXTURES = sorted(path.parent.name for path in DATA.glob("*/expected"))
NO_TRANSFORMERS = "transformers is not installed: pip install transformers to compare with it"

FLOAT32 = 2e-6
"""Largest difference over the largest logit: transformers' own rounding is up to 5e-7."""

LIKE_THEIRS = 1.5
"""In bfloat16 our error against the float32 result may be this times transformers' own."""


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference in units of the largest logit."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def check_logits(model: MambaLM, input_ids: Tensor, logits: Tensor, exact: Tensor) -> None:
    """The model's logits are transformers', as exactly as the dtype of its weights allows."""
    with torch.no_grad():
        ours = model(input_ids).logits
    assert ours.shape == logits.shape
    if model.lm_head.weight.dtype == torch.float32:
        assert distance(ours, logits) < FLOAT32
    else:
        assert distance(ours, exact) < LIKE_THEIRS * distance(logits, exact) < 0.02


@pytest.mark.parametrize("name", FIXTURES)
def test_models_that_transformers_saved_give_its_logits(name: str) -> None:
    expected = load_file(DATA / name / "expected")
    model = load_model(DATA / name)
    exact = expected["logits_in_float32"]
    check_logits(model, expected["input_ids"], expected["logits"], exact)
    widened = MambaLM.from_pretrained(DATA / name, dtype=torch.float32)
    check_logits(widened, expected["input_ids"], exact, exact)


def test_fixtures_cover_both_models_dtypes_and_shards() -> None:
    assert FIXTURES == ["falcon-mamba", "mamba-options", "mamba-sharded"]
    models = {name: load_model(DATA / name) for name in FIXTURES}
    assert models["mamba-options"].backbone.embedding.weight.dtype == torch.bfloat16
    assert (
        models["mamba-sharded"].lm_head.weight is models["mamba-sharded"].backbone.embedding.weight
    )
    assert models["falcon-mamba"].config.mixer_norm_eps == 1e-3
    assert len(list((DATA / "mamba-sharded").glob("*.safetensors"))) == 2


@pytest.mark.parametrize("name", FIXTURES)
def test_a_fixture_saved_again_holds_the_same_tensors_and_configuration(
    name: str, tmp_path: Path
) -> None:
    model = load_model(DATA / name)
    model.save_pretrained(tmp_path, layout="transformers")
    stored = {key: value for path in (DATA / name).glob("*.safetensors")
              for key, value in load_file(path).items()}  # fmt: skip
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == stored.keys()
    for key, value in saved.items():
        assert torch.equal(value, stored[key].to(value.dtype))
    theirs = json.loads((DATA / name / "config.json").read_text())
    ours = json.loads((tmp_path / "config.json").read_text())
    changed = {key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]}
    # 20 channels of width 12 are no whole multiple, and intermediate_size says so.
    assert changed <= ({"expand"} if name == "mamba-options" else set())
    assert ours["torch_dtype"] == theirs["dtype"]
    assert load_model(tmp_path).config == model.config


def test_steps_of_a_model_with_mixer_norms_equal_its_forward() -> None:
    model = load_model(DATA / "falcon-mamba")
    input_ids = load_file(DATA / "falcon-mamba" / "expected")["input_ids"]
    with torch.no_grad():
        whole = model(input_ids).logits
    logits, cache = prefill(model, input_ids[:, :4])
    for position in range(4, 11):
        assert distance(logits, whole[:, position - 1]) < FLOAT32
        logits = decode_one_token(model, input_ids[:, position], cache)
    assert distance(logits, whole[:, -1]) < FLOAT32


def test_mixer_norms_train() -> None:
    model = load_model(DATA / "falcon-mamba").train()
    input_ids = torch.arange(20).view(2, 10)
    model(input_ids, labels=input_ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vocab_size": 250, "pad_vocab_size_multiple": 16},
        {"expand": 1.3, "dt_rank": 3, "d_conv": 2, "tie_embeddings": False},
        {"ssm_cfg": {"bias": True, "conv_bias": False, "dt_min": 0.01, "dt_init": "constant"}},
        {"norm_eps": 1e-6, "residual_in_fp32": False, "eos_token_id": [1, 2], "bos_token_id": 0},
        {"mixer_norm_eps": 1e-6},
    ],
    ids=str,
)
def test_our_models_survive_the_layout(changes: dict, tmp_path: Path) -> None:
    model = tiny_lm(**changes)
    save_model(model, tmp_path, layout="transformers", max_shard_size=5000)
    back = load_model(tmp_path)
    for name, value in back.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert back.config.vocab_size == model.config.vocab_size
    assert back.config.padded_vocab_size == model.config.padded_vocab_size
    mine, theirs = model.config.mixer_arguments(), back.config.mixer_arguments()
    for name in mine.keys() - {"expand", "dt_rank"}:
        assert theirs[name] == mine[name]
    ids = torch.arange(10).view(1, 10)
    assert torch.equal(back(ids).logits, model(ids).logits)
    # The second time around nothing changes at all.
    again = config_from_transformers(config_to_transformers(back.config))
    assert again == back.config


def test_tensors_and_configuration_have_transformers_names(tmp_path: Path) -> None:
    save_model(tiny_lm(dt_rank="auto"), tmp_path, layout="transformers")
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "backbone.embeddings.weight" in names
    assert "lm_head.weight" not in names
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        "torch_dtype": "float32",
        "hidden_size": 16,
        "intermediate_size": 32,
        "expand": 2,
        "time_step_rank": 1,
        "tie_word_embeddings": True,
        "eos_token_id": None,
    }
    assert {key: config[key] for key in expected} == expected


def test_either_name_of_the_embedding_is_read(tmp_path: Path) -> None:
    """transformers takes the originals' name too, and converted checkpoints contain it."""
    model = tiny_lm()
    save_model(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_to_transformers(model.config)))
    loaded = load_model(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def minimal(**changes) -> dict:
    """The least that names an architecture; every other key has transformers' default."""
    return {"model_type": "mamba", **changes}


def test_keys_that_are_left_out_mean_transformers_defaults() -> None:
    config = config_from_transformers(minimal())
    assert config == MambaConfig(
        d_model=768, n_layer=32, vocab_size=50280, pad_vocab_size_multiple=1,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    assert config_from_transformers({"model_type": "falcon_mamba"}).mixer_norm_eps == 1e-6


@pytest.mark.parametrize("d_inner", [1, 99, 100, 101, 2**31 - 1])
@pytest.mark.parametrize("width", [1, 7, 48, 4099])
def test_any_inner_size_is_kept_exactly(width: int, d_inner: int) -> None:
    config = config_from_transformers(minimal(hidden_size=width, intermediate_size=d_inner))
    assert int(config.expand * config.d_model) == d_inner


def test_padding_is_remembered_until_the_embedding_is_resized() -> None:
    values = config_to_transformers(MambaConfig(vocab_size=50277))
    assert values["vocab_size"] == 50280
    assert config_from_transformers(values).vocab_size == 50277
    assert config_from_transformers({**values, "vocab_size": 50300}).vocab_size == 50300


def test_ignored_keys_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config_from_transformers(minimal(use_cache=True, use_mambapy=False))
    assert "use_cache, use_mambapy" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba2"}, "model_type 'mamba2'"),
        ({"model_type": ["mamba"]}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "768"}, "d_model='768'"),
        ({"num_hidden_layers": -1}, "n_layer=-1"),
        ({"state_size": None}, "d_state=None"),
        ({"vocab_size": 1.5}, "vocab_size=1.5"),
        ({"time_step_rank": "all"}, "dt_rank='all'"),
        ({"time_step_min": float("nan")}, "dt_min=nan"),
        ({"layer_norm_epsilon": float("nan")}, "norm_eps=nan"),
        ({"layer_norm_epsilon": True}, "norm_eps=True"),
        ({"intermediate_size": "all"}, "intermediate_size 'all'"),
        ({"intermediate_size": 2**31}, "intermediate_size"),
        ({"expand": float("inf")}, "expand=inf"),
        ({"tie_word_embeddings": "yes"}, "tie_embeddings='yes'"),
        ({"use_bias": "no"}, "bias='no'"),
        ({"eos_token_id": [0, -1]}, "eos_token_id"),
        ({"bos_token_id": "<s>"}, "bos_token_id"),
        ({"unpadded_vocab_size": "x", "pad_vocab_size_multiple": 8}, "vocab_size='x'"),
    ],
)
def test_what_cannot_be_built_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        config_from_transformers(minimal(**changes))


def test_layouts_say_what_they_cannot_express(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="RMS norms only"):
        save_model(tiny_lm(rms_norm=False), tmp_path / "a", layout="transformers")
    for changes in ({"norm_eps": 1e-6}, {"mixer_norm_eps": 1e-6}):
        with pytest.raises(ArgumentError, match="layout='transformers'"):
            save_model(tiny_lm(**changes), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_head_that_contradicts_the_tying_is_refused(tmp_path: Path) -> None:
    save_model(tiny_lm(tie_embeddings=False), tmp_path, layout="transformers")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match="differ, though"):
        load_model(tmp_path)


THEIR_OPTIONS = [
    {},
    {"use_conv_bias": False},
    {"use_bias": True, "tie_word_embeddings": False},
    {"time_step_rank": 7, "conv_kernel": 2},
    {"intermediate_size": 100, "state_size": 1},
    {"expand": 3, "residual_in_fp32": False, "layer_norm_epsilon": 1e-2},
    {"falcon": True},
    {"falcon": True, "mixer_rms_eps": 1e-2, "use_bias": True, "tie_word_embeddings": False},
]


@pytest.fixture(params=THEIR_OPTIONS, ids=str)
def theirs(request: pytest.FixtureRequest):
    """A random model of transformers with biases and norms that are not trivial."""
    transformers = pytest.importorskip("transformers", reason=NO_TRANSFORMERS)
    options = {"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": 61, **request.param}
    family = "FalconMamba" if options.pop("falcon", False) else "Mamba"
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ("bias" in name and "dt_proj" not in name):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_equal_transformers_slow_path(theirs, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs.to(dtype).save_pretrained(tmp_path, max_shard_size="40KB")
    input_ids = torch.randint(0, 61, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = theirs(input_ids).logits
        exact = theirs.float()(input_ids).logits
    check_logits(load_model(tmp_path), input_ids, logits, exact)


def test_transformers_reads_what_was_saved_for_it(theirs, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    input_ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        logits = theirs(input_ids).logits
    for name, shard in (("whole", None), ("shards", "30KB")):
        model.save_pretrained(tmp_path / name, layout="transformers", max_shard_size=shard)
        back, info = type(theirs).from_pretrained(tmp_path / name, output_loading_info=True)
        wrong = ("missing_keys", "unexpected_keys", "mismatched_keys")
        assert not any(info[kind] for kind in wrong)
        with torch.no_grad():
            assert torch.equal(back.eval()(input_ids).logits, logits)


def test_transformers_reads_models_that_began_here(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason=NO_TRANSFORMERS)
    model = tiny_lm(vocab_size=250, pad_vocab_size_multiple=16, expand=1.3, dt_rank=3)
    save_model(model, tmp_path, layout="transformers", dtype=torch.float32)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(30).view(2, 15)
    with torch.no_grad():
        assert distance(model(ids).logits, back(ids).logits) < FLOAT32
