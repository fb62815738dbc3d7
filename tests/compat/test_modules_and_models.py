# SPDX-License-Identifier: Apache-2.0
"""Mixer, block and language model as programs of mamba_ssm use them: states, files, generation."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from statescan.compat.generation import InferenceParams, decode, sample
from statescan.compat.layer_norm import RMSNorm
from statescan.compat.mamba2 import Mamba2, mamba_chunk_scan_combined
from statescan.compat.models import MambaConfig, MambaLMHeadModel
from statescan.compat.modules import Block, BlockV1, Mamba
from statescan.errors import ArgumentError, CheckpointError, NotServedError
from statescan.models import MambaLM
from statescan.testing import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("device")

CLOSE = 20 * tolerance("mamba_inner", torch.float32)
"""Several layers and a head beyond one op."""

SIZES = {"d_model": 32, "n_layer": 2, "vocab_size": 61, "ssm_cfg": {"d_state": 8}}


@pytest.fixture
def model():
    return MambaLMHeadModel(MambaConfig(**SIZES)).eval()


@pytest.fixture
def ids():
    return torch.randint(0, 61, (2, 9))


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(9,), (1,) * 9, (4, 5), (6, 1, 1, 1)])
def test_states_of_inference_params_continue_a_sequence(cuts):
    """The original takes one token at a time after the prompt; here chunks of any length."""
    mixer = Mamba(16, d_state=4, layer_idx=3).eval()
    x = torch.randn(2, 9, 16)
    params = InferenceParams(max_seqlen=9, max_batch_size=2)
    outs = []
    for part in x.split(cuts, dim=1):
        outs.append(mixer(part, inference_params=params))
        params.seqlen_offset += part.shape[1]
    assert_close(torch.cat(outs, 1), mixer(x), CLOSE)
    conv_state, ssm_state = params.key_value_memory_dict[3]
    assert conv_state.shape == (2, 32, 4)
    assert ssm_state.shape == (2, 32, 4)
    assert ssm_state.dtype == torch.float32


@torch.no_grad()
def test_a_sequence_that_starts_at_offset_0_forgets_what_was_there():
    mixer = Mamba(16, layer_idx=0).eval()
    x, params = torch.randn(2, 5, 16), InferenceParams(5, 2)
    first = mixer(x, inference_params=params)
    again = mixer(x, inference_params=params)
    assert torch.equal(first, again)


def test_a_mixer_without_layer_idx_says_so():
    with pytest.raises(ArgumentError, match="without layer_idx"):
        Mamba(16)(torch.randn(1, 2, 16), inference_params=InferenceParams(2, 1))


def test_ssm_states_stay_float32_in_a_half_precision_model():
    """The original keeps them in the parameters' dtype and rounds at every token."""
    mixer = Mamba(16, dtype=torch.bfloat16)
    conv_state, ssm_state = mixer.allocate_inference_cache(3, 10, dtype=torch.bfloat16)
    assert conv_state.dtype == torch.bfloat16
    assert ssm_state.dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_block_keeps_the_sum_beside_the_hidden_states(fused, in_fp32):
    class Twice(nn.Linear):
        def forward(self, x, inference_params=None):
            return 2 * super().forward(x)

    block = Block(
        *(8, lambda dim: Twice(dim, dim), nn.Identity, RMSNorm),
        fused_add_norm=fused,
        residual_in_fp32=in_fp32,
    )
    x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    out, total = block(x, residual)
    assert_close(total, x + residual, 1e-6)
    assert_close(out, block.mixer(block.norm(x + residual)), 1e-5)
    assert list(block.state_dict()) == ["norm.weight", "mixer.weight", "mixer.bias"]


def test_version_1s_block_has_no_mlp_argument():
    block = BlockV1(8, partial(Mamba, d_state=4), norm_cls=RMSNorm, fused_add_norm=True)
    out, residual = block(torch.randn(2, 3, 8))
    assert out.shape == residual.shape == (2, 3, 8)
    assert block.mlp is None


def test_fused_add_norm_refuses_norms_that_it_cannot_fuse():
    with pytest.raises(ArgumentError, match="norm_cls makes a Identity"):
        Block(8, partial(Mamba), nn.Identity, nn.Identity, fused_add_norm=True)


def test_model_with_gated_mlps_trains():
    config = MambaConfig(**SIZES, d_intermediate=48)
    model = MambaLMHeadModel(config)
    assert "backbone.layers.0.mlp.fc1.weight" in model.state_dict()
    model(torch.randint(0, 61, (2, 5))).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_logits_have_the_padded_vocabulary_and_may_be_of_the_last_tokens_only(model, ids):
    logits = model(ids).logits
    assert logits.shape == (2, 9, 64)
    assert_close(model(ids, num_last_tokens=2).logits, logits[:, -2:], 1e-6)


def test_same_seed_gives_the_natives_weights(ids):
    """Which are the originals': draws come in their order."""
    from statescan.models import MambaConfig as NativeConfig

    torch.manual_seed(1)
    model = MambaLMHeadModel(MambaConfig(**SIZES))
    torch.manual_seed(1)
    native = MambaLM(NativeConfig(d_model=32, n_layer=2, vocab_size=61, d_state=8))
    for name, tensor in native.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert_close(model(ids).logits, native(ids).logits, CLOSE)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_whole_models_are_copied_and_pickled(model, ids, copied):
    assert torch.equal(copied(model)(ids).logits, model(ids).logits)


def test_saved_as_the_original_saves_and_read_by_both(model, ids, tmp_path):
    model.save_pretrained(tmp_path / "m")
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == [
        "config.json",
        "pytorch_model.bin",
    ]
    values = json.loads((tmp_path / "m" / "config.json").read_text())
    assert values["d_intermediate"] == 0
    assert values["ssm_cfg"] == {"d_state": 8}
    stored = torch.load(tmp_path / "m" / "pytorch_model.bin", weights_only=True)
    assert set(stored) == set(model.state_dict())
    again = MambaLMHeadModel.from_pretrained(str(tmp_path / "m"), dtype=torch.float32)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert_close(MambaLM.from_pretrained(tmp_path / "m")(ids).logits, model(ids).logits, CLOSE)


def test_native_files_are_read(ids, tmp_path):
    from statescan.models import MambaConfig as NativeConfig

    native = MambaLM(NativeConfig(d_model=32, n_layer=2, vocab_size=61)).eval()
    native.save_pretrained(tmp_path)
    model = MambaLMHeadModel.from_pretrained(str(tmp_path))
    assert_close(model(ids).logits, native(ids).logits, CLOSE)


def test_a_config_of_another_kind_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(CheckpointError, match=r"not one of mamba_ssm: .*hidden_size"):
        MambaLMHeadModel.from_pretrained(str(tmp_path))


def test_generation_equals_forward(model, ids):
    output = model.generate(ids, 20, return_dict_in_generate=True, output_scores=True)
    assert output.sequences.shape == (2, 20)
    logits = model(output.sequences).logits[:, 8:-1]
    assert_close(torch.stack(output.scores, 1), logits, CLOSE)
    assert torch.equal(output.sequences[:, 9:], logits.argmax(-1))
    assert torch.equal(model.generate(ids, 20), output.sequences)


def test_generation_follows_the_teacher_and_cuts_the_vocabulary(model, ids):
    teacher = torch.randint(0, 61, (2, 14))
    output = decode(ids, model, 14, teacher_outputs=teacher, vocab_size=61, output_scores=True)
    assert torch.equal(output.sequences[:, 9:], teacher[:, 9:])
    assert output.scores[0].shape == (2, 61)


def test_generation_stops_when_all_rows_have_ended(model, ids):
    first = model.generate(ids[:1], 30)[0]
    end = int(first[12])
    found = model.generate(ids[:1], 30, eos_token_id=end)
    stop = 9 + [int(t) for t in first[9:]].index(end)
    assert found.shape[1] == stop + 1


def test_cg_replays_a_graph_on_a_gpu_and_says_elsewhere_that_it_changes_nothing(model, ids, device):
    told = pytest.warns(UserWarning, match="cg=True changes nothing on cpu")
    with told if device == "cpu" else nullcontext():
        found = model.generate(ids, 14, cg=True)
    assert torch.equal(found, model.generate(ids, 14))


def test_streamer_gets_prompt_and_tokens(model, ids):
    class Streamer:
        pieces, ended = [], False

        def put(self, tokens):
            self.pieces.append(tokens)

        def end(self):
            self.ended = True

    streamer = Streamer()
    found = model.generate(ids, 12, streamer=streamer)
    assert torch.equal(torch.cat(streamer.pieces, 1), found.cpu())
    assert streamer.ended


def test_sampling_limits_each_row_by_itself():
    """The original takes the first logit of the first row for the largest, for min_p."""
    logits = torch.tensor([[0.0, 3.0, 2.9, -9.0], [5.0, 0.0, 0.0, 0.0]])
    drawn = torch.stack([sample(logits, top_k=0, min_p=0.5) for _ in range(200)])
    assert set(drawn[:, 0].tolist()) == {1, 2}
    assert set(drawn[:, 1].tolist()) == {0}
    drawn = torch.stack([sample(logits, top_k=3, top_p=0.5) for _ in range(100)])
    assert set(drawn[:, 0].tolist()) <= {1, 2}
    assert logits[0, 1] == 3.0
    assert sample(logits).tolist() == [1, 0]


def test_repetition_penalty_makes_seen_tokens_less_likely(model, ids):
    plain = model.generate(ids, 40)
    penalised = model.generate(ids, 40, repetition_penalty=50.0)
    assert len(set(penalised[0].tolist())) > len(set(plain[0].tolist()))


def test_names_of_mamba_2_are_refused_when_used():
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotServedError, match="mamba_chunk_scan_combined is not served"):
        mamba_chunk_scan_combined(x, x, x, x, x, 4)
    with pytest.raises(NotServedError, match="Mamba2 is not served"):
        Mamba2(64)
    with pytest.raises(NotServedError, match="Mamba2 is not served"):
        MambaLMHeadModel(MambaConfig(**{**SIZES, "ssm_cfg": {"layer": "Mamba2"}}))


def test_wrapped_projections_are_called(caplog):
    """LoRA and hooks act on what they wrap; the fused op steps aside, and says so."""
    mixer = Mamba(16)

    class Shifted(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + 1.0

    x = torch.randn(1, 4, 16)
    plain = mixer(x)
    mixer.x_proj = Shifted(mixer.x_proj)
    assert not torch.allclose(mixer(x), plain)
    calls = []
    other = Mamba(16)
    other.out_proj.register_forward_hook(lambda *args: calls.append(1))
    with caplog.at_level(logging.INFO, "statescan"):
        other(x)
        other(x)
    assert calls == [1, 1]
    (said,) = caplog.messages
    assert said.startswith("Mamba: out_proj is wrapped, hooked or not linear")


def test_data_parallel_training_finds_no_unused_parameters(model, ids, tmp_path):
    """DDP raises at the second step if a parameter took no part in the first."""
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        parallel = nn.parallel.DistributedDataParallel(model.train())
        for _ in range(2):
            parallel(ids).logits.float().square().mean().backward()
    finally:
        distributed.destroy_process_group()
    assert all(parameter.grad is not None for parameter in model.parameters())
