# SPDX-License-Identifier: Apache-2.0
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from statescan.errors import ArgumentError, CheckpointError, StatescanError
from statescan.models import load_model
from statescan.training import TrainConfig, TrainResult, bits_per_byte, train
from statescan.training import loop as training_loop
from statescan.training.optimizer import learning_rate, make_optimizer
from statescan.training.progress import PlainProgress, RichProgress, Silent, clock

FILES = ["config.json", "model.safetensors", "training.pt"]


def run(config: TrainConfig, **options) -> TrainResult:
    return train(config, progress=Silent(), **options)


def interrupt_at(*steps: int):
    """Press Ctrl-C after each of these steps."""

    def on_step(step: int, loss: float) -> None:
        if step in steps:
            os.kill(os.getpid(), signal.SIGINT)

    return on_step


def state_of(folder: Path) -> dict:
    return torch.load(folder / "training.pt", weights_only=True)


def assert_same_state(first: Path, second: Path) -> None:
    """Weights, moments, random numbers, order and carried states: equal bits."""
    a, b = state_of(first), state_of(second)
    assert a["step"] == b["step"]
    assert torch.equal(a["rng"], b["rng"])
    for name in a["model"]:
        assert torch.equal(a["model"][name], b["model"][name]), name
    for key, moments in a["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, b["optimizer"]["state"][key][name]), name
    assert all(torch.equal(x, y) for x, y in zip(a["cache"], b["cache"], strict=True))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, second)]
    assert weights[0] == weights[1]


def test_it_learns_and_stores_what_it_measures(config: TrainConfig) -> None:
    config = replace(config, steps=60, d_model=32, seqlen=32, lr=2e-2, eval_every=25)
    result = run(config)
    assert result.losses[0] == pytest.approx(math.log(256), abs=0.5)
    assert sum(result.losses[-10:]) / 10 < 2.0
    assert [step for step, _ in result.held_out] == [25, 50, 60]
    assert (result.step, result.interrupted, len(result.losses)) == (60, False, 60)
    assert sorted(path.name for path in config.out.iterdir()) == FILES
    stored = load_model(config.out, dtype=torch.float32)
    data = config.text.read_bytes()
    held_out = torch.tensor(list(data[len(data) - round(0.1 * len(data)) :]), dtype=torch.uint8)
    assert result.bits_per_byte == bits_per_byte(stored, held_out) < 4
    assert load_model(config.out).lm_head.weight.dtype == torch.bfloat16
    assert result.parameters == stored.num_parameters()
    assert result.tokens_per_second > 0


@pytest.mark.parametrize("windows", ["random", "carried"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    config: TrainConfig, tmp_path: Path, windows: str
) -> None:
    config = replace(config, windows=windows, steps=9)
    whole = run(config)
    parts = replace(config, out=tmp_path / "parts")
    first = run(parts, on_step=interrupt_at(3))
    assert (first.step, first.interrupted) == (3, True)
    second = run(replace(parts, resume=True), on_step=interrupt_at(7))
    assert (second.step, second.interrupted) == (7, True)
    last = run(replace(parts, resume=True))
    assert (last.step, last.interrupted) == (9, False)
    assert first.losses + second.losses + last.losses == whole.losses
    assert last.bits_per_byte == whole.bits_per_byte
    assert last.seconds > second.seconds > first.seconds > 0
    assert_same_state(config.out, parts.out)


def test_two_runs_are_equal_and_seeds_differ(config: TrainConfig, tmp_path: Path) -> None:
    first = run(config)
    torch.manual_seed(99)
    second = run(replace(config, out=tmp_path / "again"))
    assert first.losses == second.losses
    assert_same_state(config.out, tmp_path / "again")
    assert run(replace(config, out=tmp_path / "other", seed=1)).losses != first.losses


def test_the_callers_random_numbers_are_left_alone(config: TrainConfig) -> None:
    before = torch.get_rng_state()
    run(config)
    assert torch.equal(torch.get_rng_state(), before)


def test_carried_states_reach_the_next_window(config: TrainConfig, tmp_path: Path) -> None:
    carried = run(replace(config, windows="carried"))
    assert any(state.any() for state in state_of(config.out)["cache"])

    class Forgetful(training_loop.CarriedWindows):
        def fresh_rows(self, step: int) -> bool:
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_loop, "CarriedWindows", Forgetful)
        fresh = run(replace(config, windows="carried", out=tmp_path / "fresh"))
    assert carried.losses[0] == fresh.losses[0]
    assert carried.losses[2] != fresh.losses[2]


def test_ctrl_c_loses_nothing_and_a_second_one_stops_at_once(config: TrainConfig) -> None:
    assert run(config, on_step=interrupt_at(2)).step == 2

    def twice(step: int, loss: float) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(replace(config, resume=True), on_step=twice)
    assert signal.getsignal(signal.SIGINT) is handler
    assert state_of(config.out)["step"] == 2
    assert run(replace(config, resume=True)).step == 8


def test_sigterm_is_heard_too(config: TrainConfig) -> None:
    result = run(config, on_step=lambda step, _: step == 3 and os.kill(os.getpid(), signal.SIGTERM))
    assert (result.step, result.interrupted) == (3, True)


def test_ctrl_c_in_a_real_process(config: TrainConfig) -> None:
    """The user's view: a process in the middle of its steps, one signal, exit, resume."""
    code = (
        "import sys\n"
        "from statescan.training import TrainConfig, train\n"
        "from statescan.training.progress import PlainProgress\n"
        "config = TrainConfig(text=sys.argv[1], out=sys.argv[2], steps=100000, d_model=16,\n"
        "    n_layer=1, d_state=2, batch=2, seqlen=16, held_out=0.1, eval_every=0)\n"
        "result = train(config, progress=PlainProgress(0, 100000, 32, 1))\n"
        "print(result.step, result.interrupted)\n"
    )
    command = [sys.executable, "-c", code, str(config.text), str(config.out)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    step, interrupted = out.split()
    assert int(step) >= 3
    assert interrupted == "True"
    assert state_of(config.out)["step"] == int(step)
    assert "--resume" in err


def test_saves_at_intervals_and_at_the_end(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    save_state = training_loop.save_state

    def record(folder: Path, **state) -> None:
        saved.append(state["step"])
        save_state(folder, **state)

    monkeypatch.setattr(training_loop, "save_state", record)
    run(replace(config, save_every=3))
    assert saved == [3, 6, 8]
    assert not [path for path in config.out.iterdir() if path.name.startswith(".")]


def test_a_crash_while_saving_keeps_the_last_state(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config, on_step=interrupt_at(2))

    def crash(content: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(OSError, match="No space"):
        run(replace(config, resume=True))
    monkeypatch.undo()
    assert state_of(config.out)["step"] == 2
    assert sorted(path.name for path in config.out.iterdir()) == FILES


def test_resuming_a_finished_run_changes_nothing(config: TrainConfig) -> None:
    first = run(config)
    weights = (config.out / "model.safetensors").read_bytes()
    again = run(replace(config, resume=True))
    assert (again.step, again.losses) == (8, [])
    assert again.bits_per_byte == first.bits_per_byte
    assert (config.out / "model.safetensors").read_bytes() == weights


def test_parameters_that_ask_for_it_are_not_decayed(config: TrainConfig) -> None:
    torch.manual_seed(0)
    model = training_loop.MambaLM(config.model_config())
    decayed, kept = make_optimizer(model, config).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == config.weight_decay
    assert kept["weight_decay"] == 0
    assert {names[id(p)].split("mixer.")[-1] for p in kept["params"]} == {
        *("A_log", "D", "dt_proj.bias", "conv1d.bias"),
        *("backbone.layers.0.norm.weight", "backbone.norm_f.weight"),
    }
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_learning_rate_rises_and_falls(config: TrainConfig) -> None:
    config = replace(config, steps=102, warmup=2, lr=1.0, min_lr_ratio=0.1)
    rates = [learning_rate(config, step) for step in range(102)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[52] == pytest.approx(0.55)
    assert rates[101] == pytest.approx(0.1, abs=1e-3)
    assert all(a >= b for a, b in pairwise(rates[1:]))
    assert learning_rate(replace(config, warmup=0), 0) == 1.0


def test_a_loss_that_is_no_number_stops_before_the_weights_change(config: TrainConfig) -> None:
    run(config, on_step=interrupt_at(2))
    state = state_of(config.out)
    state["model"]["backbone.norm_f.weight"].fill_(float("nan"))
    torch.save(state, config.out / "training.pt")
    with pytest.raises(StatescanError, match=r"nan at step 3.*(\n.*)*lower --lr"):
        run(replace(config, resume=True))
    assert load_model(config.out).backbone.norm_f.weight.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"seed": 5}, ArgumentError, r"seed is 5, and 0"),
        ({"d_model": 32}, ArgumentError, "d_model"),
        ({"steps": 20}, ArgumentError, "steps"),
        ({"windows": "carried"}, ArgumentError, "windows"),
    ],
)
def test_resuming_with_other_settings_is_refused(config, changes, kind, message: str) -> None:
    run(config, on_step=interrupt_at(2))
    with pytest.raises(kind, match=message):
        run(replace(config, resume=True, **changes))


def test_resuming_needs_the_same_text_and_a_sound_state(config: TrainConfig) -> None:
    with pytest.raises(CheckpointError, match="no run to resume"):
        run(replace(config, resume=True))
    run(config, on_step=interrupt_at(2))
    with pytest.raises(ArgumentError, match="--resume"):
        run(config)
    moved = config.text.with_name("moved.txt")
    moved.write_bytes(config.text.read_bytes())
    assert run(replace(config, text=moved, resume=True), on_step=interrupt_at(3)).step == 3
    moved.write_bytes(config.text.read_bytes() + b"x")
    with pytest.raises(ArgumentError, match="SHA-256"):
        run(replace(config, text=moved, resume=True))
    (config.out / "training.pt").write_bytes(b"PK\3\4")
    with pytest.raises(CheckpointError, match="damaged"):
        run(replace(config, resume=True))


def test_nothing_is_written_before_the_settings_are_checked(config: TrainConfig) -> None:
    with pytest.raises(ArgumentError, match="longer text"):
        run(replace(config, seqlen=10_000))
    with pytest.raises(ArgumentError, match="'cuda:77'"):
        run(replace(config, device="cuda:77"))
    with pytest.raises(ArgumentError, match="'meta' cannot be used"):
        run(replace(config, device="meta"))
    assert not config.out.exists()


def test_a_folder_that_cannot_be_made_stops_before_the_first_step(config: TrainConfig) -> None:
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text("a file")
    for out in (config.out, config.out / "below"):
        steps: list[int] = []
        with pytest.raises(ArgumentError, match=r"cannot be made.*\n.*\nGive another --out"):
            run(replace(config, out=out), on_step=lambda step, _, done=steps: done.append(step))
        assert steps == []
    assert config.out.read_text() == "a file"


@pytest.mark.parametrize("grad_clip", [1.0, 0.0])
def test_a_gradient_that_is_no_number_stops_before_the_weights_change(
    config: TrainConfig, monkeypatch, grad_clip: float
) -> None:
    """A loss may be finite and its gradient not; nothing of that reaches what is saved."""
    real = torch.Tensor.backward

    def spoil(tensor, *args, **kwargs):
        real(tensor, *args, **kwargs)
        spoilt.append(tensor)
        if len(spoilt) == 3:
            parameter = next(p for p in leaves(tensor) if p.grad is not None)
            parameter.grad.fill_(math.nan)

    def leaves(tensor):
        stack, found = [tensor.grad_fn], []
        while stack:
            node = stack.pop()
            if hasattr(node, "variable"):
                found.append(node.variable)
            stack += [following for following, _ in node.next_functions if following is not None]
        return found

    spoilt: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "backward", spoil)
    with pytest.raises(StatescanError, match="norm of the gradient is nan at step 3"):
        run(replace(config, save_every=1, grad_clip=grad_clip))
    weights = load_model(config.out).parameters()
    assert all(weight.isfinite().all() for weight in weights)
    assert torch.load(config.out / "training.pt", weights_only=True)["step"] == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 0), ("batch", 1.5), ("d_model", True), ("lr", 0.0), ("held_out", 1.0),
     ("windows", "all"), ("dtype", "int8"), ("beta1", 1.0), ("grad_clip", -1.0), ("seed", 2**63),
     ("seed", 1.5), ("seed", "x"), ("lr", "0.1"), ("lr", math.inf), ("held_out", None),
     ("warmup", math.inf), ("warmup", True), ("device", None), ("out", None), ("text", ""),
     ("text", 3)],
)  # fmt: skip
def test_bad_settings_are_refused(config: TrainConfig, name: str, value) -> None:
    with pytest.raises(ArgumentError, match=f"{name}={value!r}"):
        replace(config, **{name: value})


@torch.no_grad()
def test_bits_per_byte_does_not_depend_on_chunks(config: TrainConfig) -> None:
    torch.manual_seed(0)
    model = training_loop.MambaLM(config.model_config()).eval()
    data = torch.tensor(list(config.text.read_bytes()[:401]), dtype=torch.uint8)
    logits = model(data[None, :-1].long()).logits[0].double()
    exact = torch.nn.functional.cross_entropy(logits, data[1:].long()) / math.log(2)
    for chunk in (400, 77, 1000):
        found = bits_per_byte(model, data, lanes=1, chunk=chunk)
        assert found == pytest.approx(float(exact), rel=1e-6)
    assert bits_per_byte(model, data, lanes=4, chunk=10) == pytest.approx(float(exact), rel=0.02)
    assert bits_per_byte(model, data, max_bytes=2, lanes=8) > 0
    with pytest.raises(ArgumentError, match="1 bytes"):
        bits_per_byte(model, data[:1])


def test_plain_progress_tells_loss_speed_and_time(config: TrainConfig, capsys) -> None:
    train(replace(config, log_every=4), progress=PlainProgress(0, 8, 32, 4))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/8", "4/8", "8/8"]
    assert all(word in lines[1] for word in ("loss", "lr", "tokens/s", "left"))
    assert "held-out bits per byte" in lines[-1]
    assert clock(59.6) == "1:00"
    assert clock(3723) == "1:02:03"


def test_rich_progress_runs(config: TrainConfig, capsys) -> None:
    pytest.importorskip("rich")
    train(config, progress=RichProgress(0, 8, 32))
    assert "held-out bits per byte" in capsys.readouterr().err
