# SPDX-License-Identifier: Apache-2.0
"""The proofs that the written files run: an import, and a comparison with plain torch.

Texts of Python programs only, which need nothing beyond what the files install. ``imports`` and
``arguments`` must run without GPU: image builds and hosted runners have none.
"""

from __future__ import annotations

from statescan.doctor import releases
from statescan.doctor.generate.choices import Choices

_OWN = """\
import torch, statescan
from statescan.reference import selective_scan_ref

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(2, 64, 128, device=device, requires_grad=True)
dt, A = torch.rand(2, 64, 128, device=device), -torch.rand(64, 16, device=device)
B, C = torch.randn(2, 16, 128, device=device), torch.randn(2, 16, 128, device=device)
y, wanted = statescan.selective_scan(x, dt, A, B, C), selective_scan_ref(x, dt, A, B, C)
torch.testing.assert_close(y, wanted, rtol=1e-3, atol=2e-3)
grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (y, wanted)]
torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-2)
print("selective_scan and its gradient agree with the reference on", device)
"""
_CONV = """\
import torch
from causal_conv1d import causal_conv1d_fn

torch.manual_seed(0)
x = torch.randn(2, 64, 128, device="cuda")
weight, bias = torch.randn(64, 4, device="cuda"), torch.randn(64, device="cuda")
# In float64, because cuDNN may compute float32 with fewer bits.
padded = torch.nn.functional.pad(x.double(), (3, 0))
wanted = torch.nn.functional.conv1d(padded, weight.double()[:, None], bias.double(), groups=64)
torch.testing.assert_close(causal_conv1d_fn(x, weight, bias), wanted.float(), rtol=1e-3, atol=2e-3)
print("causal_conv1d_fn agrees with conv1d on", torch.cuda.get_device_name())
"""
_SCAN = """\

from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref

u, delta = torch.randn(2, 64, 128, device="cuda"), torch.rand(2, 64, 128, device="cuda")
A = -torch.rand(64, 16, device="cuda")
B, C = torch.randn(2, 16, 128, device="cuda"), torch.randn(2, 16, 128, device="cuda")
wanted = selective_scan_ref(u, delta, A, B, C)
torch.testing.assert_close(selective_scan_fn(u, delta, A, B, C), wanted, rtol=1e-3, atol=2e-3)
print("selective_scan_fn agrees with selective_scan_ref on", torch.cuda.get_device_name())
"""


def imports(choices: Choices) -> str:
    """A line that imports what was installed and prints versions or files.

    ``mamba_ssm`` itself is left out: Triton, which it imports, may refuse where no driver is.
    """
    if choices.package == "statescan":
        return "import statescan, torch; print(statescan.__version__, torch.__version__)"
    modules = ["causal_conv1d_cuda"]
    if choices.package == "mamba-ssm":
        modules.append("selective_scan_cuda")
    files = ", ".join(f"{module}.__file__" for module in modules)
    # torch comes first: loading it is what makes its libraries known to the extensions.
    return f"import torch, {', '.join(modules)}; print(torch.__version__, {files})"


def arguments(choices: Choices) -> str:
    """A program that compares the convolution's arguments with what its caller passes."""
    source = choices.sources[-1]
    known = releases.release(source.package, source.version)
    count = known.conv_generation if known else 0
    return (
        "import re\n"
        "import torch, causal_conv1d_cuda\n"
        "text = causal_conv1d_cuda.causal_conv1d_fwd.__doc__\n"
        'found = len(re.findall(r"\\barg\\d+:", text))\n'
        f'assert found == {count}, f"{{found}} arguments instead of {count}: {{text}}"\n'
        f'print("causal_conv1d_fwd takes the {count} arguments that its caller passes")\n'
    )


def kernels(choices: Choices) -> str:
    """A program that compares the kernels with plain torch; the originals' need a GPU."""
    return program(choices.package)


def program(package: str) -> str:
    """The same for a package; mamba-ssm's needs causal-conv1d as well."""
    if package == "statescan":
        return _OWN
    return _CONV + (_SCAN if package == "mamba-ssm" else "")
