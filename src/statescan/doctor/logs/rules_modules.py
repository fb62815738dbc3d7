# SPDX-License-Identifier: Apache-2.0
"""Rules of modules that are missing, hidden, None, or of another generation than their caller.

Each looks at one line with its surroundings and says what it shows.
"""

from __future__ import annotations

import re

from statescan.doctor.logs.evidence import Evidence
from statescan.doctor.logs.opinion import HARD, INFERRED, SIGN, Opinion, Scene, rule
from statescan.doctor.logs.rules_load import outside_packages, package_of

_CPP_FUNCTIONS_SINCE = (1, 5, 1)
_MAMBA_WANTS_CPP_FUNCTIONS_SINCE = (2, 2, 5)
_CLONE = re.compile(r"[/\\](?:mamba|causal[-_]conv1d)(?:-main|-[\d.]{1,12})?$")
"""The folder of a clone of one of the packages themselves, not of a project that brings a copy."""

GENERATIONS = {4: "1.0", 5: "1.1", 7: "1.2 to 1.5.0", 8: "1.5.1 and newer"}
"""Releases of causal-conv1d by the number of arguments of ``causal_conv1d_fwd``."""


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparing."""
    return tuple(int(part[:6]) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


@rule
def no_cuda_module(scene: Scene) -> Opinion | None:
    """An extension module is not there: not built, another project's, hidden, another CPU's."""
    hit, evidence = scene.hit, scene.evidence
    module = hit.values["module"]
    values = {"package": package_of(module), "file": module}
    if re.fullmatch(r"selective_scan_cuda_\w+", module):
        return Opinion(
            *("wrong-extension-name", HARD),
            "that module belongs to another project than mamba-ssm, which has no such one",
            ("ext-not-built",),
            values,
        )
    if module == "selective_scan_cuda" and _only_other_project(evidence):
        return Opinion(
            *("wrong-extension-name", INFERRED),
            "another project's scan is installed, and the code asks for mamba-ssm's",
            ("ext-not-built",),
            values,
        )
    other = _file_of_other_machine(scene, module)
    if other is not None:
        return other
    frames = [
        frame
        for frame in hit.frames
        if re.search(r"[/\\](?:mamba_ssm|causal_conv1d)[/\\]", frame.path)
    ]
    inside = re.search(r"[/\\](?:site|dist)-packages[/\\]", frames[-1].path) if frames else None
    folder = (
        re.split(r"[/\\](?:mamba_ssm|causal_conv1d)[/\\]", frames[-1].path)[0] if frames else ""
    )
    hidden = _is_installed(evidence, values["package"]) or _CLONE.search(folder)
    if frames and not inside and hidden:
        return Opinion(
            *("import-shadowed", INFERRED),
            "the package was imported from a working tree, which hides the installed one",
            ("ext-not-built",),
            {**values, "path": folder},
        )
    return _not_built(scene, values)


def _not_built(scene: Scene, values: dict[str, str]) -> Opinion:
    evidence = scene.evidence
    skipped = evidence.first("skip-build")
    if skipped is not None:
        return Opinion(
            *("ext-not-built", HARD),
            "the build was told to leave the CUDA module out",
            values=values,
            proof=None,
        )
    wheel = evidence.wheel_of(values["package"])
    if wheel is not None and wheel.file.endswith("-none-any.whl"):
        return Opinion(
            *("ext-not-built", HARD),
            "the wheel that was made fits any platform, so nothing was compiled",
            values=values,
        )
    return Opinion(
        "ext-not-built", HARD, "the package is there and its CUDA module is not", values=values
    )


def _only_other_project(evidence: Evidence) -> bool:
    """Whether VMamba's package is installed and mamba-ssm is not."""
    others = evidence.packages.get("selective-scan", [])
    return bool(others or evidence.has("vmamba")) and not evidence.packages.get("mamba-ssm")


def _is_installed(evidence: Evidence, package: str) -> bool:
    module = package.replace("-", "_")
    elsewhere = any(hit.values["module"] == module for hit in evidence.log.of("module-place"))
    known = evidence.packages.get(package) or evidence.wheel_of(package)
    return elsewhere or bool(known)


def _file_of_other_machine(scene: Scene, module: str) -> Opinion | None:
    """A file of the module is listed, and it is for another processor or Python."""
    evidence = scene.evidence
    wheel = evidence.wheel_of(package_of(module))
    wheel_platform = wheel.name.tags[0].rpartition("-")[2] if wheel is not None else ""
    if evidence.aarch64 and ("x86_64" in wheel_platform or _listed(evidence, module, "x86_64")):
        return Opinion(
            *("wheel-wrong-cpu-arch", HARD),
            "the module is for x86-64, and Python on this ARM machine does not even look at it",
            ("ext-not-built",),
            {"package": package_of(module)},
        )
    for hit in evidence.log.of("module-file"):
        same = hit.values["file"].startswith(module + ".")
        if same and evidence.python and hit.values["cp"] != evidence.python.replace(".", ""):
            return Opinion(
                *("wheel-tag-mismatch", INFERRED),
                f"the file of the module is for Python 3.{hit.values['cp'][1:]},"
                f" and Python {evidence.python} runs",
                ("ext-not-built",),
                {"package": package_of(module)},
                hit,
            )
    return None


def _listed(evidence: Evidence, module: str, platform: str) -> bool:
    return any(
        hit.values["file"].startswith(module + ".") and platform in hit.values["platform"]
        for hit in evidence.log.of("module-file")
    )


@rule
def scan_name(scene: Scene) -> Opinion | None:
    """A name that a failed import left undefined."""
    module = scene.hit.values["module"]
    if scene.evidence.has("vmamba") or re.search(r"cuda_\w+", module):
        return Opinion(
            *("wrong-extension-name", INFERRED),
            "the project's own scan module was not built",
            ("ext-not-built",),
        )
    return Opinion("ext-not-built", INFERRED, "an import of the scan failed before, without a word")


@rule
def conv_not_available(scene: Scene) -> Opinion | None:
    """The fused path asks for causal-conv1d, which is absent or does not load."""
    if scene.evidence.packages.get("causal-conv1d"):
        return Opinion(
            *("ext-not-built", INFERRED),
            "causal-conv1d is installed and its CUDA module cannot be imported",
            ("cc1d-missing",),
            {"package": "causal-conv1d"},
        )
    return Opinion(
        *("cc1d-missing", INFERRED),
        "mamba-ssm asks for causal-conv1d, and nothing shows that it is installed",
        ("ext-not-built",),
        {"package": "causal-conv1d"},
    )


@rule
def conv_missing(scene: Scene) -> Opinion | None:
    """causal-conv1d is not installed."""
    return Opinion(
        *("cc1d-missing", HARD),
        "causal-conv1d is not installed in this Python",
        values={"package": "causal-conv1d"},
    )


@rule
def package_missing(scene: Scene) -> Opinion | None:
    """mamba_ssm itself is not installed: what an earlier failure leaves behind."""
    return Opinion("ext-not-built", SIGN, "mamba-ssm is not installed in this Python")


@rule
def mamba_submodule(scene: Scene) -> Opinion | None:
    """A part of mamba_ssm is missing: a folder of that name, or another release."""
    frames = [frame for frame in scene.hit.frames if "mamba_ssm" in frame.path]
    if any(outside_packages(frame.path) for frame in frames):
        return Opinion(
            "import-shadowed", INFERRED, "a folder named mamba_ssm hides the installed package"
        )
    return Opinion("ext-not-built", SIGN, "this release of mamba-ssm has no such module")


@rule
def conv_import_name(scene: Scene) -> Opinion | None:
    """A name that causal_conv1d does not have."""
    if any(
        outside_packages(frame.path) and "causal_conv1d" in frame.path for frame in scene.hit.frames
    ):
        return Opinion("import-shadowed", INFERRED, "a folder hides the installed causal_conv1d")
    return Opinion(
        "cc1d-too-old-for-mamba",
        INFERRED,
        "this causal-conv1d lacks a name that its caller imports",
    )


@rule
def none_call(scene: Scene) -> Opinion | None:
    """A function of causal-conv1d is None: not installed, or too old for this mamba-ssm."""
    hit, evidence = scene.hit, scene.evidence
    if "found" not in hit.values and not _conv_called(scene):
        return None
    conv = evidence.version("causal-conv1d")
    mamba = evidence.version("mamba-ssm")
    values = {"package": "causal-conv1d", "found": conv}
    too_old = conv and numbers(conv) < _CPP_FUNCTIONS_SINCE
    if too_old and (not mamba or numbers(mamba) >= _MAMBA_WANTS_CPP_FUNCTIONS_SINCE):
        return Opinion(
            *("cc1d-too-old-for-mamba", HARD),
            f"causal-conv1d {conv} has no cpp_functions, so mamba-ssm sets its functions to None",
            ("cc1d-missing", "ext-not-built"),
            {**values, "needed": "1.5.1"},
        )
    if conv:
        return Opinion(
            *("ext-not-built", INFERRED),
            "causal-conv1d is installed, and importing its CUDA module fails without a word",
            ("cc1d-missing",),
            values,
        )
    if _conv_imports(evidence):
        return Opinion(
            *("cc1d-too-old-for-mamba", INFERRED),
            "causal_conv1d_cuda imports, so the Python entry that mamba-ssm asks for is missing",
            ("cc1d-missing",),
            {**values, "needed": "1.5.1"},
        )
    return Opinion(
        *("cc1d-missing", HARD if _not_listed(evidence) else INFERRED),
        "mamba-ssm sets these functions to None when it cannot import causal-conv1d",
        ("ext-not-built",),
        values,
    )


def _conv_called(scene: Scene) -> bool:
    return (
        bool({"conv-caller"} & scene.hit.nearby)
        or scene.hit.in_frames("ssd_combined", "causal_conv1d", "selective_scan_interface")
        or re.search(r"causal_conv1d", scene.hit.text) is not None
    )


def _conv_imports(evidence: Evidence) -> bool:
    """Whether an import of the CUDA module worked in the log."""
    return any(
        "print" in hit.text and hit.follow and re.match(r"\w{1,20}$", hit.follow[0])
        for hit in evidence.log.of("conv-import-ok")
    )


def _not_listed(evidence: Evidence) -> bool:
    """Whether a list of packages was shown without causal-conv1d."""
    missing = evidence.last("not-found-package")
    if missing is not None and "causal" in missing.values["package"]:
        return True
    return bool(evidence.packages.get("mamba-ssm"))


@rule
def none_scan(scene: Scene) -> Opinion | None:
    """The scan's module is None."""
    if scene.hit.in_frames("selective_scan", "mamba_ssm"):
        return Opinion(
            "ext-not-built", INFERRED, "mamba-ssm sets the module to None when it is missing"
        )
    return None


@rule
def conv_arguments(scene: Scene) -> Opinion | None:
    """pybind lists the arguments that the installed module takes and those that it was given."""
    takes, given = _counts(scene)
    values = {"package": "causal-conv1d"}
    why = "the module and its caller are of different generations"
    if takes in GENERATIONS:
        values["found"] = GENERATIONS[takes]
        why = f"the installed function takes {takes} arguments, as in {GENERATIONS[takes]}"
        if given in GENERATIONS and given != takes:
            values["needed"] = GENERATIONS[given]
            why += f", and its caller gives {given}, as for {GENERATIONS[given]}"
    return Opinion("cc1d-api-mismatch", HARD, why, ("torch-abi-mismatch",), values)


def _counts(scene: Scene) -> tuple[int, int]:
    """How many arguments the module takes, and how many it was given; 0 for unknown."""
    takes = given = 0
    for line in (scene.hit.text, *scene.hit.follow):
        if "(arg0" in line and not takes:
            takes = len(set(re.findall(r"arg\d{1,2}", line)))
        if "Invoked with" in line:
            given = _arguments(line.partition("Invoked with:")[2])
    for hit in scene.attempt.of("pybind-signature", "pybind-invoked"):
        if hit.id == "pybind-signature" and not takes:
            takes = len(set(re.findall(r"arg\d{1,2}", hit.values["list"])))
        if hit.id == "pybind-invoked" and not given:
            given = _arguments(hit.values["list"])
    return takes, given


def _arguments(text: str) -> int:
    """Commas outside brackets, and one."""
    depth = count = 0
    for sign in text.strip():
        depth += (sign in "([{<") - (sign in ")]}>")
        count += sign == "," and depth <= 0
    return count + 1 if text.strip() and "tensor(" not in text[-40:] else 0


@rule
def scan_arguments(scene: Scene) -> Opinion | None:
    """The scan's module and its Python part are of different releases."""
    if scene.hit.in_frames("selective_scan", "mamba_ssm"):
        return Opinion(
            *("import-shadowed", SIGN), "the Python part and the module are of different releases"
        )
    return None


@rule
def conv_unpack(scene: Scene) -> Opinion | None:
    """The newest causal-conv1d returns nothing where older ones returned the result."""
    if "conv-caller" in scene.hit.nearby or scene.hit.in_frames("causal_conv1d"):
        return Opinion(
            "cc1d-api-mismatch", INFERRED, "the two packages disagree about what is returned"
        )
    return None


@rule
def fast_path(scene: Scene) -> Opinion | None:
    """transformers tells that some functions are None and goes on slowly."""
    conv = scene.evidence.version("causal-conv1d")
    if conv and numbers(conv) < _CPP_FUNCTIONS_SINCE and scene.evidence.packages.get("mamba-ssm"):
        return Opinion(
            "cc1d-too-old-for-mamba", SIGN, "some functions are None, and causal-conv1d is old"
        )
    if scene.evidence.packages.get("mamba-ssm") and not conv:
        return Opinion(
            "cc1d-missing", SIGN, "some functions are None, and causal-conv1d is not listed"
        )
    return Opinion("ext-not-built", SIGN, "transformers found some of the fast functions missing")
