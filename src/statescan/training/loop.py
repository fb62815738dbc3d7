# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, learning rate, saving, evaluation, and stopping on request.

The corpus, the files and the display are modules of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from statescan.errors import ArgumentError, CheckpointError, StatescanError
from statescan.models.checkpoint import import_safetensors, load_model, save_model
from statescan.models.lm import MambaLM
from statescan.nn import InferenceCache
from statescan.training.config import TrainConfig
from statescan.training.corpus import CarriedWindows, Corpus, RandomWindows, load_corpus
from statescan.training.evaluate import bits_per_byte
from statescan.training.interrupt import StopRequest
from statescan.training.optimizer import learning_rate, make_optimizer
from statescan.training.progress import Progress, make_progress
from statescan.training.state import STATE_NAME, load_state, save_state


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        out: Folder with the model.
        step: Steps done, over all resumed parts.
        interrupted: Whether a signal ended it before its last step.
        losses: Loss in nats a byte of each step of this process.
        held_out: (step, bits per byte) of each evaluation of this process.
        seconds: Time in training steps, over all resumed parts.
        tokens_per_second: Of this process.
        parameters: Size of the model.
        corpus_sha256: Of the text.
    """

    out: Path
    step: int
    interrupted: bool
    losses: list[float]
    held_out: list[tuple[int, float]]
    seconds: float
    tokens_per_second: float
    parameters: int
    corpus_sha256: str

    @property
    def bits_per_byte(self) -> float | None:
        """The last evaluation of the stored weights, None if there was none."""
        return self.held_out[-1][1] if self.held_out else None


def train(
    config: TrainConfig,
    *,
    progress: Progress | None = None,
    on_step: Callable[[int, float], object] | None = None,
) -> TrainResult:
    """Train a byte-level model, or continue a run; writes only into ``config.out``.

    A signal (Ctrl-C) ends the run after the current step with everything saved; ``resume``
    continues it to the same weights, bit for bit, as if it had never stopped.

    Args:
        config: The run.
        progress: Where to show how it goes; None chooses by what this process has.
        on_step: Called with (steps done, loss) after each step.
    """
    import_safetensors()
    # The run's random numbers come from its own seed and leave the caller's generator alone.
    with torch.random.fork_rng(devices=[]):
        run = _prepare(config)
        shown = progress or make_progress(
            run.step, config.steps, config.batch * config.seqlen, config.log_every
        )
        try:
            with StopRequest() as stop:
                return _loop(run, stop, shown, on_step)
        finally:
            shown.close()


@dataclass
class _Run:
    """A run in memory."""

    config: TrainConfig
    corpus: Corpus
    model: MambaLM
    optimizer: torch.optim.AdamW
    windows: RandomWindows | CarriedWindows
    cache: InferenceCache | None
    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)


def _prepare(config: TrainConfig) -> _Run:
    """Check everything, build or restore the run, and make its folder, still empty."""
    saved = _saved_state(config)
    corpus = load_corpus(config.text, config.held_out, config.seqlen)
    if saved is not None and saved["corpus_sha256"] != corpus.sha256:
        raise ArgumentError(
            f"train: {config.text} has the SHA-256 {corpus.sha256[:16]}..., the saved run's text "
            f"{saved['corpus_sha256'][:16]}....\n"
            "A resumed run must read the text it was started with.\n"
            "Give that text, or another --out for a new run."
        )
    torch.manual_seed(config.seed)
    model = MambaLM(config.model_config()).to(_device(config.device)).train()
    optimizer = make_optimizer(model, config)
    windows: RandomWindows | CarriedWindows
    cache = None
    if config.windows == "carried":
        windows = CarriedWindows(corpus.train, config.batch, config.seqlen)
        cache = model.allocate_inference_cache(config.batch)
    else:
        windows = RandomWindows(corpus.train, config.batch, config.seqlen, config.seed)
    run = _Run(config, corpus, model, optimizer, windows, cache)
    if saved is not None:
        _restore(run, saved)
    _make_folder(config.out)
    return run


def _make_folder(out: Path) -> None:
    """Made before the first step, since a folder that cannot be made would cost all of them."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"train: the folder {out} cannot be made: {error.strerror or error}.\n"
            "The run is saved there, in a folder that may be written.\nGive another --out."
        ) from error


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        # Reading a value back refuses devices without values, such as meta.
        torch.zeros(1, device=name).item()
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ArgumentError(
            f"train: device {name!r} cannot be used: {str(error).splitlines()[0]}\n"
            "It must be 'auto', 'cpu' or a device that this torch can reach, such as 'cuda:0'.\n"
            "Leave --device out, or give cpu."
        ) from error


def _saved_state(config: TrainConfig) -> dict[str, Any] | None:
    if config.resume:
        saved = load_state(config.out)
        config.check_resumes(saved["settings"])
        return saved
    if (config.out / STATE_NAME).exists():
        raise ArgumentError(
            f"train: {config.out} already holds a run ({STATE_NAME}).\n"
            "A new run would overwrite it.\n"
            "Continue it with --resume, or give another --out."
        )
    return None


def _restore(run: _Run, saved: dict[str, Any]) -> None:
    try:
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        if run.cache is not None:
            for state, value in zip(_cache_tensors(run.cache), saved["cache"], strict=True):
                state.copy_(value)
        torch.set_rng_state(saved["rng"])
        run.step, run.seconds = int(saved["step"]), float(saved["seconds"])
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{run.config.out / STATE_NAME} does not fit this run: {reason}"
        ) from error


def _loop(
    run: _Run,
    stop: StopRequest,
    progress: Progress,
    on_step: Callable[[int, float], object] | None,
) -> TrainResult:
    config = run.config
    parameters = run.model.num_parameters()
    begin, spent = run.step, 0.0
    progress.note(
        f"{parameters:,} parameters, {run.corpus.train.shape[0]:,} bytes to learn, "
        f"{run.corpus.held_out.shape[0]:,} held out, from step {begin}"
    )
    saved_at = begin
    while run.step < config.steps and not stop.requested:
        started = time.monotonic()
        lr = learning_rate(config, run.step)
        loss = _train_step(run, lr)
        run.step += 1
        spent += time.monotonic() - started
        run.losses.append(loss)
        progress.step(run.step, loss, lr)
        if on_step is not None:
            on_step(run.step, loss)
        due = config.eval_every and run.step % config.eval_every == 0
        if run.step % config.save_every == 0 or (due and run.step < config.steps):
            _save(run, run.seconds + spent)
            saved_at = run.step
        if due and run.step < config.steps and not stop.requested:
            _evaluate(run, config.eval_bytes, progress)
    if run.step != saved_at or begin == run.step:
        _save(run, run.seconds + spent)
    interrupted = run.step < config.steps
    if interrupted:
        progress.note(f"stopped after step {run.step}; continue with --resume")
    else:
        _evaluate(run, None, progress)
    tokens = (run.step - begin) * config.batch * config.seqlen
    return TrainResult(
        out=config.out,
        step=run.step,
        interrupted=interrupted,
        losses=run.losses,
        held_out=run.held_out,
        seconds=run.seconds + spent,
        tokens_per_second=tokens / spent if spent else 0.0,
        parameters=parameters,
        corpus_sha256=run.corpus.sha256,
    )


def _train_step(run: _Run, lr: float) -> float:
    """One optimiser step; raises before a weight changes if loss or gradient is no number."""
    device = run.model.device
    inputs, targets = (part.to(device) for part in run.windows.batch_at(run.step))
    if run.cache is not None and run.windows.fresh_rows(run.step):
        run.cache.reset()
    logits = run.model(inputs, cache=run.cache).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    _check_finite("loss", value := float(loss.detach()), run.step)
    run.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    longest = run.config.grad_clip or math.inf
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), longest)
    _check_finite("norm of the gradient", float(norm), run.step)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    return value


def _check_finite(what: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise StatescanError(
            f"train: the {what} is {value} at step {step + 1}.\nIt must stay a number.\n"
            "Start again with a lower --lr; the last saved state is untouched."
        )


def _save(run: _Run, seconds: float) -> None:
    """Write the model for its users and the state for ``resume``."""
    config = run.config
    save_model(run.model, config.out, dtype=getattr(torch, config.dtype))
    save_state(
        config.out,
        settings=config.to_dict(),
        corpus_sha256=run.corpus.sha256,
        step=run.step,
        seconds=seconds,
        model=run.model.state_dict(),
        optimizer=run.optimizer.state_dict(),
        rng=torch.get_rng_state(),
        cache=[] if run.cache is None else list(_cache_tensors(run.cache)),
    )


def _evaluate(run: _Run, max_bytes: int | None, progress: Progress) -> None:
    """Measure the stored weights, since these are what the user gets."""
    stored = load_model(run.config.out, device=run.model.device, dtype=torch.float32)
    bits = bits_per_byte(stored, run.corpus.held_out, max_bytes=max_bytes)
    run.held_out.append((run.step, bits))
    progress.note(f"held-out bits per byte {bits:.4f} after step {run.step}")


def _cache_tensors(cache: InferenceCache) -> Iterator[Tensor]:
    return (state for layer in cache for state in layer)
