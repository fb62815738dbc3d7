# SPDX-License-Identifier: Apache-2.0
import importlib.util

import pytest
import torch
from helpers.tiny_models import tiny_lm, tiny_mixer
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

import statescan
from statescan.errors import ArgumentError, BackendUnavailableError, MissingExtraError
from statescan.generation import _onnx_forms
from statescan.generation import onnx as onnx_export
from statescan.testing import inputs
from statescan.testing.cases import Case, all_cases
from statescan.testing.compare import assert_close
from statescan.testing.runner import exact_results
from statescan.testing.tolerances import tolerance

FLOAT32 = 4 * tolerance("mamba_inner", torch.float32)
MISSING = [n for n in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(n) is None]


def why_no_scan() -> str:
    """The refusal of a torch that cannot translate a scan; "" for one that can."""
    try:
        onnx_export.decompositions()
    except BackendUnavailableError as error:
        return str(error)
    return ""


needs_scan = pytest.mark.skipif(bool(why_no_scan()), reason=why_no_scan())
needs_onnx = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} missing: pip install onnx onnxscript onnxruntime"
)


class Calls(torch.nn.Module):
    """A call as a module, for torch.export."""

    def __init__(self, call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *inputs):
        return self.call(*inputs)


def run(path, inputs):
    """Outputs of onnxruntime, as tensors."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    return [torch.from_numpy(array) for array in session.run(None, feeds)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = tiny_lm(sharp=True)
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    onnx_export.export_onnx(model, path)
    return model, path


SEQUENCE_OPS = ("selective_scan", "causal_conv1d", "mamba_inner")
EXPORTABLE = [
    case
    for op in SEQUENCE_OPS
    for case in all_cases(op)
    if not case.runs and not case.bounds and not case.has("complex") and all(case.sizes.values())
]


class Replaced(TorchDispatchMode):
    """Runs the form that the export would put in the place of each op."""

    def __init__(self) -> None:
        super().__init__()
        self.forms, self.used = onnx_export.decompositions(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        form = self.forms.get(function)
        self.used += form is not None
        return (form or function)(*args, **(kwargs or {}))


@needs_scan
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", EXPORTABLE, ids=str)
def test_the_exported_form_of_every_op_equals_the_reference(case: Case, dtype) -> None:
    exact = exact_results(case, dtype)
    with torch.no_grad(), Replaced() as replaced:
        found = getattr(statescan, case.op)(**inputs.make(case, dtype))
    assert replaced.used == 1
    results = found if isinstance(found, tuple) else (found,)
    names = ("out", "conv_final_states", "final_states")
    names = names if len(results) == 3 else (names[0], names[2])
    for name, result in zip(names, results):
        assert_close(result, exact[name], tolerance(case.op, dtype, result.dtype))


def packed(x, ids, A, B):
    return statescan.causal_conv1d(x, A, seq_idx=ids)


def complex_scan(x, ids, A, B):
    return statescan.selective_scan(x, x, A + 0j, B + 0j, B + 0j)


def decode(x, ids, A, B):
    return statescan.causal_conv1d_update(x[..., 0], x[..., :3], A)


@needs_scan
@needs_onnx
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
class TestRuntime:
    """What onnxruntime makes of exported files."""

    @pytest.mark.parametrize(("batch", "seqlen"), [(2, 4), (1, 1), (3, 33), (1, 100)])
    def test_a_model_at_any_length(self, exported, batch: int, seqlen: int) -> None:
        model, path = exported
        ids = torch.randint(0, 256, (batch, seqlen))
        cache = model.allocate_inference_cache(batch)
        zeros = [torch.stack(states) for states in zip(*cache)]
        logits, conv_states, ssm_states = run(path, [ids, *zeros])
        with torch.no_grad():
            assert_close(logits, model(ids, cache=cache).logits, FLOAT32)
        for layer, conv_state, ssm_state in zip(cache, conv_states, ssm_states, strict=True):
            assert_close(conv_state, layer.conv_state, FLOAT32)
            assert_close(ssm_state, layer.ssm_state, FLOAT32)

    def test_the_file_names_its_inputs_outputs_and_free_axes(self, exported) -> None:
        import onnx

        graph = onnx.load(exported[1]).graph

        def axes(values) -> dict[str, list]:
            return {
                value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
                for value in values
            }

        states = [2, "batch", 32, 3], [2, "batch", 32, 4]
        assert axes(graph.input) == dict(
            zip(("input_ids", "conv_states", "ssm_states"), (["batch", "seqlen"], *states))
        )
        assert axes(graph.output) == {
            "logits": ["batch", "seqlen", 256],
            "new_conv_states": states[0],
            "new_ssm_states": states[1],
        }

    def test_chunks_and_single_tokens_continue_from_the_states(self, exported) -> None:
        model, path = exported
        ids = torch.randint(0, 256, (2, 9))
        states = [torch.stack(s) for s in zip(*model.allocate_inference_cache(2))]
        pieces = []
        for part in ids.split([5, 1, 2, 1], dim=1):
            logits, *states = run(path, [part, *states])
            pieces.append(logits)
        with torch.no_grad():
            assert_close(torch.cat(pieces, dim=1), model(ids).logits, FLOAT32)

    def test_a_mixer_and_an_op_alone(self, tmp_path) -> None:
        mixer, hidden_states = tiny_mixer().eval(), torch.randn(2, 7, 16)
        free = ({1: Dim("seqlen")},)
        program = onnx_export.onnx_program(mixer, (hidden_states,), dynamic_shapes=free)
        program.save(tmp_path / "mixer.onnx")
        longer = torch.randn(2, 21, 16)
        (out,) = run(tmp_path / "mixer.onnx", [longer])
        assert_close(out, mixer(longer).detach(), FLOAT32)
        x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
        conv = Calls(lambda x, weight: statescan.causal_conv1d(x, weight, activation="silu"))
        onnx_export.onnx_program(conv, (x, weight)).save(tmp_path / "conv.onnx")
        (out,) = run(tmp_path / "conv.onnx", [x, weight])
        assert_close(out, conv(x, weight), FLOAT32)

    @pytest.mark.parametrize(
        ("call", "reason"),
        [
            (lambda x, ids, A, B: statescan.causal_conv1d(x, A, seq_idx=ids), "seq_idx"),
            (
                lambda x, ids, A, B: statescan.selective_scan(x, x, A + 0j, B + 0j, B + 0j),
                "complex",
            ),
            (
                lambda x, ids, A, B: statescan.causal_conv1d_update(x[..., 0], x[..., :3], A),
                "writes",
            ),
        ],
        ids=["packing", "complex", "decode"],
    )
    def test_what_onnx_cannot_say_is_refused_with_the_reason(self, call, reason: str) -> None:
        x, ids = torch.randn(2, 6, 5), torch.zeros(2, 5, dtype=torch.int32)
        with pytest.raises(BackendUnavailableError, match=reason) as caught:
            onnx_export.onnx_program(Calls(call), (x, ids, -torch.rand(6, 4), torch.randn(2, 4, 5)))
        assert len(str(caught.value).splitlines()) <= 4


def test_without_onnx_it_says_what_to_install(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(onnx_export, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install onnx onnxscript"):
        onnx_export.export_onnx(tiny_lm(), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_torch_without_scan_translation_is_refused(monkeypatch) -> None:
    def missing(name: str):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(_onnx_forms, "import_module", missing)
    with pytest.raises(BackendUnavailableError, match="cannot translate a scan"):
        onnx_export.decompositions()


def test_a_torch_whose_scan_takes_other_arguments_is_refused(monkeypatch) -> None:
    class Scan:
        def __call__(self, combine_fn, init, xs, dim, reverse):
            raise AssertionError("it must not be called")

    monkeypatch.setattr(_onnx_forms, "of_torch", lambda module, name: Scan())
    with pytest.raises(BackendUnavailableError, match="combine_fn, init, xs, dim, reverse"):
        onnx_export.decompositions()


def test_a_model_elsewhere_than_on_the_cpu_is_refused(tmp_path) -> None:
    with pytest.raises(ArgumentError, match="meta"):
        onnx_export.export_onnx(tiny_lm().to("meta"), tmp_path / "model.onnx")
