# SPDX-License-Identifier: Apache-2.0
"""What a check is, what is asked of it, and how it makes findings.

No rule about machines is written here, and nothing is probed: checks see facts only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from statescan.doctor import catalog
from statescan.doctor.checks import known
from statescan.doctor.model import Command, Facts, Finding, Fix, Severity

STATESCAN, MAMBA, CONV = PACKAGES = ("statescan", "mamba-ssm", "causal-conv1d")
ORIGINALS = (MAMBA, CONV)
MODULES: Mapping[str, str] = {MAMBA: "mamba_ssm", CONV: "causal_conv1d"}
EXTENSIONS: Mapping[str, str] = {MAMBA: "selective_scan_cuda", CONV: "causal_conv1d_cuda"}
PREFIXES: Mapping[str, str] = {MAMBA: "MAMBA", CONV: "CAUSAL_CONV1D"}

AREAS: Mapping[str, str] = {
    "environment": "the system, and the variables that a build or an import reads",
    "python": "the interpreter and what installs packages for it",
    "packages": "torch and the packages beside it, whole and in their places",
    "own": "statescan itself, with a small computation",
    "abi": "the compiled modules against torch, libraries and this Python",
    "api": "the packages against each other",
    "gpu": "driver and GPUs against torch and the compiled modules",
    "triton": "what Triton needs when a program runs",
    "toolkit": "the CUDA toolkit that a build would use",
    "compiler": "the host compiler and the headers of a build",
    "resources": "memory, disk and caches of a build",
}
"""Areas of the checks, in the order of the report."""


@dataclass(frozen=True)
class Question:
    """Which packages are judged, on which facts, and what was found before.

    Attributes:
        facts: Of the machine.
        asked: The package that the user named, if any.
        found: Findings of the checks that ran before, to leave out what follows from them.
    """

    facts: Facts
    asked: str | None = None
    found: list[Finding] = field(default_factory=list)

    def installed(self, package: str) -> bool:
        """Whether the package is on disk, by its distribution or by its compiled module.

        A clone in the current folder is no install.
        """
        if package in self.facts.get("packages.installed", {}):
            return True
        if package not in ORIGINALS:
            return package == STATESCAN
        module = self.facts.get("extensions.modules", {}).get(EXTENSIONS[package], {})
        return bool(module.get("files"))

    def version(self, package: str) -> str:
        """The installed version; empty where there is none."""
        row = self.facts.get("packages.installed", {}).get(package) or {}
        return str(row.get("version") or "")

    def judges(self, package: str) -> bool:
        """Whether the question is about that package.

        mamba-ssm calls causal-conv1d where it is installed, so it is judged with it.
        """
        if self.asked in (None, package):
            return self.asked == package or self.installed(package)
        return self.asked == MAMBA and package == CONV and self.installed(CONV)

    @property
    def judged(self) -> tuple[str, ...]:
        """The packages that the question is about."""
        return tuple(package for package in PACKAGES if self.judges(package))

    @property
    def used(self) -> tuple[str, ...]:
        """The originals that are judged and installed."""
        return tuple(one for one in ORIGINALS if self.judges(one) and self.installed(one))

    @property
    def others(self) -> tuple[str, ...]:
        """CUDA modules of other projects, which are judged where nothing was named."""
        ours = catalog.load("symbols")["modules"]
        modules = self.facts.get("extensions.modules", {}) if self.asked is None else {}
        return tuple(name for name, row in modules.items() if name not in ours and row.get("files"))

    @property
    def built(self) -> tuple[str, ...]:
        """The originals of which an install is judged: named, and absent or to be built again."""
        broken = {
            package
            for finding in self.found
            if finding.problem.layer == "load" or finding.problem.slug == "ext-not-built"
            for package in finding.packages
        }
        return tuple(
            one
            for one in ORIGINALS
            if self.asked == one and (not self.installed(one) or one in broken)
        )

    @property
    def compiled(self) -> tuple[str, ...]:
        """Those of ``built`` that no published wheel spares the compilation."""
        return tuple(one for one in self.built if known.published(self.facts, one) is not True)

    def knows(self, *names: str) -> bool:
        """Whether all these facts were found out, also where the answer was that there is none."""
        facts = [self.facts.fact(name) for name in names]
        return all(fact is not None and not fact.problem for fact in facts)

    def has_found(self, *slugs: str) -> bool:
        """Whether one of these problems was found before."""
        return any(finding.problem.slug in slugs for finding in self.found)


Rule = Callable[[Question], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """A rule with the problems that it can find.

    Attributes:
        area: One of ``AREAS``.
        slugs: Of the problems.
        packages: Whose install or use they concern.
        about: One line: what is well when it finds nothing.
        rule: The function.
        unless: Problems from which these follow; when one was found, the rule does not run. With
            ":error" behind it only a finding of that severity counts.
        needs: Facts without which there is nothing to judge; one of them is enough.
        values: Facts that must have a value too: a child process gives them, or nobody looked.
        of_build: Whether it is about an install that is still to come.
        of_use: Whether it is about what is installed.
    """

    area: str
    slugs: tuple[str, ...]
    packages: tuple[str, ...]
    about: str
    rule: Rule
    unless: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    of_build: bool = False
    of_use: bool = False

    @property
    def name(self) -> str:
        """Its name in lists and documents."""
        return self.rule.__name__.replace("_", "-")

    @property
    def causes(self) -> set[str]:
        """Slugs of ``unless``."""
        return {one.partition(":")[0] for one in self.unless}

    def cause(self, found: Iterable[Finding]) -> Finding | None:
        """The finding from which everything follows that the rule could find; None without one."""
        for row in found:
            slug = row.problem.slug
            if slug in self.unless or f"{slug}:{row.severity.value}" in self.unless:
                return row
        return None

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of its problems."""
        return tuple(catalog.problem(slug).code for slug in self.slugs)


REGISTRY: list[Check] = []
"""Every check, in the order of their definition."""


def check(
    area: str,
    *slugs: str,
    about: str,
    packages: Sequence[str] = ORIGINALS,
    unless: Sequence[str] = (),
    needs: Sequence[str] = (),
    values: Sequence[str] = (),
    of_build: bool = False,
    of_use: bool = False,
) -> Callable[[Rule], Rule]:
    """Register a rule; the arguments are ``Check``'s."""

    def register(rule: Rule) -> Rule:
        rest = (tuple(unless), tuple(needs), tuple(values), of_build, of_use)
        REGISTRY.append(Check(area, slugs, tuple(packages), about, rule, *rest))
        return rule

    return register


def finding(
    question: Question,
    slug: str,
    summary: str,
    evidence: Sequence[str] = (),
    *,
    packages: Sequence[str] = (),
    severity: Severity | None = None,
    values: Mapping[str, str] | None = None,
    fix: Fix | None = None,
) -> Finding:
    """A finding whose fix is filled in for this machine.

    Args:
        question: What is asked.
        slug: Of the problem.
        summary: One line with the values seen.
        evidence: What was seen, a line each.
        packages: Whose; the first one's name goes into the fix.
        severity: When it is not the problem's own.
        values: Placeholders of the fix that the facts do not tell.
        fix: Instead of the problem's.
    """
    problem = catalog.problem(slug)
    known = {**machine_values(question.facts, packages), **(values or {})}
    return Finding(
        problem,
        severity or problem.severity,
        summary,
        tuple(evidence),
        catalog.fill(fix or problem.fix, known),
        tuple(packages),
    )


def machine_values(facts: Facts, packages: Sequence[str] = ()) -> dict[str, str]:
    """What the placeholders of fixes read on this machine; empty where it is not known."""
    originals = [package for package in packages if package in ORIGINALS]
    package = originals[0] if originals else ""
    version = str(facts.get("torch.version", "")).partition("+")[0]
    homes = [home for home in facts.get("toolkit.homes", []) if home.get("nvcc")]
    return {
        "package": package,
        "force": f"{PREFIXES[package]}_FORCE_BUILD" if package else "",
        "python": ".".join(str(facts.get("python.version", "")).split(".")[:2]),
        # A version between releases is on no index.
        "torch": version if version.replace(".", "").isdigit() else "",
        "cuda": str(facts.get("torch.cuda", "")),
        "libcuda": str(facts.get("driver.library", "")),
        "cuda_home": str(homes[0]["path"]) if len(homes) == 1 else "",
    }


def fact_line(facts: Facts, name: str, text: str) -> str:
    """A line of evidence with the place that the fact was read from."""
    fact = facts.fact(name)
    return f"{text} ({fact.source})" if fact is not None and fact.source else text


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for each problem and severity: one cause may break two packages.

    The first keeps its summary; the others' summaries become its evidence.
    """
    rows: dict[tuple[str, Severity], Finding] = {}
    for row in findings:
        key = (row.problem.slug, row.severity)
        first = rows.get(key)
        if first is None:
            rows[key] = row
            continue
        rows[key] = replace(
            first,
            evidence=(*first.evidence, row.summary),
            packages=tuple(dict.fromkeys((*first.packages, *row.packages))),
        )
    return list(rows.values())


def simple_fix(text: str, *commands: Command, safe: bool = True, safety: str = "") -> Fix:
    """A fix for one kind of machine, where the problem's own would be too general."""
    return Fix(text, commands, safe, safety)


def text_of(value: Any) -> str:
    """A value of a fact in a sentence."""
    return str(value) if value not in (None, "") else "unknown"
