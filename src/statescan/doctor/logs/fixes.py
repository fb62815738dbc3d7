# SPDX-License-Identifier: Apache-2.0
"""The fix of a cause with the values of a log: the catalogue's, or a more exact one.

A value that the log does not show leaves the catalogue's command as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from statescan.doctor import catalog
from statescan.doctor.model import Command, Fix

Values = Mapping[str, str]

PIP = ("python", "-m", "pip")
_NO_ISOLATION = ("--no-build-isolation", "--no-cache-dir", "--no-deps")


def fix_for(slug: str, values: Values) -> Fix:
    """The fix of a problem in this log.

    Args:
        slug: The problem.
        values: Of ``values.collect``.
    """
    fix = catalog.fill(catalog.problem(slug).fix, values)
    refine = _REFINED.get(slug)
    return refine(fix, values) if refine is not None else fix


def install(package: str, *options: str, **env: str) -> Command:
    """An install that leaves the installed torch alone."""
    return Command((*PIP, "install", *_NO_ISOLATION, *options, package), env)


def _rebuild(values: Values, package: str = "") -> Command:
    name = package or values.get("package", "mamba-ssm")
    force = {"MAMBA_FORCE_BUILD": "TRUE", "MAMBA_KEEP_CUDA_BUILD": "TRUE"}
    if name.startswith("causal-conv1d"):
        force = {"CAUSAL_CONV1D_FORCE_BUILD": "TRUE"}
    return install(name, "--force-reinstall", **force)


def _pinned(values: Values) -> str:
    version = values.get("version", "")
    package = values.get("package", "mamba-ssm")
    return f"{package}=={version}" if version else package


def _shell_redirect(fix: Fix, values: Values) -> Fix:
    """The command with the requirement in quotes, and the file that the shell made."""
    requirement = values.get("found", "")
    if not re.fullmatch(r"[\w.-]+(?:\[[\w,.-]+\])?(?:[<>]=?=?\d[\w.]*)?", requirement):
        return fix
    file = values.get("file", "")
    steps = [Command((*PIP, "install", "--no-build-isolation", requirement))]
    text = f'Put the requirement in quotes: "{requirement}".'
    if ">" in requirement and re.fullmatch(r"=?\d[\w.]*", file):
        text = f'Put the requirement in quotes, "{requirement}", and delete the file {file}.'
        steps.append(Command(("rm", f"./{file}"), note="the output of the first install is in it"))
    return replace(fix, text=text, commands=tuple(steps))


def _download(fix: Fix, values: Values) -> Fix:
    """The wheel's address, then the file; or a build."""
    url, file = values.get("url", ""), values.get("file", "")
    if "win_amd64" in file or not url.startswith("https://") or not file.endswith(".whl"):
        # No release has a wheel for Windows, so there is nothing to fetch by other means.
        return replace(fix, commands=(_rebuild(values, _pinned(values)),))
    steps = (
        Command(("curl", "-L", "-O", "--retry", "5", url), note="or by any other means"),
        Command((*PIP, "install", "--no-deps", f"./{file}")),
        replace(_rebuild(values, _pinned(values)), note="or build it, without the download"),
    )
    return replace(fix, commands=steps)


def _torch_missing(fix: Fix, values: Values) -> Fix:
    """The release that was asked for, and uv's spelling where uv was used."""
    tools = ("setuptools", "wheel", "packaging", "ninja")
    if values.get("installer") == "uv":
        steps: tuple[Command, ...] = (
            Command(("uv", "pip", "install", "torch", *tools)),
            Command(("uv", "pip", "install", "--no-build-isolation", _pinned(values))),
        )
    else:
        steps = (
            Command(
                ("python", "-c", "import torch; print(torch.__version__)"),
                note="install torch if this fails",
            ),
            Command((*PIP, "install", *tools)),
            Command((*PIP, "install", "--no-build-isolation", _pinned(values))),
        )
    return replace(fix, commands=steps)


def _build_deps(fix: Fix, values: Values) -> Fix:
    missing = values.get("file", "")
    tools = dict.fromkeys(("setuptools", "wheel", "packaging", "ninja"))
    if re.fullmatch(r"einops|transformers|numpy|huggingface_hub|psutil|cmake", missing):
        steps: tuple[Command, ...] = (Command((*PIP, "install", missing)),)
        return replace(fix, text=f"Install {missing}, which --no-deps left out.", commands=steps)
    if values.get("installer") == "uv":
        steps = (
            Command(("uv", "pip", "install", *tools)),
            Command(("uv", "pip", "install", "--no-build-isolation", _pinned(values))),
        )
        return replace(fix, commands=steps)
    return fix


def _torch_changed(fix: Fix, values: Values) -> Fix:
    """Back to the torch that was there, named without an index where its build is not known."""
    if not values.get("torch"):
        return fix
    index: tuple[str, ...] = ()
    if values.get("cuda"):
        tag = "cu" + values["cuda"].replace(".", "")
        index = ("--index-url", f"https://download.pytorch.org/whl/{tag}")
    back = Command((*PIP, "install", "--force-reinstall", f"torch=={values['torch']}", *index))
    return replace(
        fix,
        text=f"Install torch {values['torch']} again, then both packages with --no-deps, so that"
        " pip leaves torch alone.",
        commands=(back, *fix.commands[1:]),
    )


def _shadowed(fix: Fix, values: Values) -> Fix:
    """The file in the working tree by its path."""
    folder, file = values.get("path", ""), values.get("file", "")
    if not folder or not file.endswith((".so", ".pyd")):
        return fix
    return replace(
        fix,
        text=f"Run from another folder than {folder}, or delete the old {file} in it.",
        commands=(
            *fix.commands,
            Command(("rm", f"{folder}/{file}"), note="the module of an old build"),
        ),
    )


def _other_extension(fix: Fix, values: Values) -> Fix:
    module = values.get("module") or values.get("file", "the module")
    return replace(
        fix,
        text=f"Build {module} from the project that needs it: in a clone of VMamba, its folder"
        " kernels/selective_scan. Installing mamba-ssm again does not help.",
    )


def _not_built(fix: Fix, values: Values) -> Fix:
    return replace(
        fix,
        commands=(
            Command(unset=("MAMBA_SKIP_CUDA_BUILD", "CAUSAL_CONV1D_SKIP_CUDA_BUILD")),
            _rebuild(values),
        ),
    )


def _api(fix: Fix, values: Values) -> Fix:
    """The causal-conv1d of the caller's generation."""
    wanted = {
        "1.0": "1.0.2",
        "1.1": "1.1.3.post1",
        "1.2 to 1.5.0": "1.4.0",
        "1.5.1 and newer": ">=1.5.1",
    }
    pin = wanted.get(values.get("needed", ""))
    if pin is None:
        return fix
    package = f"causal-conv1d{pin}" if pin.startswith(">") else f"causal-conv1d=={pin}"
    return replace(fix, commands=(_rebuild(values, package),))


def _libstdcxx(fix: Fix, values: Values) -> Fix:
    level = values.get("needed", "")
    return replace(fix, text=f"{fix.text} It must offer {level}.") if level else fix


def _arch(fix: Fix, values: Values) -> Fix:
    """Old architectures were dropped by nvcc 13, new ones are unknown to older nvcc."""
    sm = int(re.match(r"\d+", values.get("sm", "0") or "0")[0])  # type: ignore[index]
    if not sm:
        return fix
    if sm < 75:
        package = values.get("package", "mamba-ssm")
        least = ">=1.5.3" if package == "causal-conv1d" else ">=2.2.6"
        return replace(
            fix,
            text=f"Take {package}{least}, which leaves compute_{sm} out with CUDA 13, or use a"
            " CUDA 12 toolkit.",
            commands=(_rebuild(values, f"{package}{least}"),),
        )
    least = "11.8" if sm <= 90 else "12.8" if sm in (100, 101, 120) else "13.0"
    return replace(
        fix,
        text=f"Use an nvcc that knows compute_{sm}: CUDA {least} or newer, of torch's CUDA major.",
    )


_REFINED: Mapping[str, Callable[[Fix, Values], Fix]] = {
    "shell-redirect": _shell_redirect,
    "wheel-download-failed": _download,
    "torch-missing-in-build": _torch_missing,
    "build-deps-missing": _build_deps,
    "torch-changed-by-pip": _torch_changed,
    "import-shadowed": _shadowed,
    "wrong-extension-name": _other_extension,
    "ext-not-built": _not_built,
    "cc1d-api-mismatch": _api,
    "libstdcxx-too-old": _libstdcxx,
    "nvcc-arch-unsupported": _arch,
}
