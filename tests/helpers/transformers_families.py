# SPDX-License-Identifier: Apache-2.0
"""A program: tiny models of transformers with or without statescan under the originals' names.

``python transformers_families.py served|plain OUT DEVICE`` saves, for each family, logits,
gradients, generated tokens, the loss of a training step, and how often statescan's ops were called.
"""

from __future__ import annotations

import sys
import time
import warnings

import torch


def families():
    """Constructor of a tiny random model for each family."""
    import transformers as t

    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    quiet = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 63}
    return {
        "mamba": lambda: t.MambaForCausalLM(
            t.MambaConfig(**small, **quiet, state_size=8, use_mambapy=False)
        ),
        "falcon_mamba": lambda: t.FalconMambaForCausalLM(
            t.FalconMambaConfig(**small, **quiet, state_size=8, use_mambapy=False)
        ),
        "jamba": lambda: t.JambaForCausalLM(
            t.JambaConfig(
                **{**small, "num_hidden_layers": 4}, **heads, **quiet,
                attn_layer_period=4, attn_layer_offset=3, expert_layer_period=2,
                expert_layer_offset=1, num_experts=2, num_experts_per_tok=1,
                mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=True,
            )
        ),
        "zamba": lambda: t.ZambaForCausalLM(
            t.ZambaConfig(
                **{**small, "num_hidden_layers": 5}, **heads, **quiet,
                attn_layer_period=3, attn_layer_offset=2, mamba_d_state=8, mamba_dt_rank=4,
                n_mamba_heads=2, use_mamba_kernels=True, attention_head_dim=16,
                layers_block_type=["mamba", "mamba", "hybrid", "mamba", "hybrid"],
            )
        ),
        "lfm2": lambda: t.Lfm2ForCausalLM(
            t.Lfm2Config(
                **small, **heads, **quiet, block_multiple_of=8,
                layer_types=["conv", "full_attention"],
            )
        ),
        "qwen3_next": lambda: t.Qwen3NextForCausalLM(
            t.Qwen3NextConfig(
                **small, **heads, **quiet, head_dim=8, linear_num_value_heads=4,
                linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
                layer_types=["linear_attention", "full_attention"],
            )
        ),
    }  # fmt: skip


def in_pieces(model, ids):
    """Logits of the last token when the prompt comes in two chunks, and in one."""
    first = model(ids[:, :5], use_cache=True)
    # Releases and families call it differently.
    name = next(n for n in ("cache", "cache_params", "past_key_values") if n in first)
    second = model(ids[:, 5:], use_cache=True, **{name: first[name]}).logits[:, -1]
    return second, model(ids, use_cache=True).logits[:, -1]


def packed_apart(model, ids, served):
    """Hidden states of the second of two packed sequences, and of that sequence alone.

    Only the backbone hands the marks on. Without the packages transformers refuses them, and
    attention is not packed by ids.
    """
    if not served or any("Attention" in type(part).__name__ for part in model.modules()):
        return None
    marks = torch.tensor([[0] * 5 + [1] * 6], dtype=torch.int32)
    found = []
    for training in (False, True):
        backbone = model.backbone.train(training)
        with torch.no_grad():
            together = backbone(ids[:1], seq_idx=marks, use_cache=False).last_hidden_state[:, 5:]
            found.append((together, backbone(ids[:1, 5:], use_cache=False).last_hidden_state))
    return found


def measure(build, calls) -> dict:
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.parameters():
        # Initial weights of 0.02 would hide every difference in the layers behind the residual.
        if parameter.dim() > 1 and parameter.shape[-1] > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(2, 62, (2, 11))
    mask = torch.ones_like(ids)
    calls.clear()
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad(
        logits.square().mean(), [p for _, p in model.named_parameters()], allow_unused=True
    )
    with torch.no_grad():
        tokens = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False
        )
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False
        )
        seconds = time.perf_counter() - began
        pieces = in_pieces(model, ids)
    model.train()
    packed = packed_apart(model, ids, served=bool(calls))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = model(ids, attention_mask=mask, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {
        "logits": logits.detach(),
        "grads": {n: g for n, g in zip(names, grads) if g is not None},
        "tokens": tokens,
        "pieces": pieces,
        "packed": packed,
        "losses": losses,
        "calls": dict(calls),
        "seconds": seconds,
    }


def main() -> None:
    mode, path, device = sys.argv[1:]
    torch.set_default_device(device)
    calls: dict[str, int] = {}
    if mode == "served":
        from statescan import compat, ops

        compat.install()
        for name in ("selective_scan", "causal_conv1d", "mamba_inner", "selective_state_update",
                     "causal_conv1d_update"):  # fmt: skip
            original = getattr(ops, name)

            def counted(*args, _name=name, _original=original, **kwargs):
                calls[_name] = calls.get(_name, 0) + 1
                return _original(*args, **kwargs)

            setattr(ops, name, counted)
    found = {}
    for name, build in families().items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = measure(build, calls)
    torch.save(found, path)


if __name__ == "__main__":
    main()
