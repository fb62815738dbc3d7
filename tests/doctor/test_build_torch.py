# SPDX-License-Identifier: Apache-2.0
"""The wrapper under torch's own build of extensions, which makes the originals' ninja file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import binaries, fake_build

from statescan.doctor.builder import wrapper
from statescan.doctor.builder.progress import Progress

SETUP = """\
import os
from setuptools import setup
from torch.utils import cpp_extension
from torch.utils.cpp_extension import BuildExtension, CppExtension

# A torch for the CPU does not look for a toolkit.
cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"]

# As the originals pass them; the text "arch" keeps torch from adding targets of its own.
pairs = ["-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=sm_90"]
setup(
    name="x",
    # A source of CUDA in an extension without CUDA libraries: compiled by nvcc, linked anywhere.
    ext_modules=[
        CppExtension("kernel", ["kernel.cu"], extra_compile_args={"cxx": [], "nvcc": pairs})
    ],
    cmdclass={"build_ext": BuildExtension},
)
"""


@pytest.fixture
def tree(tmp_path):
    binaries.gcc()
    (tmp_path / "setup.py").write_text(SETUP)
    (tmp_path / "kernel.cu").write_text("int kernel(void) { return 0; }\n")
    toolkit = tmp_path / "cuda"
    (toolkit / "include").mkdir(parents=True)
    fake_build.compiler(toolkit)
    return tmp_path


@pytest.mark.parametrize("folder", ["plain", "with blanks and $"])
def test_torch_builds_with_it(tree, folder):
    place = tree / folder
    place.mkdir()
    made = wrapper.generate(
        place, [str(tree / "cuda" / "bin" / "nvcc")], ["arch=compute_86,code=sm_86"]
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"CUDA_HOME": str(tree / "cuda"), "PYTORCH_NVCC": made.variable, "PATH": path}
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-temp", "build/temp.x"],
        cwd=tree,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    (call,) = fake_build.calls(tree / "cuda")
    assert call[-2:] == ["-gencode", "arch=compute_86,code=sm_86"]
    assert not {"arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90"} & set(call)
    # What torch wrote itself is still there.
    assert "--expt-relaxed-constexpr" in call
    (row,) = made.compilations()
    assert (row.source, row.code) == ("kernel.cu", 0)
    progress = Progress(made, tree, 1)
    assert progress.state().total == 1
    assert any(progress.line(line.encode()) for line in done.stdout.splitlines())
