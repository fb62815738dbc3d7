# SPDX-License-Identifier: Apache-2.0
"""EleutherAI's lm-evaluation-harness on statescan's models; run this module as its program.

    python -m statescan.generation.harness run --model statescan --tasks lambada_openai

``StatescanLM`` exists where lm_eval is installed; asking for it elsewhere says so. The arithmetic
is in ``scoring`` and the text in ``generate``: this module only speaks the harness's names.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from statescan.errors import ArgumentError, MissingExtraError
from statescan.generation.generate import generate
from statescan.generation.sampling import GREEDY, SamplingConfig
from statescan.generation.scoring import Request, encode_pair, score
from statescan.models import ByteTokenizer, MambaLM, load_embedded, load_model, load_tokenizer
from statescan.models.text_tokenizer import find_tokenizer
from statescan.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    StatescanLM: Any

DEFAULT_MAX_LENGTH = 2048
"""Tokens that published results of Mamba models were measured with."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
_OWN = ("until", "max_gen_toks", "max_new_tokens", "do_sample")
_NEUTRAL: Mapping[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "early_stopping": False}


def __getattr__(name: str) -> Any:
    if name == "StatescanLM":
        return _model_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Evaluated:
    """A model with its tokenizer, answering the harness's three kinds of request.

    Args:
        pretrained: "embedded", a model folder or hub id, or a ``MambaLM``.
        tokenizer: Where tokenizer.json is, if not beside the model; or an object with ``encode``
            and ``decoder``. Byte-level models need none.
        revision: Branch, tag or commit of ``pretrained`` on the hub.
        batch_size: Rows that run together; "auto" is 16.
        max_length: Most tokens that the model sees at once, as published results have it; 0 reads
            documents of any length whole, with the states carried.
        prefix_token_id: What the first token of a text follows; by default a newline for
            byte-level models, else the tokenizer's ``eos_token_id``.
        max_gen_toks: Most new tokens where a task does not say.
        device, dtype: Of the model; default the CPU and float32.
    """

    def __init__(
        self,
        pretrained: str | MambaLM = "embedded",
        tokenizer: Tokenizer | str | None = None,
        *,
        revision: str | None = None,
        batch_size: int | str = 16,
        max_length: int = DEFAULT_MAX_LENGTH,
        prefix_token_id: int | None = None,
        max_gen_toks: int = 256,
        device: str | None = None,
        dtype: str | torch.dtype = "float32",
    ) -> None:
        self.model, self.tokenizer = _load(pretrained, tokenizer, device, dtype, revision)
        self.batch_size = 16 if str(batch_size).startswith("auto") else int(batch_size)
        self.max_length = int(max_length) or None
        self.max_gen_toks = int(max_gen_toks)
        self.prefix_token_id = _prefix_token(self.tokenizer, prefix_token_id)

    def loglikelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(log probability, is greedy) of each continuation after its context."""
        prefix = self.prefix_token_id
        requests = [encode_pair(self.tokenizer, *pair, prefix) for pair in pairs]
        return [(found.logprob, found.is_greedy) for found in self._scores(requests)]

    def rolling_loglikelihoods(self, texts: Sequence[str]) -> list[float]:
        """Log probability of each whole text."""
        requests = [Request([self.prefix_token_id], self.tokenizer.encode(text)) for text in texts]
        return [found.logprob for found in self._scores(requests)]

    def continuations(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """New text of each context; those with equal options run in batches by length."""
        texts = [""] * len(requests)
        rows = [self.tokenizer.encode(context) or [self.prefix_token_id] for context, _ in requests]
        options = [_generation_options(given, self.max_gen_toks) for _, given in requests]
        groups: dict[str, list[int]] = {}
        for number, option in enumerate(options):
            groups.setdefault(repr(option), []).append(number)
        for numbers in groups.values():
            numbers.sort(key=lambda number: -len(rows[number]))
            for start in range(0, len(numbers), self.batch_size):
                batch = numbers[start : start + self.batch_size]
                until, most, sampling = options[batch[0]]
                if isinstance(sampling.seed, int):
                    # By the request's number, so that the batch around it changes nothing.
                    sampling = replace(sampling, seed=[sampling.seed + n for n in batch])
                prompts = [self._cut(rows[number], most) for number in batch]
                output = generate(
                    *(self.model, prompts, most),
                    sampling=sampling,
                    stop=until,
                    eos_token_id=self._eos(),
                    tokenizer=self.tokenizer,
                )
                for number, text in zip(batch, output.texts or (), strict=True):
                    texts[number] = text
        return texts

    def _eos(self) -> Any:
        """What ends a text: the checkpoint's word, else the tokenizer's; nothing for bytes."""
        if self.model.config.eos_token_id is not None:
            return self.model.config.eos_token_id
        return getattr(self.tokenizer, "eos_token_id", None)

    def _scores(self, requests: Sequence[Request]) -> list[Any]:
        return list(
            score(self.model, requests, batch_size=self.batch_size, max_length=self.max_length)
        )

    def _cut(self, row: list[int], new_tokens: int) -> list[int]:
        """The newest part of a prompt that leaves room for its continuation."""
        if self.max_length is None:
            return row
        return row[-max(1, self.max_length - new_tokens) :]


def _load(
    pretrained: str | MambaLM,
    tokenizer: Tokenizer | str | None,
    device: str | None,
    dtype: str | torch.dtype,
    revision: str | None,
) -> tuple[MambaLM, Tokenizer]:
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    found = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    if isinstance(pretrained, MambaLM):
        model = pretrained
    elif pretrained == "embedded":
        model = load_embedded(device=device, dtype=wanted)[0]
    else:
        model = load_model(pretrained, device=device, dtype=wanted, revision=revision)
        found = found or find_tokenizer(pretrained, revision=revision)
    if found is None and model.config.vocab_size != ByteTokenizer.vocab_size:
        raise ArgumentError(
            f"StatescanLM: the model has a vocabulary of {model.config.vocab_size} and no "
            "tokenizer.json beside it.\n"
            f"Only byte-level models, {ByteTokenizer.vocab_size} tokens, need none.\n"
            "Pass tokenizer=, a folder or hub id, or an object with encode(text) and decoder()."
        )
    return model.eval(), found or ByteTokenizer()


def _prefix_token(tokenizer: Tokenizer, given: int | None) -> int:
    if given is not None:
        return int(given)
    token = getattr(tokenizer, "eos_token_id", None)
    if token is None and isinstance(tokenizer, ByteTokenizer):
        (token,) = tokenizer.encode("\n")
    if token is None:
        raise ArgumentError(
            "StatescanLM: the tokenizer names no eos_token_id.\n"
            "The first token of a text must follow something.\n"
            "Pass prefix_token_id=."
        )
    return int(token)


def _generation_options(
    given: Mapping[str, Any], max_gen_toks: int
) -> tuple[tuple[str, ...], int, SamplingConfig]:
    """Stop strings, most new tokens and sampling from a task's ``generation_kwargs``."""
    for name, value in given.items():
        if name in _SAMPLING or name in _OWN or _NEUTRAL.get(name, ...) == value:
            continue
        raise ArgumentError(
            f"StatescanLM: the task asks for {name}={value!r} in generation.\n"
            f"Known are {', '.join((*_OWN, *_SAMPLING))}.\n"
            "Override it with --gen_kwargs, or leave the task out."
        )
    until = given.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    most = int(given.get("max_gen_toks", given.get("max_new_tokens", max_gen_toks)))
    if not given.get("do_sample", False):
        return stops, most, GREEDY
    chosen = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    return stops, most, SamplingConfig(**chosen)


def _usable_device(name: str | None) -> str | None:
    """The CPU instead of a CUDA that is absent: the harness asks for cuda:0 by default."""
    if name is None or not name.startswith("cuda") or torch.cuda.is_available():
        return name
    warnings.warn(
        f"StatescanLM: {name} was asked for and torch {torch.__version__} has no CUDA device here; "
        "the model runs on the CPU. --device cpu says so without this warning.",
        stacklevel=3,
    )
    return "cpu"


@cache
def _model_class() -> Any:
    """The class, made and registered as "statescan" once."""
    try:
        base = import_module("lm_eval.api.model").LM
        register = import_module("lm_eval.api.registry").register_model
    except ImportError as error:
        raise MissingExtraError(
            "StatescanLM needs EleutherAI's lm-evaluation-harness, which cannot be imported "
            f"({error}): pip install lm_eval"
        ) from error

    class StatescanLM(base):  # type: ignore[misc, valid-type]
        """lm_eval's ``LM`` over ``Evaluated``, whose arguments it takes."""

        def __init__(self, pretrained: str | MambaLM = "embedded", **options: Any) -> None:
            super().__init__()
            largest = options.pop("max_batch_size", None)
            if largest and str(options.get("batch_size", "auto")).startswith("auto"):
                options["batch_size"] = largest
            options["device"] = _usable_device(options.get("device"))
            self.evaluated = Evaluated(pretrained, **options)
            self._device = self.evaluated.model.device

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            found = self.evaluated.loglikelihoods([request.args for request in requests])
            return self._kept("loglikelihood", requests, found)

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            found = self.evaluated.rolling_loglikelihoods([r.args[0] for r in requests])
            return self._kept("loglikelihood_rolling", requests, found)

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            found = self.evaluated.continuations([request.args for request in requests])
            return self._kept("generate_until", requests, found)

        def _kept(self, kind: str, requests: Sequence[Any], found: list[Any]) -> list[Any]:
            for request, result in zip(requests, found, strict=True):
                self.cache_hook.add_partial(kind, request.args, result)
            return found

    register("statescan")(StatescanLM)
    return StatescanLM


def main() -> None:
    """lm_eval's own program, with this model known to it."""
    _model_class()
    import_module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    main()
