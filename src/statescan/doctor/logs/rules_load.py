# SPDX-License-Identifier: Apache-2.0
"""Rules of loading an extension module: symbols, strings, libraries, processors, shadowing.

Each looks at one line with its surroundings and says what it shows.
"""

from __future__ import annotations

import re
from dataclasses import replace

from statescan.doctor.logs import commands
from statescan.doctor.logs.evidence import Evidence, WheelSeen, major
from statescan.doctor.logs.opinion import HARD, INFERRED, SIGN, Opinion, Scene, rule
from statescan.doctor.logs.record import Hit
from statescan.doctor.symbols import generation
from statescan.doctor.symbols.generation import version as pair_of

PACKAGE_OF = {"selective_scan_cuda": "mamba-ssm", "causal_conv1d_cuda": "causal-conv1d"}
_EVERYWHERE = re.compile(
    r"14torchCheckFail|_ZN3c105ErrorC[12]E|7WarningC[12]E|9TypeErrorC|10IndexError"
)
"""Functions that every torch has: only the kind of string in their names differs."""


def package_of(module: str) -> str:
    """The distribution that an extension module comes with."""
    return PACKAGE_OF.get(module, "causal-conv1d" if "conv1d" in module else "mamba-ssm")


def outside_packages(path: str) -> bool:
    """Whether a module lies in a working tree and not where packages are installed."""
    return bool(re.match(r"/|[A-Za-z]:\\|\.{1,2}/", path)) and not re.search(
        r"site-packages|dist-packages|\.egg\b|/build/lib", path
    )


@rule
def undefined_symbol(scene: Scene) -> Opinion | None:
    """A module asks torch for a function that this torch does not have."""
    hit, evidence = scene.hit, scene.evidence
    path, symbol = hit.values["file"], hit.values["symbol"]
    file = re.split(r"[/\\]", path)[-1]
    package = package_of(file.partition(".")[0])
    values = {"package": package, "file": file}
    changed = torch_changed(evidence, hit.number)
    if outside_packages(path) and not evidence.has("editable"):
        folder = path.rpartition("/")[0]
        return Opinion(
            *("import-shadowed", HARD),
            "the file that was loaded lies in a working tree and not among the installed packages",
            ("torch-abi-mismatch",),
            {**values, "path": folder},
        )
    if not generation.is_torch_symbol(symbol):
        return _foreign_symbol(symbol, values)
    if changed is not None:
        return Opinion(
            *("torch-changed-by-pip", HARD),
            f"the extension is for torch {changed.values['needed']}, and the install brought"
            f" {changed.values['found']}",
            ("torch-abi-mismatch",),
            {**values, **changed.values},
            changed,
        )
    opinion = _by_wheel(scene, package, symbol, values) or _by_symbol(scene, symbol, values)
    return _with_cache(scene, package, opinion)


def _with_cache(scene: Scene, package: str, opinion: Opinion) -> Opinion:
    """The same, with the line in which pip took a wheel that it had built before."""
    for hit in reversed(scene.evidence.log.of("using-cached")):
        if hit.number < scene.hit.number and package.replace("-", "_") in hit.values["wheel"]:
            reason = f"{opinion.reason}; the wheel came out of pip's cache, built for another torch"
            return replace(opinion, reason=reason, proof=hit)
    return opinion


def _foreign_symbol(symbol: str, values: dict[str, str]) -> Opinion:
    """A symbol of another library: C++, CUDA, or Python."""
    if "cuda" in symbol.lower() or symbol.startswith(("__cuda", "cu")):
        return Opinion(
            "cudart-missing", INFERRED, "a function of the CUDA runtime is missing", values=values
        )
    if symbol.startswith(("Py", "_Py")):
        return Opinion(
            "wheel-tag-mismatch", INFERRED, "the module is for another Python", values=values
        )
    if symbol.startswith(("_ZSt", "_ZNSt", "_ZNKSt")) or "GLIBCXX" in symbol:
        return Opinion(
            "libstdcxx-too-old", INFERRED, "libstdc++ lacks that function", values=values
        )
    return Opinion(
        "torch-abi-mismatch", INFERRED, "a function is missing at load time", values=values
    )


def _by_wheel(scene: Scene, package: str, symbol: str, values: dict[str, str]) -> Opinion | None:
    """By how the package came here: built apart, taken from a cache, or a wheel with a name."""
    evidence = scene.evidence
    wheel = evidence.wheel_of(package)
    isolated = _isolated_build(scene, package)
    if isolated is not None and (wheel is None or not wheel.name.torch):
        return Opinion(
            *("build-isolation-wrong-torch", INFERRED),
            "the package was built in pip's own environment, with a torch that is not this one",
            ("torch-abi-mismatch",),
            values,
            isolated,
        )
    if wheel is None or not wheel.name.torch or not evidence.torch:
        return None
    return _by_fields(scene, wheel, symbol, values)


def _isolated_build(scene: Scene, package: str) -> Hit | None:
    """The line that shows that this package was built or fetched in an isolated environment."""
    for attempt in scene.evidence.log.attempts:
        if attempt.first > scene.hit.number:
            break
        made = any(
            hit.values.get("package", "").replace("_", "-") == package
            for hit in attempt.of("building-wheel", "created-wheel")
        )
        line = scene.evidence.isolated(attempt)
        if made and line is not None and not attempt.command.count("no-build-isolation"):
            return line
    return None


def _by_fields(
    scene: Scene, wheel: WheelSeen, symbol: str, values: dict[str, str]
) -> Opinion | None:
    """By the fields of a wheel's name against the installed torch."""
    evidence, name = scene.evidence, wheel.name
    if pair_of(name.torch) != pair_of(evidence.torch):
        return Opinion(
            *("torch-abi-mismatch", HARD),
            f"the wheel is for torch {name.torch} and torch {evidence.torch} is installed",
            ("cxx11-abi-mismatch",),
            {**values, "needed": name.torch, "found": evidence.torch},
        )
    abi = evidence.torch_abi
    if name.cxx11_abi is not None and abi is not None and name.cxx11_abi != abi:
        return Opinion(
            *("cxx11-abi-mismatch", HARD),
            "the wheel's torch version is right, and its C++11 ABI is the other one",
            ("torch-abi-mismatch",),
            {**values, "needed": str(abi).upper(), "found": str(name.cxx11_abi).upper()},
        )
    strings = generation.string_abi(symbol)
    if strings is not None and abi is None:
        return Opinion(
            *("cxx11-abi-mismatch", INFERRED),
            "the wheel is for this torch, and a function differs in the kind of its strings",
            ("torch-abi-mismatch",),
            {**values, "needed": str(not strings).upper(), "found": str(strings).upper()},
        )
    return None


def _by_symbol(scene: Scene, symbol: str, values: dict[str, str]) -> Opinion:
    """By the symbol alone, against what is known of torch."""
    evidence = scene.evidence
    strings = generation.string_abi(symbol)
    if strings is None:
        strings = _strings_of_module(evidence)
    built_for = generation.generation([symbol])
    abi = evidence.torch_abi
    if (
        built_for is not None
        and evidence.torch
        and not generation.in_range(built_for, evidence.torch)
    ):
        return Opinion(
            *("torch-abi-mismatch", HARD),
            f"such a function is asked for by extensions of {generation.range_text(built_for)},"
            f" and torch {evidence.torch} is installed",
            ("cxx11-abi-mismatch",),
            {**values, "found": evidence.torch},
        )
    if strings is not None and abi is not None:
        if strings != abi:
            return Opinion(
                *("cxx11-abi-mismatch", HARD),
                "the strings in the missing function's name are not of torch's C++11 ABI",
                ("torch-abi-mismatch",),
                {**values, "needed": str(abi).upper(), "found": str(strings).upper()},
            )
        return Opinion(
            *("torch-abi-mismatch", HARD),
            "the C++11 ABI is that of torch, so it is the version that differs",
            ("cxx11-abi-mismatch",),
            values,
        )
    usual = evidence.usual_torch_abi()
    if built_for is not None and built_for["last"] is not None and not evidence.torch:
        return Opinion(
            *("torch-abi-mismatch", INFERRED),
            f"only extensions of {generation.range_text(built_for)} ask for that function",
            ("cxx11-abi-mismatch",),
            values,
        )
    differs = usual != strings if usual is not None else _EVERYWHERE.search(symbol) is not None
    if strings is not None and differs:
        return Opinion(
            *("cxx11-abi-mismatch", INFERRED),
            "every torch has this function, and only the kind of its strings differs",
            ("torch-abi-mismatch",),
            {**values, "needed": str(not strings).upper(), "found": str(strings).upper()},
        )
    reason = "the installed torch does not have that function"
    if built_for is not None:
        reason = f"extensions of {generation.range_text(built_for)} ask for that function"
    return Opinion(*("torch-abi-mismatch", HARD if built_for else INFERRED), reason, values=values)


def _strings_of_module(evidence: Evidence) -> bool | None:
    """The string ABI of the symbols that nm or strings listed in the log."""
    kinds = [generation.string_abi(hit.values["symbol"]) for hit in evidence.log.of("nm-undefined")]
    return next((kind for kind in kinds if kind is not None), None)


def torch_changed(evidence: Evidence, before: int) -> Hit | None:
    """The line in which an install replaced a torch that nobody asked it to replace.

    The two versions are put into the hit's values: ``needed`` the old one, ``found`` the new one.
    """
    for attempt in evidence.log.attempts:
        if attempt.first > before or commands.asks_for_torch(attempt.command):
            continue
        if attempt.command and not commands.is_about_modules(attempt.command):
            continue
        old = new = ""
        line: Hit | None = None
        for hit in attempt.hits:
            if hit.id in ("uninstall", "uninstalled") and hit.values["package"] == "torch":
                old = hit.values["version"]
                line = line or hit
            elif hit.id == "uv-change" and hit.values["package"] == "torch":
                old = hit.values["version"] if hit.values["sign"] == "-" else old
                new = hit.values["version"] if hit.values["sign"] == "+" else new
                line = line or hit
            elif hit.id == "updated-conda":
                # A build for the CPU may have the same version.
                old, new, line = _conda_build(hit, "old"), _conda_build(hit, "new"), hit
            elif hit.id == "installed":
                match = re.search(r"(?:^|\s)torch-(\d[\w.+]*)", hit.values["list"])
                new = match[1] if match else new
        if line is not None and old and new and old != new:
            line.values.update(found=new, needed=old, torch=old)
            return line
    return None


def _conda_build(hit: Hit, which: str) -> str:
    """A version of conda's torch with what it was built for."""
    match = re.search(r"cpu|cuda\d+\.\d+", hit.values[f"{which}build"])
    kind = match[0].replace("cuda", "cu").replace(".", "") if match else ""
    return f"{hit.values[which]}+{kind}" if kind else hit.values[which]


@rule
def dll_load(scene: Scene) -> Opinion | None:
    """Windows could not load a module: a library is missing, or a function in one."""
    if scene.hit.values["module"] not in PACKAGE_OF and "cuda" not in scene.hit.values["module"]:
        return None
    values = {"package": package_of(scene.hit.values["module"])}
    if re.search(r"procedure|程序。?$|指定的程序", scene.hit.values["found"]):
        return Opinion(
            *("torch-abi-mismatch", INFERRED),
            "the module was built for another torch",
            values=values,
        )
    if re.search(r"Win32|%1", scene.hit.values["found"]):
        return Opinion(
            "wheel-wrong-cpu-arch", INFERRED, "the module is for another processor", values=values
        )
    return Opinion(
        *("cudart-missing", INFERRED),
        "a library that the module was linked with is not found",
        values=values,
    )


@rule
def nm_symbol(scene: Scene) -> Opinion | None:
    """What a module asks for, listed by nm: judged against the torch that the log shows."""
    symbol, evidence = scene.hit.values["symbol"], scene.evidence
    if not generation.is_torch_symbol(symbol):
        return None
    built_for = generation.generation([symbol])
    if (
        built_for is not None
        and evidence.torch
        and not generation.in_range(built_for, evidence.torch)
    ):
        return Opinion(
            *("torch-abi-mismatch", SIGN),
            f"the module asks for a function of {generation.range_text(built_for)}"
            f" and torch {evidence.torch} is installed",
            ("cxx11-abi-mismatch",),
        )
    strings = generation.string_abi(symbol)
    if strings is not None and evidence.torch_abi is not None and strings != evidence.torch_abi:
        return Opinion(
            *("cxx11-abi-mismatch", SIGN),
            "the module's strings are of the other C++11 ABI than torch's",
        )
    return None


@rule
def no_cudart(scene: Scene) -> Opinion | None:
    """A library of CUDA of a certain major is missing."""
    evidence, wanted = scene.evidence, major(scene.hit.values["found"])
    cuda = evidence.torch_cuda
    weight = SIGN if scene.hit.signature.kind == "hint" else HARD
    if cuda and cuda != "none" and major(cuda) != wanted:
        why = f"the module was built for CUDA {wanted} and torch is a build for CUDA {cuda}"
    else:
        why = f"the module was built for CUDA {wanted}, and that library is in no folder searched"
    return Opinion(
        *("cudart-missing", weight),
        why,
        values={
            "needed": wanted,
            "found": cuda,
            "cuda_major": major(cuda) if cuda != "none" else "",
        },
    )


@rule
def torch_library(scene: Scene) -> Opinion | None:
    """A library of torch itself: it is loaded by importing torch first."""
    if scene.evidence.macos:
        return None
    return Opinion(
        *("torch-abi-mismatch", SIGN),
        "the module was imported before torch, or torch has no such library",
    )


@rule
def elf_class(scene: Scene) -> Opinion | None:
    """A binary for another processor."""
    return Opinion("wheel-wrong-cpu-arch", HARD, "the file is machine code of another processor")
