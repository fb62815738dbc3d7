# SPDX-License-Identifier: Apache-2.0
"""A whole language model as a workload: tokens a second of reading and of writing.

Every version has the same weights, and is timed after its logits were compared.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from statescan.cli import render
from statescan.cli._bench_peers import installed_version
from statescan.cli._bench_run import Findings
from statescan.cli._timing import Timing, Work, time_in_turns
from statescan.dispatch import use_backend
from statescan.errors import BackendUnavailableError
from statescan.generation import generate
from statescan.models import MambaConfig, MambaLM, load_embedded
from statescan.testing.compare import error
from statescan.testing.tolerances import tolerance

MODELS = ("embedded", "130m")
_JUDGED = 16
"""Tokens whose logits are compared; the reference walks them one by one in float64."""
_DEEP = 8
"""A model of many layers may be off by this many times the error of one layer."""
_PEER_LIMIT = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}
"""A peer rounds as it likes; it must only be the same model."""
_MODES = {"prefill": "prefill", "generate_eager": "decode"}


@dataclass(frozen=True)
class ModelVersion:
    """One way to run the model.

    Attributes:
        name, kind: As in tables: "backend" or "peer".
        logits: input_ids -> logits (batch, seqlen, vocabulary).
        prefill: Reads input_ids and gives the last logits.
        decode: (input_ids of one token, count) writes so many tokens.
    """

    name: str
    kind: str
    logits: Callable[[Tensor], Tensor]
    prefill: Callable[[Tensor], object]
    decode: Callable[[Tensor, int], object]


def make_model(name: str, dtype: torch.dtype) -> MambaLM:
    """The embedded model, or one of the sizes of Mamba-130M with random weights."""
    if name == "embedded":
        return load_embedded(dtype=dtype)[0]
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    model = MambaLM(MambaConfig(d_model=768, n_layer=24, vocab_size=50280)).to(dtype).eval()
    torch.set_rng_state(generator_state)
    return model


def bench_model(
    name: str,
    dtype_name: str,
    *,
    prefill: int,
    decode: int,
    backends: Sequence[str],
    with_peers: bool,
    forced: bool,
    seconds: float,
    findings: Findings,
    device: torch.device,
) -> Iterator[list[dict[str, Any]]]:
    """Fill ``findings``, and yield the timings of each mode; arguments as in ``bench_op``."""
    render.status(f"making model {name}")
    model = make_model(name, getattr(torch, dtype_name)).to(device)
    count = torch.arange(1, max(prefill, _JUDGED) + 1, device=device)
    ids = count.unsqueeze(0) * 7 % model.config.vocab_size
    versions = [*_own(model, dtype_name, ids, backends, forced, findings)]
    if with_peers and versions:
        versions += _transformers(model, dtype_name, ids, findings)
    render.status()
    prompt, first = ids[:, :prefill], ids[:, :1]
    works: dict[str, tuple[int, dict[str, Work]]] = {
        "prefill": (prefill, {v.name: partial(v.prefill, prompt) for v in versions}),
        "generate_eager": (decode, {v.name: partial(v.decode, first, decode) for v in versions}),
    }
    kinds = {version.name: version.kind for version in versions}
    for mode, (tokens, calls) in works.items() if versions else ():
        render.status(f"timing model {name} {_MODES[mode]}")
        with warnings.catch_warnings():
            # What a peer says at each call is about its own speed; that is what is measured.
            warnings.simplefilter("ignore")
            found = time_in_turns(calls, seconds, device=device)
        render.status()
        base = {"op": "model", "name": name, "mode": mode, "batch": 1, "dtype": dtype_name}
        base |= {"tokens": tokens}
        timings = [_timing(base, n, kinds[n], timing) for n, timing in found.items()]
        findings.timings += timings
        findings.rows += _rows(base, timings)
        yield timings


def _timing(base: dict[str, Any], name: str, kind: str, timing: Timing) -> dict[str, Any]:
    return {
        **base,
        "version": name,
        "kind": kind,
        "tokens_per_s": base["tokens"] / timing.median,
        "ms": timing.median * 1e3,
        "spread": timing.spread,
        "samples": timing.samples,
    }


def _rows(base: dict[str, Any], timings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each backend beside each other version, or alone where there is no other."""
    rows = []
    for ours in timings:
        if ours["kind"] != "backend":
            continue
        row = base | {"backend": ours["version"], "tokens_per_s": ours["tokens_per_s"]}
        row |= {"spread": ours["spread"], "samples": ours["samples"]}
        others = [peer for peer in timings if peer is not ours]
        rows += [
            row
            | {"peer": peer["version"], "peer_tokens_per_s": peer["tokens_per_s"]}
            | {"peer_spread": peer["spread"], "peer_samples": peer["samples"]}
            for peer in others
        ] or [row | {"peer": None, "peer_tokens_per_s": None}]
    return rows


def _own(
    model: MambaLM,
    dtype_name: str,
    ids: Tensor,
    backends: Sequence[str],
    forced: bool,
    findings: Findings,
) -> Iterator[ModelVersion]:
    """Each backend whose logits are right; the verdicts go into ``findings``."""
    judged = ids[:, :_JUDGED]
    render.status("checking the model on backend reference")
    exact = _version(copy.deepcopy(model).double(), "reference").logits(judged)
    allowed = _DEEP * tolerance("mamba_inner", getattr(torch, dtype_name))
    for backend in backends:
        render.status(f"checking the model on backend {backend}")
        version = _version(model, backend)
        gate: dict[str, Any] = {"op": "model", "backend": backend, "dtype": dtype_name}
        try:
            off = error(version.logits(judged), exact)
        except BackendUnavailableError as refusal:
            if forced:
                raise
            reason = " ".join(str(refusal).splitlines()[1:2]) or str(refusal)
            findings.refused.append({"backend": backend, "op": "model", "reason": reason})
            continue
        if off > allowed:
            # Rounding adds up with the layers: twice what plain arithmetic in this dtype has.
            plain = _version(model, "reference").logits(judged)
            allowed = max(allowed, 2 * error(plain, exact))
        reason = f"logits have error {off:.1e}, allowed is {allowed:.1e}"
        passed = off <= allowed
        gate |= {"worst_error": off, "tolerance": allowed, "passed": passed}
        findings.gates.append(gate | {"error": None if passed else reason})
        if passed:
            yield version


def _version(model: MambaLM, backend: str) -> ModelVersion:
    def logits(ids: Tensor) -> Tensor:
        with torch.no_grad(), use_backend(backend):
            found: Tensor = model(ids).logits[..., : model.config.vocab_size]
            return found

    def prefill(ids: Tensor) -> object:
        with torch.no_grad(), use_backend(backend):
            cache = model.allocate_inference_cache(ids.shape[0])
            return model(ids, cache=cache, num_last_tokens=1).logits

    def decode(ids: Tensor, count: int) -> object:
        with use_backend(backend):
            return generate(model, ids, count)

    return ModelVersion(backend, "backend", logits, prefill, decode)


def _transformers(
    model: MambaLM, dtype_name: str, ids: Tensor, findings: Findings
) -> list[ModelVersion]:
    """transformers' MambaForCausalLM with the same weights, if it can be imported and agrees."""
    row: dict[str, Any] = {"peer": "transformers", "op": "model", "package": "transformers"}
    row |= {"version": installed_version("transformers")}
    render.status("checking transformers")
    try:
        module = importlib.import_module("transformers")
    except Exception as failure:  # noqa: BLE001, kept as the reason that is shown
        reason = f"not importable: {type(failure).__name__}: {failure}".splitlines()[0]
        findings.peers.append(row | {"timed": False, "reason": reason})
        return []
    judged = ids[:, :_JUDGED]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            version = _of_transformers(module, model)
            off = error(version.logits(judged), _version(model, "torch").logits(judged).double())
        reason = "" if off <= _PEER_LIMIT[dtype_name] else f"wrong: logits differ by {off:.1e}"
    except Exception as failure:  # noqa: BLE001, foreign code: its failure is the reason shown
        reason = f"fails: {type(failure).__name__}: {failure}".splitlines()[0]
    findings.peers.append(row | {"timed": not reason, "reason": reason})
    return [] if reason else [version]


def _of_transformers(module: Any, model: MambaLM) -> ModelVersion:
    module.logging.set_verbosity_error()
    config = model.config
    mixer = next(model.backbone.blocks()).mixer
    theirs = module.MambaForCausalLM(
        module.MambaConfig(
            vocab_size=config.padded_vocab_size,
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layer,
            state_size=mixer.d_state,
            conv_kernel=mixer.d_conv,
            expand=mixer.expand,
            time_step_rank=mixer.dt_rank,
            layer_norm_epsilon=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
        )
    )
    weights = {
        key.replace("backbone.embedding.", "backbone.embeddings."): tensor
        for key, tensor in model.state_dict().items()
    }
    theirs.load_state_dict(weights, strict=not config.tie_embeddings)
    theirs = theirs.to(model.device, model.lm_head.weight.dtype).eval()
    vocab_size = config.vocab_size

    def logits(ids: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = theirs(ids).logits[..., :vocab_size]
            return found

    def prefill(ids: Tensor) -> object:
        with torch.no_grad():
            return theirs(ids, use_cache=True, logits_to_keep=1).logits

    def decode(ids: Tensor, count: int) -> object:
        mask = torch.ones_like(ids)
        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        return theirs.generate(ids, attention_mask=mask, do_sample=False, **lengths)

    return ModelVersion("transformers", "peer", logits, prefill, decode)
