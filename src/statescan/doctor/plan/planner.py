# SPDX-License-Identifier: Apache-2.0
"""From facts and findings to a plan: which ways lead to a package here, and in which order.

How each way looks is in ``ways``; machines are not looked at, only their facts.
"""

from __future__ import annotations

from collections.abc import Sequence

from statescan.doctor import releases
from statescan.doctor.builder import environment
from statescan.doctor.checks.base import MODULES
from statescan.doctor.generate import pairs
from statescan.doctor.model import Facts, Finding, Severity
from statescan.doctor.plan import source, ways
from statescan.doctor.plan.model import Plan, Step, Way
from statescan.errors import ArgumentError

PACKAGES = ("statescan", *releases.PACKAGES)


def make(package: str, facts: Facts, findings: Sequence[Finding] = ()) -> Plan:
    """The ways to ``package`` on the machine of these facts, the safest first.

    Args:
        package: statescan, mamba-ssm or causal-conv1d.
        facts: Of this or another machine.
        findings: Of the checks for that package; the fixes of errors become steps.

    Raises:
        ArgumentError: another package.
    """
    if package not in PACKAGES:
        raise ArgumentError(
            f"plan: {package!r} is no package that this plans for.\n"
            f"It must be one of {', '.join(PACKAGES)}.\nName one of them."
        )
    if package == "statescan":
        return _for_statescan(facts, findings)
    chosen = _chosen(package, environment.with_toolkit(facts))
    every = [
        ways.by_statescan(package, facts),
        ways.by_wheel(package, chosen, facts),
        source.by_source(package, chosen, facts, findings),
        ways.by_container(package, facts),
        ways.by_wsl2(package, facts),
    ]
    leading = tuple(way for way in every if not way.closed)
    version = next((one.version for one in chosen if one.package == package), "")
    return Plan(
        package,
        version,
        _works(package, facts, findings) or _summary(package, version, leading),
        leading,
        tuple(way for way in every if way.closed),
    )


def _for_statescan(facts: Facts, findings: Sequence[Finding]) -> Plan:
    way = ways.by_statescan("statescan", facts)
    errors = [row for row in findings if row.severity is Severity.ERROR]
    fixes = tuple(
        Step(row.fix.text, row.fix.commands, row.fix.safe, row.fix.safety) for row in errors
    )
    way = Way(way.name, way.title, way.why, (*fixes, *way.steps), way.closed)
    summary = "statescan installs here without a compiler and without a CUDA toolkit."
    if way.closed:
        return Plan("statescan", "", way.closed, (), (way,))
    return Plan("statescan", "", summary, (way,), ())


def _chosen(package: str, facts: Facts) -> tuple[pairs.Chosen, ...]:
    """The releases to install together, for this torch, Python, toolkit and GPUs."""
    torch = str(facts.get("torch.version", "")).partition("+")[0]
    python = ".".join(str(facts.get("python.version", "")).split(".")[:2])
    cuda = source.build_cuda(facts)
    if not (torch and python and cuda):
        return ()
    return pairs.choose(package, torch, python, cuda, source.gpu_codes(facts))


def _works(package: str, facts: Facts, findings: Sequence[Finding]) -> str:
    """That the package is here and nothing is wrong with it; empty where it is otherwise."""
    installed = facts.get("packages.installed", {}).get(package)
    module = facts.get("extensions.python", {}).get(MODULES[package]) or {}
    usable = module.get("usable") or {}
    if not installed or not usable or any(reason != "ok" for reason in usable.values()):
        return ""
    if any(row.severity is Severity.ERROR for row in findings):
        return ""
    version = installed.get("version")
    return f"{package} {version} works here already; these are the ways to install it anew."


def _summary(package: str, version: str, leading: Sequence[Way]) -> str:
    if not leading:
        return f"No way leads to {package} on this machine."
    named = f"{package} {version}".strip()
    names = [way.name for way in leading]
    if names[0] == "statescan" and len(names) == 1:
        return f"{package} itself cannot be had here; statescan serves its names."
    if "wheel" in names:
        return f"A published wheel of {named} may fit; statescan serves the same names at once."
    if "source" in names:
        return f"{named} must be built from source here; statescan serves the same names at once."
    where = "in a container or under WSL2" if "wsl2" in names else "in a container"
    return f"{named} runs {where} only; statescan serves the same names at once."
