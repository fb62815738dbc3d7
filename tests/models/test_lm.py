# SPDX-License-Identifier: Apache-2.0
import copy
import math

import pytest
import torch
from helpers.tiny_models import tiny_config, tiny_lm
from torch import nn
from torch.nn import functional as F

from statescan.errors import ArgumentError, DtypeError, ShapeError
from statescan.models import MambaConfig, MambaLM
from statescan.nn import Mamba
from statescan.testing.compare import assert_close
from statescan.testing.tolerances import tolerance

FLOAT32 = 4 * tolerance("mamba_inner", torch.float32)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def test_state_dict_has_state_spaces_names() -> None:
    mixer = [
        *("A_log", "D", "in_proj.weight", "conv1d.weight", "conv1d.bias"),
        *("x_proj.weight", "dt_proj.weight", "dt_proj.bias", "out_proj.weight"),
    ]
    layers = [f"backbone.layers.{i}.{name}" for i in range(2) for name in
              ("norm.weight", *(f"mixer.{part}" for part in mixer))]  # fmt: skip
    assert sorted(tiny_lm().state_dict()) == sorted(
        ["backbone.embedding.weight", *layers, "backbone.norm_f.weight", "lm_head.weight"]
    )
    assert "backbone.norm_f.bias" in tiny_lm(rms_norm=False).state_dict()


@pytest.mark.parametrize("tied", [True, False])
def test_a_seed_gives_the_originals_initial_values(tied: bool) -> None:
    """Draws in order: every module's own, then twice the model-wide rules, the head in between."""
    torch.manual_seed(11)
    model = MambaLM(tiny_config(n_layer=3, tie_embeddings=tied))
    torch.manual_seed(11)
    expected = {"backbone.embedding.weight": nn.Embedding(256, 16).weight.data}
    for i in range(3):
        for name, value in Mamba(16, d_state=4).state_dict().items():
            expected[f"backbone.layers.{i}.mixer.{name}"] = value

    def apply_rules() -> None:
        expected["backbone.embedding.weight"].normal_(0, 0.02)
        for i in range(3):
            out_proj = expected[f"backbone.layers.{i}.mixer.out_proj.weight"]
            # kaiming_uniform with a = sqrt(5) is uniform within 1 / sqrt(fan_in).
            out_proj.uniform_(-(32**-0.5), 32**-0.5).div_(math.sqrt(3))

    apply_rules()
    expected["lm_head.weight"] = nn.Linear(16, 256, bias=False).weight.data
    apply_rules()
    if tied:
        expected["lm_head.weight"] = expected["backbone.embedding.weight"]
    for name, value in model.state_dict().items():
        if "norm" in name:
            assert torch.equal(value, torch.ones(16)), name
        else:
            assert torch.allclose(value, expected[name], rtol=1e-6, atol=0), name


def test_biases_start_at_zero_except_that_of_the_time_step() -> None:
    model = tiny_lm(ssm_cfg={"bias": True})
    for name, parameter in model.named_parameters():
        if name.endswith(("in_proj.bias", "out_proj.bias")):
            assert not parameter.any(), name
        if name.endswith("dt_proj.bias"):
            assert parameter.all(), name


def test_vocabulary_is_padded() -> None:
    model = MambaLM(tiny_config(vocab_size=250, pad_vocab_size_multiple=16))
    assert model(tokens(1, 3) % 250).logits.shape == (1, 3, 256)
    with pytest.raises(ArgumentError, match=r"250.*\n.*0 to 249"):
        model(torch.tensor([[3, 250]]))


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"rms_norm": False, "residual_in_fp32": False}])
def test_steps_and_chunks_continue_exactly(changes) -> None:
    model, ids = tiny_lm(**changes), tokens(2, 31)
    whole = model(ids).logits
    for sizes in ([1] * 31, [7, 7, 7, 7, 3], [30, 1]):
        cache = model.allocate_inference_cache(2)
        logits = [model(part, cache=cache).logits for part in ids.split(sizes, dim=1)]
        assert_close(torch.cat(logits, dim=1), whole, FLOAT32)
        assert cache.seqlen_offset == 31


def test_num_last_tokens() -> None:
    model, ids = tiny_lm(), tokens(2, 9)
    whole = model(ids).logits
    for count in (1, 4, 9, 20):
        logits = model(ids, num_last_tokens=count).logits
        assert_close(logits, whole[:, -count:], FLOAT32)


def test_loss_shifts_inside_and_ignores_marked_labels() -> None:
    model, ids = tiny_lm(), tokens(2, 9)
    logits = model(ids).logits
    loss = model(ids, labels=ids).loss
    expected = F.cross_entropy(logits[:, :-1].reshape(-1, 256), ids[:, 1:].reshape(-1))
    assert torch.allclose(loss, expected)
    labels = ids.clone()
    labels[0] = -100
    labels[1, 5:] = -100
    loss = model(ids, labels=labels).loss
    assert torch.allclose(loss, F.cross_entropy(logits[1, :4], ids[1, 1:5]))
    loss.backward()
    nothing = model(ids, labels=torch.full_like(ids, -100)).loss
    assert nothing == 0
    nothing.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model(ids).loss is None


def test_packed_loss_counts_each_sequence_as_if_alone() -> None:
    model = tiny_lm(sharp=True)
    lengths = [5, 1, 8]
    parts = [tokens(1, length, seed=length) for length in lengths]
    packed = torch.cat(parts, dim=1)
    alone = [model(part, labels=part) for part in parts if part.shape[1] > 1]
    total = alone[0].loss * 4 + alone[1].loss * 7
    cu_seqlens = torch.tensor([0, 5, 6, 14])
    ids = torch.tensor([[4] * 5 + [2] + [4] * 8])
    for packing in ({"cu_seqlens": cu_seqlens}, {"seq_idx": ids}):
        out = model(packed, labels=packed, **packing)
        assert torch.allclose(out.loss, total / 11, rtol=1e-5)
        assert_close(out.logits[:, 6:], alone[1].logits, FLOAT32)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), parts[2]], dim=1)
    marks = torch.tensor([[-1] * 3 + [0] * 8])
    assert torch.allclose(model(padded, labels=padded, seq_idx=marks).loss, alone[1].loss)


def test_every_parameter_gets_a_gradient() -> None:
    model = tiny_lm(tie_embeddings=False, ssm_cfg={"bias": True})
    ids = tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name


def test_tied_head_survives_copies_and_moves() -> None:
    for model in (tiny_lm(), copy.deepcopy(tiny_lm()), tiny_lm().bfloat16()):
        assert model.lm_head.weight is model.backbone.embedding.weight
    assert tiny_lm(tie_embeddings=False).num_parameters() == tiny_lm().num_parameters() + 256 * 16


def test_half_precision_model_keeps_state_space_parameters_and_residual_wide() -> None:
    model, ids = tiny_lm(), tokens(2, 9)
    exact = model(ids).logits
    narrow = model.bfloat16()
    assert narrow(ids).logits.dtype == torch.bfloat16
    assert_close(narrow(ids).logits, exact, 0.03)
    wide = {name for name, p in narrow.named_parameters() if p.dtype == torch.float32}
    assert wide == {
        f"backbone.layers.{i}.mixer.{name}"
        for i in range(2)
        for name in ("A_log", "D", "dt_proj.bias")
    }


def test_constructor_dtype_equals_a_cast_in_layout() -> None:
    torch.manual_seed(0)
    built = MambaLM(tiny_config(), dtype=torch.bfloat16).state_dict()
    moved = tiny_lm().bfloat16().state_dict()
    assert {n: t.dtype for n, t in built.items()} == {n: t.dtype for n, t in moved.items()}


def test_bad_calls_are_refused_with_a_way_out() -> None:
    model, ids = tiny_lm(), tokens(2, 4)
    calls = [
        (ShapeError, "unsqueeze", lambda: model(ids[0])),
        (DtypeError, r"\.long", lambda: model(ids.float())),
        (ArgumentError, "num_last_tokens=-1", lambda: model(ids, num_last_tokens=-1)),
        (ArgumentError, "with labels", lambda: model(ids, labels=ids, num_last_tokens=1)),
        (ShapeError, r"\(2, 3\)", lambda: model(ids, labels=ids[:, 1:])),
        (ArgumentError, "0 to 255", lambda: model(ids - 300)),
        (ShapeError, "3 rows", lambda: model(ids, cache=model.allocate_inference_cache(3))),
    ]
    for kind, message, call in calls:
        with pytest.raises(kind, match=message):
            call()


def test_config_reads_and_writes_the_originals_layout() -> None:
    text = (
        '{"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": true,'
        ' "residual_in_fp32": true, "fused_add_norm": true, "pad_vocab_size_multiple": 8}'
    )
    config = MambaConfig.from_json(text)
    assert (config.d_model, config.d_state, config.padded_vocab_size) == (768, 16, 50280)
    small = MambaConfig(d_model=8, d_state=4, dt_rank=3, ssm_cfg={"bias": True, "expand": 1})
    assert small.expand == 1
    assert small.to_dict()["ssm_cfg"] == {"d_state": 4, "expand": 1, "dt_rank": 3, "bias": True}
    for again in (
        MambaConfig.from_dict(small.to_dict()),
        MambaConfig.from_json(small.to_json()),
        copy.deepcopy(small),
    ):
        assert again == small
    on_main = {"ssm_cfg": {"layer": "Mamba1"}, "d_intermediate": 0, "attn_layer_idx": []}
    assert MambaConfig.from_dict({**on_main, "attn_cfg": {}}) == MambaConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"d_modl": 3}, "d_modl"),
        ({"d_model": 0}, "d_model=0"),
        ({"d_model": "768"}, "d_model='768'"),
        ({"n_layer": True}, "n_layer=True"),
        ({"expand": 0}, "expand=0"),
        ({"expand": "2"}, "expand='2'"),
        ({"dt_rank": 0}, "dt_rank=0"),
        ({"dt_rank": "all"}, "dt_rank='all'"),
        ({"rms_norm": "yes"}, "rms_norm='yes'"),
        ({"ssm_cfg": {"layer": "Mamba2"}}, "Mamba2"),
        ({"ssm_cfg": {"headdim": 64}}, "headdim"),
        ({"attn_layer_idx": [3]}, "attn_layer_idx"),
        ({"d_intermediate": 64}, "d_intermediate"),
    ],
)
def test_configs_that_cannot_be_built_are_refused(values, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        MambaConfig.from_dict(values)


# Dynamo itself instantiates autograd functions, which torch warns about.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_a_graph_break() -> None:
    model, ids = tiny_lm(n_layer=1), tokens(2, 6)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    found, expected = compiled(ids, labels=ids), model(ids, labels=ids)
    assert_close(found.logits, expected.logits, FLOAT32)
    assert torch.allclose(found.loss, expected.loss)
    with torch.no_grad():
        one, two = model.allocate_inference_cache(2), model.allocate_inference_cache(2)
        for part in ids.split([5, 1], dim=1):
            found = compiled(part, cache=one, num_last_tokens=1).logits
            assert_close(found, model(part, cache=two, num_last_tokens=1).logits, FLOAT32)
    assert one.seqlen_offset == two.seqlen_offset == 6
