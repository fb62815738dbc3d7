# SPDX-License-Identifier: Apache-2.0
"""Decides on a build before anything is started: release, GPUs, environment, and whether it may.

The checks are the doctor's own, asked about a machine where the package is still to be built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from statescan.doctor import checks, releases
from statescan.doctor.builder import environment, target
from statescan.doctor.builder.model import Setup
from statescan.doctor.builder.target import Targets
from statescan.doctor.checks import known
from statescan.doctor.checks.base import EXTENSIONS, MODULES, Question, finding, simple_fix
from statescan.doctor.model import Command, Fact, Facts, Finding, Severity
from statescan.doctor.releases import Release
from statescan.errors import ArgumentError

_LAYERS = (
    *("command", "build-environment", "toolkit", "toolkit-version", "host-compiler", "headers"),
    *("link", "resources"),
)
"""What a problem must belong to so that a build cannot succeed with it."""
_ALSO = (*("torch-import-fails", "no-cuda-machine", "msvc-code-portability", "rocm-hip-compile"),)
_DONE_BY_THE_BUILD = (
    *("build-deps-missing", "stale-wheel-cache", "arch-list-ignored", "locale-encoding"),
    *("build-out-of-memory", "variable-ignored"),
)
"""Problems that the build's own stages and variables take care of; of memory, all but errors."""


@dataclass(frozen=True)
class Request:
    """What the user asks for.

    Attributes:
        package: mamba-ssm or causal-conv1d.
        version: A release; empty for the newest that fits.
        archs: Words of ``--arch``.
    """

    package: str
    version: str = ""
    archs: tuple[str, ...] = ()


def prepare(request: Request, facts: Facts, folder: Path, executable: str) -> Setup:
    """Decide everything, and judge it.

    Args:
        request: What is wanted.
        facts: Of the machine that builds.
        folder: Of this build alone; nothing is written to it here.
        executable: The interpreter to build for.

    Raises:
        ArgumentError: The request names a release or a GPU that does not exist.
    """
    facts = environment.with_toolkit(facts)
    release = _release(request, facts)
    targets = target.choose(request.archs, facts)
    scripts = environment.scripts_folder(executable)
    built_with = facts.get("toolkit.build") or {}
    kinds = len(targets.names) or len(release.cubins(str(built_with.get("version") or "0")))
    decided = environment.decide(release.package, facts, str(folder / "nvcc"), scripts, kinds)
    found = _judged(release, targets, facts)
    return Setup(
        release,
        targets,
        decided,
        str(built_with["path"]) if built_with.get("nvcc") else "",
        folder,
        tuple(row for row in found if _stops(row)),
        tuple(row for row in found if row.severity is Severity.WARNING and _tells(row)),
    )


def _release(request: Request, facts: Facts) -> Release:
    if not request.version:
        return known.fitting(facts, request.package)
    found = releases.release(request.package, request.version)
    if found is None:
        listed = ", ".join(row.version for row in reversed(releases.releases(request.package)))
        raise ArgumentError(
            f"--version: {request.package} has no release {request.version}.\n"
            f"Releases: {listed}.\nName one of them, or leave --version out."
        )
    return found


def _judged(release: Release, targets: Targets, facts: Facts) -> list[Finding]:
    """Everything found about this build, the own rules first."""
    if facts.get("system.os") == "windows":
        # What a build would need there besides does not matter.
        return list(_system(Question(facts, release.package), release))
    own = _own_rules(release, targets, facts)
    said = {row.problem.slug for row in own}
    question = as_if_absent(release.package, targets, facts)
    found = checks.run(question, release.package)
    return [*own, *(row for row in found if row.problem.slug not in said)]


def as_if_absent(package: str, targets: Targets, facts: Facts) -> Facts:
    """The machine as the build finds it: without the package, and with the GPUs it is for.

    torch's ABI bit is left out, because with it a published wheel could count as a reason not to
    look at compilers at all.
    """
    rows = {fact.name: fact for fact in facts}
    for name, key in (
        ("packages.installed", package),
        ("extensions.modules", EXTENSIONS[package]),
        ("extensions.python", MODULES[package]),
    ):
        held = dict(facts.get(name, {}))
        held.pop(key, None)
        rows[name] = Fact(name, held, "without what is to be built")
    rows.pop("torch.cxx11_abi", None)
    if targets.codes:
        gpus = target.as_gpus(targets)
        rows["driver.gpus"] = Fact("driver.gpus", gpus, "what the build is for")
    return Facts(rows)


def _stops(row: Finding) -> bool:
    if row.severity is not Severity.ERROR:
        return False
    if row.problem.slug in _DONE_BY_THE_BUILD:
        # Too little memory for even one compiler is the one of them that nothing helps.
        return row.problem.slug == "build-out-of-memory"
    return row.problem.layer in _LAYERS or row.problem.slug in _ALSO


def _tells(row: Finding) -> bool:
    return row.problem.layer in _LAYERS and row.problem.slug not in _DONE_BY_THE_BUILD


def _own_rules(release: Release, targets: Targets, facts: Facts) -> list[Finding]:
    """What only a build by this program needs."""
    rules = (_rocm, _sources, _known_to_nvcc)
    question = Question(facts, release.package)
    return [row for rule in rules for row in rule(question, release, targets)]


def _system(question: Question, release: Release) -> Sequence[Finding]:
    fix = simple_fix(
        "Build inside WSL2, or use statescan, which needs no build.",
        Command(("wsl", "--install", "-d", "Ubuntu-22.04")),
        Command(("statescan", "plan", release.package), note="the same and other ways, in full"),
        safe=False,
        safety="WSL2 needs administrator rights, a restart and several gigabytes.",
    )
    summary = "`statescan build` runs on Linux only; on Windows the sources seldom compile."
    slug = "msvc-code-portability"
    return [finding(question, slug, summary, packages=[release.package], fix=fix)]


def _rocm(question: Question, release: Release, _: Targets) -> Sequence[Finding]:
    version = question.facts.get("torch.version", "")
    if not question.facts.get("torch.hip"):
        return ()
    summary = f"torch {version} is a ROCm build, and this build is for CUDA."
    return [finding(question, "rocm-hip-compile", summary, packages=[release.package])]


def _sources(question: Question, release: Release, _: Targets) -> Sequence[Finding]:
    if release.sdist_has_sources:
        return ()
    complete = [row for row in releases.releases(release.package) if row.sdist_has_sources]
    fix = simple_fix(
        f"Build {complete[-1].version}, or another release from {complete[0].version} on; this one "
        f"only from tag v{release.version} of its repository, which has the sources.",
        Command(("statescan", "build", release.package, "--version", complete[-1].version)),
        _from_tag(release),
        safety="A newer release may ask for another release of the other package.",
    )
    summary = f"The source package of {release.package} {release.version} has no CUDA sources."
    slug = "sdist-missing-sources"
    return [finding(question, slug, summary, packages=[release.package], fix=fix)]


def _from_tag(release: Release) -> Command:
    """The release itself, without this program's checks and GPU targets."""
    names = releases.variables(release.package)
    switches = {names[key]: "TRUE" for key in ("force", "keep") if key in names}
    address = f"git+https://github.com/{releases.HOSTS[release.package]}@v{release.version}"
    options = ("--no-build-isolation", "--no-cache-dir", "--no-deps")
    words = ("python", "-m", "pip", "install", *options, address)
    return Command(words, env=switches, note=f"or {release.version} from its tag, by pip")


def _known_to_nvcc(question: Question, release: Release, targets: Targets) -> Sequence[Finding]:
    nvcc = str((question.facts.get("toolkit.build") or {}).get("version") or "")
    if not nvcc:
        return ()
    low, high = releases.nvcc_archs(nvcc)
    unknown = [code for code in targets.codes if not low <= int(code.rstrip("af")) <= high]
    if not unknown:
        return ()
    wanted = ", ".join(f"sm_{code}" for code in unknown)
    older = int(unknown[0].rstrip("af")) < low
    fix = simple_fix(
        "Use a CUDA 12 toolkit with a torch for CUDA 12: later ones no longer know this GPU."
        if older
        else "Use a newer toolkit of torch's CUDA major version, or another GPU in --arch.",
        Command(("statescan", "plan", release.package)),
        safety="This only prints; nothing is changed.",
    )
    summary = f"nvcc {nvcc} makes code for sm_{low} to sm_{high}, and this build is for {wanted}."
    slug = "nvcc-arch-unsupported"
    return [finding(question, slug, summary, packages=[release.package], fix=fix)]
