# SPDX-License-Identifier: Apache-2.0
"""A stand-in of the originals' source package and of a CUDA toolkit, for real builds in tests.

The package builds as the originals do: setup.py writes a ninja file with PYTORCH_NVCC and fixed GPU
targets, ninja runs it, and the linker makes an extension module. The compiler behind the name nvcc
is gcc; it records its arguments and puts the headers of GPU code for its targets into the object.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import textwrap
import venv
from dataclasses import dataclass
from pathlib import Path

from statescan.doctor.model import Fact, Facts

VERSION = "1.7.0"
RELEASE_TARGETS = ("75", "80", "90")

_PYPROJECT = """\
[build-system]
requires = ["setuptools", "torch"]
build-backend = "setuptools.build_meta"
"""
_SETUP = """\
import os, shlex, subprocess, sys, sysconfig
from pathlib import Path
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

if os.environ.get("CAUSAL_CONV1D_SKIP_CUDA_BUILD") == "TRUE":
    sys.exit("nothing to build")


class Build(build_ext):
    def build_extension(self, extension):
        folder = Path(self.build_temp).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        pairs = " ".join(f"-gencode arch=compute_{c},code=sm_{c}" for c in TARGETS)
        include = sysconfig.get_paths()["include"]
        lines = [
            "ninja_required_version = 1.3",
            f"nvcc = {os.environ['PYTORCH_NVCC']}",
            "rule cuda_compile",
            f"  command = $nvcc --threads 4 -I{include} {pairs} -c $in -o $out",
        ]
        objects = []
        for source in extension.sources:
            objects.append(str(folder / (Path(source).stem + ".o")))
            names = [path.replace(" ", "$ ") for path in (objects[-1], str(Path(source).resolve()))]
            lines.append(f"build {names[0]}: cuda_compile {names[1]}")
        (folder / "build.ninja").write_text("\\n".join(lines) + "\\n")
        command = ["ninja", "-v", "-j", os.environ["MAX_JOBS"]]
        subprocess.run(command, cwd=folder, check=True)
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["gcc", "-shared", "-o", str(target), *objects], check=True)


setup(
    name="causal-conv1d",
    version="VERSION",
    packages=["causal_conv1d"],
    ext_modules=[Extension("causal_conv1d_cuda", ["csrc/module.cu", "csrc/forward.cu"])],
    cmdclass={"build_ext": Build},
)
"""
_MODULE = """\
#define PY_SSIZE_T_CLEAN
#include <Python.h>
extern int forward(void);
static PyObject *call(PyObject *self, PyObject *unused) { return PyLong_FromLong(forward()); }
static PyMethodDef methods[] = {
    {"causal_conv1d_fwd", call, METH_NOARGS,
     "causal_conv1d_fwd(ARGUMENTS)"},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "causal_conv1d_cuda", NULL, -1, methods};
PyMODINIT_FUNC PyInit_causal_conv1d_cuda(void) { return PyModule_Create(&module); }
"""
_NVCC = """\
#!PYTHON -SE
import json, os, re, struct, subprocess, sys, time
from pathlib import Path

home = Path(__file__).resolve().parents[1]
words = sys.argv[1:]
if words in (["-V"], ["--version"]):
    print("Cuda compilation tools, release 12.8, V12.8.93")
    sys.exit()
with open(home / "calls.json", "a") as calls:
    calls.write(json.dumps(words) + "\\n")
mode = (home / "mode").read_text() if (home / "mode").exists() else ""
if mode == "hang":
    subprocess.run(["sleep", "300"])
if mode == "memory" and "1" != words[words.index("--threads") + 1]:
    print("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", file=sys.stderr)
    sys.exit(9)
if mode == "disk" and "TMPDIR" not in os.environ:
    print("fatal error: error writing to /tmp/tmpxft_1.s: No space left on device", file=sys.stderr)
    sys.exit(1)
if mode == "riddle":
    print("the stars are not right", file=sys.stderr)
    sys.exit(1)
if mode == "compiler":
    print("/usr/local/cuda/include/crt/host_config.h:143:2: error: #error -- unsupported GNU "
          "version! gcc versions later than 13 are not supported!", file=sys.stderr)
    sys.exit(1)
source = next(word for word in words if word.endswith(".cu"))
target = words[words.index("-o") + 1]
if "-MF" in words:
    Path(words[words.index("-MF") + 1]).write_text(f"{target}: {source}\\n")
entries = b""
for pair in re.findall(r"code=sm_(\\d+)", " ".join(words)):
    fields = (2, 0x101, 64, 64, 0, 0, 8, 1, int(pair), 0, 0, 0x11, 0, 0)
    entries += struct.pack("<HHIQIIHHIIIQQQ", *fields) + b"\\x7fELF".ljust(64)
blob = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
code = ",".join(str(byte) for byte in blob)
place = '__attribute__((section(".nv_fatbin"), used))'
text = f"static const unsigned char fat[] {place} = {{{code}}};"
made = Path(target).with_suffix(".c")
made.write_text(text + "\\n" + Path(source).read_text())
include = [word for word in words if word.startswith("-I")]
sys.exit(subprocess.run(["gcc", "-fPIC", *include, "-c", str(made), "-o", target]).returncode)
"""
_TORCH = """\
import sys
__version__ = "2.8.0+cu128"
# As torch does it where NumPy is absent.
print("UserWarning: Failed to initialize NumPy", file=sys.stderr)
"""


@dataclass(frozen=True)
class Workshop:
    """A machine in a folder: an environment, a toolkit, and an index with the package.

    Attributes:
        python: Interpreter of the environment, which has pip, setuptools and ninja, and no torch
            but a stand-in.
        toolkit: CUDA_HOME.
        variables: Environment of the builds.
    """

    root: Path
    python: str
    toolkit: Path
    variables: dict[str, str]

    def calls(self) -> list[list[str]]:
        """Arguments of every compilation."""
        return calls(self.toolkit)

    def set_mode(self, mode: str) -> None:
        """How nvcc fails: "memory" with many threads, "disk" without TMPDIR, and always "compiler",
        "riddle", "hang"; "" for not.
        """
        (self.toolkit / "mode").write_text(mode)

    def facts(self, **changes: object) -> Facts:
        """Facts of this machine as a build would find them."""
        values: dict[str, object] = {
            "system.os": "linux",
            "system.machine": "x86_64",
            "system.libc": {"kind": "glibc", "version": "2.36"},
            "system.cores": 2,
            "system.memory": {"total_gb": 16.0, "free_gb": 12.0, "limit_gb": None},
            "python.version": "3.11.7",
            "python.tag": "cp311",
            "python.executable": self.python,
            "python.pip": {"version": "25.0"},
            "python.headers": {"folder": "/usr/include", "present": True},
            "packages.installed": {
                name: {"version": "1"} for name in ("setuptools", "wheel", "packaging", "ninja")
            },
            "torch.version": "2.8.0+cu128",
            "torch.cuda": "12.8",
            "torch.cxx11_abi": True,
            "toolkit.build": {
                "path": str(self.toolkit),
                "via": "CUDA_HOME",
                "exists": True,
                "nvcc": f"{self.toolkit}/bin/nvcc",
                "version": "12.8",
            },
            "toolkit.homes": [],
            "environment.variables": {"CUDA_HOME": str(self.toolkit)},
            "driver.gpus": [],
        }
        values |= changes
        return Facts({name: Fact(name, value, "test") for name, value in values.items()})


def workshop(root: Path) -> Workshop:
    """Make one in a folder."""
    environment = root / "env"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(environment)
    python = environment / "bin" / "python"
    packages = next((environment / "lib").glob("python*")) / "site-packages"
    # pip, setuptools and ninja of the interpreter that runs the tests; what is installed goes here.
    outer = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "outer.pth").write_text("\n".join(outer) + "\n")
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(_TORCH)
    ninja = Path(sys.executable).parent / "ninja"
    (environment / "bin" / "ninja").symlink_to(ninja)
    toolkit = root / "cuda toolkit"
    compiler(toolkit)
    index = root / "index"
    index.mkdir()
    sdist(index)
    return Workshop(root, str(python), toolkit, variables(root))


def compiler(toolkit: Path) -> None:
    """Put the stand-in of nvcc into a folder of a toolkit."""
    (toolkit / "bin").mkdir(parents=True)
    nvcc = toolkit / "bin" / "nvcc"
    nvcc.write_text(_NVCC.replace("PYTHON", os.path.realpath(sys.executable)))
    nvcc.chmod(0o755)


def calls(toolkit: Path) -> list[list[str]]:
    """Arguments of every compilation with it."""
    file = toolkit / "calls.json"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def variables(root: Path) -> dict[str, str]:
    """Environment of the builds in that folder: its own programs first, and no other index."""
    return {
        "PATH": f"{root / 'env' / 'bin'}:{os.environ['PATH']}",
        "HOME": str(root),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": (root / "index").as_uri(),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def sdist(folder: Path, *, sources: bool = True, arguments: int = 8) -> Path:
    """The source package; without CUDA sources as those of old releases, if so wanted."""
    named = ", ".join(f"arg{number}: Tensor" for number in range(arguments))
    setup = _SETUP.replace("VERSION", VERSION).replace("TARGETS", repr(RELEASE_TARGETS))
    files = {
        "setup.py": setup,
        "pyproject.toml": _PYPROJECT,
        "PKG-INFO": f"Metadata-Version: 2.1\nName: causal-conv1d\nVersion: {VERSION}\n",
        "causal_conv1d/__init__.py": f'__version__ = "{VERSION}"\n',
    }
    if sources:
        files["csrc/module.cu"] = _MODULE.replace("ARGUMENTS", named)
        files["csrc/forward.cu"] = "int forward(void) { return 42; }\n"
    target = folder / f"causal_conv1d-{VERSION}.tar.gz"
    with tarfile.open(target, "w:gz") as archive:
        for name, text in files.items():
            content = textwrap.dedent(text).encode()
            row = tarfile.TarInfo(f"causal_conv1d-{VERSION}/{name}")
            row.size = len(content)
            archive.addfile(row, io.BytesIO(content))
    return target
