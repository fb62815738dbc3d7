# SPDX-License-Identifier: Apache-2.0
"""Makes the commands of a fix fit the machine and the versions that a log shows.

Works on any problem's fix, by what its commands do; fixes of single problems are in ``fixes``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from statescan.doctor import catalog, releases
from statescan.doctor.model import Command, Fix

Values = Mapping[str, str]

_INDEX = "https://download.pytorch.org/whl/cu"
_USUAL = "2.7"
_SAME_TORCH = ("ninja-hack", "package-half-removed", "torch-import-fails")
_OTHER_RELEASE = (
    *("nvcc-arch-unsupported", "sdist-missing-sources", "python-version-unsupported"),
    *("wheel-tag-mismatch", "msvc-code-portability", "triton-version", "shell-redirect"),
)
"""Problems that the release in the log has itself, or that another torch comes with."""
_PACKAGES = ("mamba-ssm", "causal-conv1d")
_PAIR = ("cc1d-missing", "cc1d-too-old-for-mamba", "cc1d-api-mismatch")
_OF_LINUX = ("apt-get", "ldconfig", "ln", "mkdir")
_WINDOWS_TOOLKIT = r"C:\Program Files\NVIDIA GPU Computing Toolkit\CUDA\v"


def fit(slug: str, fix: Fix, values: Values, windows: bool) -> Fix:
    """The fix with commands that can work where the log is from.

    Args:
        slug: The problem.
        fix: Of ``fixes.fix_for``.
        values: Of ``values.collect``.
        windows: Whether the log is from Windows.
    """
    if windows and slug == "triton-version":
        return _triton_of_windows(fix, values)
    given = _one_conv(fix.commands, values) if slug in _PAIR else fix.commands
    steps = [
        step
        for command in given
        for step in _of_torch(slug, command, values)
        if not (windows and any(word in _OF_LINUX for word in step.run[:2]))
    ]
    if windows:
        steps = [replace(step, note="") if "apt-get" in step.note else step for step in steps]
    if slug not in _OTHER_RELEASE:
        steps = [_of_release(step, values) for step in steps]
    steps = _of_one_tool(steps, values.get("installer", "pip"))
    return replace(fix, commands=tuple(_of_toolkit(slug, steps, values, windows)))


def torch_for(slug: str, values: Values) -> tuple[str, str] | None:
    """A torch and the CUDA version of an index that has it; None where none is known to serve.

    The torch of the log is kept where it can be.
    """
    table = {**catalog.load("pins")["torch"], **catalog.load("pins")["torch_before"]}
    shown = values.get("torch", "")
    wanted = ".".join(shown.split(".")[:2])
    usual = [wanted, _USUAL, *sorted(table, key=_numbers, reverse=True)]
    for minor in usual:
        row = table.get(minor, {})
        gpus = row.get("gpus", ())
        cudas = [cuda for cuda in row.get("cuda", ()) if _serves(cuda, gpus, values)]
        if slug == "driver-too-old":
            cudas = _of_driver(cudas, values)
        if cudas:
            version = shown if minor == wanted and shown.count(".") == 2 else table[minor]["patch"]
            kept = values.get("cuda", "")
            return version, kept if kept in cudas else cudas[-1]
    return None


def conv_requirement(mamba: str) -> str:
    """The newest causal-conv1d that a release of mamba-ssm can call; empty when not known."""
    row = releases.release("mamba-ssm", mamba) if mamba else None
    if row is None:
        return ""
    known = releases.releases("causal-conv1d")
    newest = known[-1].conv_generation == row.conv_generation
    fitting = [one.version for one in known if one.conv_generation == row.conv_generation]
    if not newest:
        # 1.5 changes its functions between 1.5.0 and 1.5.1: a line of one kind is the safer pin.
        others = {
            _numbers(one.version)[:2] for one in known if one.conv_generation != row.conv_generation
        }
        fitting = [version for version in fitting if _numbers(version)[:2] not in others]
    if not fitting:
        return ""
    return f"causal-conv1d>={fitting[0]}" if newest else f"causal-conv1d=={fitting[-1]}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _serves(cuda: str, gpus: Sequence[str], values: Values) -> bool:
    """Whether torch's builds for that CUDA, or of a release, have code for the GPU of the log."""
    digits = re.match(r"\d{2,3}", values.get("sm", ""))
    bounds = gpus or catalog.load("pins")["torch_gpus"].get(cuda)
    if digits is None or not bounds:
        return True
    low, high = map(_numbers, bounds)
    return low <= divmod(int(digits[0]), 10) <= (high[0], 9)


def _of_driver(cudas: list[str], values: Values) -> list[str]:
    """Those that the driver runs: up to its own CUDA, else of the same major version from 11 on."""
    found = values.get("found", "")
    if not re.fullmatch(r"\d{5}", found):
        return [cuda for cuda in cudas if cuda == "11.8"]
    own = (int(found) // 1000, int(found) % 1000 // 10)
    upto = [cuda for cuda in cudas if _numbers(cuda) <= own]
    same = [cuda for cuda in cudas if own[0] >= 11 and _numbers(cuda)[0] == own[0]]
    return upto or same


def _of_torch(slug: str, command: Command, values: Values) -> list[Command]:
    """An install of torch: of a version and from an index that exist together, or none."""
    place = next((n for n, word in enumerate(command.run) if word.startswith("torch==")), 0)
    if not place:
        return [command]
    if slug in _SAME_TORCH and not values.get("torch"):
        note = "then install that very version with --force-reinstall --no-deps"
        return [Command(("python", "-m", "pip", "show", "torch"), note=note)]
    choice = torch_for(slug, values)
    if choice is None:
        return []
    version, cuda = choice
    words = list(command.run)
    words[place] = f"torch=={version}"
    words = [_INDEX + cuda.replace(".", "") if word.startswith(_INDEX) else word for word in words]
    return [replace(command, run=tuple(words))]


def _of_release(command: Command, values: Values) -> Command:
    """An install of one of the packages: the release that the log is about, or one that fits it."""
    if "install" not in command.run or command.run[-1] not in _PACKAGES:
        return command
    package = command.run[-1]
    about, version = values.get("package", ""), values.get("version", "")
    if not re.fullmatch(r"\d+(?:\.\w+)+", version):
        return command
    if package == about:
        wanted = f"{package}=={version}"
    elif package == "causal-conv1d":
        wanted = conv_requirement(version) or package
    else:
        wanted = _mamba_requirement(version) or package
    return replace(command, run=(*command.run[:-1], wanted))


def _one_conv(commands: tuple[Command, ...], values: Values) -> tuple[Command, ...]:
    """One install of causal-conv1d, for the mamba-ssm of the log; of two, each undoes the other."""
    installs = [one for one in commands if one.run[-1:] and one.run[-1].startswith("causal-conv1d")]
    if not installs:
        return commands
    wanted = conv_requirement(values.get("mamba", ""))
    kept = installs[0]
    if wanted:
        note = f"for mamba-ssm {values['mamba']}"
        kept = replace(kept, run=(*kept.run[:-1], wanted), note=note)
    elif len(installs) > 1:
        kept = replace(
            kept,
            note="; instead of it ".join(
                f"{one.run[-1]} {one.note}" for one in installs if one.note
            ),
        )
    return tuple(kept if one is installs[0] else one for one in commands if one not in installs[1:])


def _of_one_tool(steps: list[Command], installer: str) -> list[Command]:
    """Where pip and uv are both told for the last install, the one that the log shows."""
    if not any(step.run[:1] == ("uv",) for step in steps[1:]) or len(steps) < 2:
        return steps
    by_pip, by_uv = steps[-2:]
    if by_pip.run[:3] != ("python", "-m", "pip") or by_pip.run[-1] != by_uv.run[-1]:
        return steps
    kept = replace(by_uv, env={**by_pip.env, **by_uv.env}) if installer == "uv" else by_pip
    return [*steps[:-2], kept]


def _triton_of_windows(fix: Fix, values: Values) -> Fix:
    """Triton has no wheel for Windows; a package of another name has, for each torch its own."""
    minor = ".".join(values.get("torch", "").split(".")[:2])
    triton = catalog.load("pins")["torch"].get(minor, {}).get("triton", "")
    requirement = "triton-windows"
    if triton:
        first, second = _numbers(triton)
        requirement += f">={triton},<{first}.{second + 1}"
    return replace(
        fix,
        text="There is no wheel named triton for Windows: install the package triton-windows of"
        " the version that fits your torch, or work in WSL2.",
        commands=(
            Command(("python", "-m", "pip", "show", "torch"), note="the version of torch"),
            Command(("python", "-m", "pip", "install", "--no-deps", requirement)),
        ),
        safe=True,
        safety="Adds one package; torch stays as it is.",
    )


def _mamba_requirement(conv: str) -> str:
    """The newest mamba-ssm that calls that causal-conv1d, where the newest of all does not."""
    row = releases.release("causal-conv1d", conv)
    known = releases.releases("mamba-ssm")
    if row is None or known[-1].conv_generation == row.conv_generation:
        return ""
    fits = [one.version for one in known if one.conv_generation == row.conv_generation]
    return f"mamba-ssm=={fits[-1]}" if fits else ""


def _of_toolkit(slug: str, steps: list[Command], values: Values, windows: bool) -> list[Command]:
    """CUDA_HOME: where conda put a toolkit, and never the folder that was proved wrong."""
    by_conda = any(
        step.run[:2] == ("conda", "install") and "cuda" in step.run[-1] for step in steps
    )
    home = ""
    if by_conda:
        home = "$CONDA_PREFIX/Library" if windows else "$CONDA_PREFIX"
    elif windows:
        home = _WINDOWS_TOOLKIT + (values.get("cuda") or catalog.PLACEHOLDERS["cuda"])
    elif slug == "cuda-home-wrong":
        cuda = values.get("cuda", "")
        home = f"/usr/local/cuda-{cuda}" if cuda else "/usr/local/cuda"
        if values.get("cuda_home", "").rstrip("/") == home:
            home = "/path/to/cuda"
    if not home:
        return steps
    note = "the folder above the bin that holds nvcc" if slug == "cuda-home-wrong" else ""
    return [
        replace(step, set={**step.set, "CUDA_HOME": home}, note=step.note or note)
        if "CUDA_HOME" in step.set
        else step
        for step in steps
    ]
