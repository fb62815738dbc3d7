# SPDX-License-Identifier: Apache-2.0
"""Every problem of the catalogue is complete, can be typed in every shell, and has its page."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from statescan.doctor import catalog, shells
from statescan.doctor.model import Command, Fix, Problem, Severity
from statescan.doctor.render import problem as pages

ROOT = Path(__file__).resolve().parents[2]

ROOT_CAUSES = (
    *("success", "log-truncated", "nvcc-missing", "cuda-home-wrong", "nvcc-too-old"),
    *("nvcc-torch-cuda-mismatch", "nvcc-arch-unsupported", "cuda-headers-missing"),
    *("cuda-lib-link-missing", "gcc-too-old", "gcc-too-new-for-nvcc"),
    *("gcc11-cuda115-stdfunction", "host-compiler-missing", "python-headers-missing"),
    *("msvc-missing", "msvc-too-new-for-nvcc", "msvc-code-portability"),
    *("win-permission-toolchain", "locale-encoding", "torch-missing-in-build"),
    *("build-isolation-wrong-torch", "build-deps-missing", "torch-is-cpu-only"),
    *("python-version-unsupported", "wheel-download-failed", "wheel-tag-mismatch"),
    *("wheel-wrong-cpu-arch", "sdist-missing-sources", "build-out-of-memory"),
    *("build-slow-not-stuck", "disk-full", "cross-device-rename", "shell-redirect", "ninja-hack"),
    *("torch-abi-mismatch", "cxx11-abi-mismatch", "torch-changed-by-pip", "cudart-missing"),
    *("glibc-too-old", "libstdcxx-too-old", "ext-not-built", "wrong-extension-name"),
    *("import-shadowed", "cc1d-api-mismatch", "cc1d-too-old-for-mamba", "cc1d-missing"),
    *("transformers-api-removed", "triton-version", "triton-host-compiler"),
    *("triton-libcuda-missing", "gpu-arch-not-in-binary", "gpu-arch-not-in-torch"),
    *("driver-too-old", "rocm-isolation-cuda-torch", "rocm-hip-compile", "macos-unsupported"),
    *("mamba3-deps",),
)
"""What a log may be put down to; programs read these names, so none may change or go away."""

SWITCHES = re.compile(r"\w+_(FORCE_BUILD|SKIP_CUDA_BUILD|KEEP_CUDA_BUILD|FORCE_CXX11_ABI)")

every_problem = pytest.mark.parametrize(
    "problem", catalog.problems().values(), ids=lambda problem: problem.slug
)
every_shell = pytest.mark.parametrize("shell", shells.SHELLS)


def texts(problem: Problem) -> list[str]:
    """All that a problem says, with its placeholders."""
    fix = problem.fix
    said = [problem.title, problem.what, problem.why, fix.text, fix.safety]
    said += [*problem.example, *problem.looks_like, *problem.wrong_advice]
    return said + [word for command in fix.commands for word in words(command)]


def words(command: Command) -> list[str]:
    pairs = [*command.env.items(), *command.set.items(), *command.prepend.items()]
    return [*command.run, *command.unset, command.note, *(word for pair in pairs for word in pair)]


def test_every_root_cause_of_a_log_is_there():
    assert len(ROOT_CAUSES) == 57
    assert set(ROOT_CAUSES) - set(catalog.problems()) == set()


def test_codes_are_unique_and_each_in_a_known_area():
    codes = [problem.code for problem in catalog.problems().values()]
    assert len(set(codes)) == len(codes)
    assert {code for code in codes if not re.fullmatch(r"[A-Z]{2,3}\d{3}", code)} == set()
    assert {pages.area(code) for code in codes} <= set(pages.AREAS)
    listed = [row.code for rows in pages.by_area().values() for row in rows]
    assert sorted(listed) == sorted(codes)


def test_an_area_has_its_own_hundred():
    """TK1xx, CC2xx and so on: a number says the area even where the letters are lost."""
    hundreds: dict[str, set[str]] = {}
    for problem in catalog.problems().values():
        area = pages.area(problem.code)
        hundreds.setdefault(area, set()).add(problem.code[len(area)])
    assert {area for area, found in hundreds.items() if len(found) > 1} == set()


@every_problem
def test_no_field_is_empty(problem):
    assert problem.layer in catalog.LAYERS
    assert isinstance(problem.severity, Severity)
    assert [text for text in texts(problem) if text != text.strip("\n")] == []
    assert all([problem.title, problem.what, problem.why, problem.example])
    assert all([problem.fix.text, problem.fix.safety, problem.looks_like, problem.wrong_advice])
    assert all(problem.example) and all(problem.looks_like) and all(problem.wrong_advice)
    assert set(problem.systems) <= {"linux", "windows", "macos"}


@every_problem
def test_the_short_texts_are_one_line_each(problem):
    for text in (problem.title, problem.what, problem.why, problem.fix.text, problem.fix.safety):
        assert "\n" not in text
    assert len(problem.title) <= 70
    assert not problem.title.endswith(".")
    assert problem.fix.text.endswith(".")
    assert len(problem.fix.text) <= 240
    assert len(problem.example) <= 8


@every_problem
def test_every_placeholder_is_known(problem):
    used = {name for text in texts(problem) for name in re.findall(r"\{(\w+)\}", text)}
    assert used <= set(catalog.PLACEHOLDERS)


@every_problem
@every_shell
def test_the_fix_can_be_typed(problem, shell):
    commands = catalog.fill(problem.fix, pages.example_values(shell)).commands
    for command in commands:
        assert command.run or command.set or command.prepend or command.unset
        lines = shells.lines(command, shell)
        assert lines
        assert not any("\n" in line for line in lines)
        unfilled = re.sub(r"\$\{\w+:\+:\$\w+\}", "", " ".join(lines))
        assert not re.search(r"\{\w+\}", unfilled)
        if shell == "bash":
            for line in lines:
                shlex.split(line, comments=True)


@every_problem
def test_the_originals_switches_are_spelled_true(problem):
    """They compare with the word: any other value is ignored."""
    for command in catalog.fill(problem.fix, {}).commands:
        for name, value in {**command.env, **command.set}.items():
            if SWITCHES.fullmatch(name):
                assert value == "TRUE", name


@every_problem
def test_an_install_of_the_originals_cannot_replace_torch(problem):
    """Each goes without isolation and without dependencies, and never through pip's cache."""
    for command in catalog.fill(problem.fix, {}).commands:
        named = [word for word in command.run if re.match(r"(mamba-ssm|causal-conv1d)\b", word)]
        if "install" in command.run and named and "statescan" not in command.run:
            if problem.slug == "shell-redirect":
                assert any(re.search(r"[<>]", word) for word in named)
            else:
                flags = {"--no-build-isolation", "--no-deps"}
                assert flags <= set(command.run)
                assert {"--no-cache-dir", "--no-cache"} & set(command.run)


@every_problem
def test_cuda_home_is_one_folder(problem):
    for command in catalog.fill(problem.fix, {}).commands:
        assert ":" not in command.set.get("CUDA_HOME", "")


@every_problem
def test_a_fix_that_needs_root_or_replaces_torch_is_not_called_safe(problem):
    for command in problem.fix.commands:
        if command.run[:1] == ("sudo",) or "torch=={torch}" in command.run:
            assert not problem.fix.safe


@every_problem
def test_reports_are_of_known_projects(problem):
    for reference in problem.references:
        assert re.fullmatch(r"[\w.-]+(/[\w.-]+)?#\d+", reference)
        assert pages.report_url(reference).startswith("https://github.com/"), reference


@pytest.mark.parametrize("slug", ["macos-unsupported", "msvc-code-portability", "nvcc-missing"])
def test_what_cannot_be_cured_names_statescan(slug):
    assert "statescan" in catalog.problem(slug).fix.text


def test_a_problem_is_found_by_name_and_by_code_in_any_case():
    assert catalog.problem("nvcc-missing") is catalog.problem("tk101")
    with pytest.raises(KeyError):
        catalog.problem("TK999")


def test_values_of_a_machine_replace_the_examples():
    fix = Fix("{cuda} {cuda_major} {torch}", (Command(("x", "-c", "{cuda_label}")),))
    filled = catalog.fill(fix, {"cuda": "11.8", "torch": ""})
    assert filled.text == f"11.8 11 {catalog.PLACEHOLDERS['torch']}"
    assert filled.commands[0].run == ("x", "-c", "nvidia/label/cuda-11.8.0")
    assert catalog.fill(fix, {"cuda": "11.8", "cuda_major": "12"}).text.startswith("11.8 12")


def test_the_examples_agree_with_each_other():
    """The placeholder of a value that follows from the CUDA version is the one that follows."""
    fix = Fix("{cuda_major} {cuda_label} {torch_tag}")
    assert catalog.fill(fix, {}) == catalog.fill(fix, {"cuda": catalog.PLACEHOLDERS["cuda"]})


def test_switches_of_mamba_are_left_out_where_causal_conv1d_is_installed():
    fix = Fix("x", (Command(("pip", "{package}"), {"{force}": "TRUE", "MAMBA_X": "TRUE"}),))
    values = {"package": "causal-conv1d", "force": "CAUSAL_CONV1D_FORCE_BUILD"}
    assert catalog.fill(fix, values).commands[0].env == {"CAUSAL_CONV1D_FORCE_BUILD": "TRUE"}
    assert set(catalog.fill(fix, {}).commands[0].env) == {"MAMBA_FORCE_BUILD", "MAMBA_X"}


def test_every_problem_has_its_page_and_no_page_is_left_over(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(
        "generate_checks", ROOT / "scripts" / "generate_checks.py"
    )
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "generate_checks", generator)
    spec.loader.exec_module(generator)
    expected = generator.files()
    names = {f"docs/checks/{problem.code}.md" for problem in catalog.problems().values()}
    assert names == set(expected) - {"docs/checks/README.md", "docs/checks/advice.md"}
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/checks").iterdir()}
    assert there == set(expected)
    for path, text in expected.items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run scripts/docs"


@every_problem
def test_a_page_says_all_that_the_catalogue_says(problem):
    page = (ROOT / "docs" / "checks" / f"{problem.code}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {problem.code}: {problem.title}\n")
    for text in (problem.what, problem.why, *problem.looks_like, *problem.wrong_advice):
        assert text in page
    assert "\n".join(problem.example) in page
    assert f"`{problem.slug}`" in page
    for section in ("Why", "Example", "Fix", "What is not the cause", "What not to follow"):
        assert f"\n## {section}\n" in page
    blocks = set(re.findall(r"^```(\w+)$", page, re.MULTILINE)) - {"text"}
    if problem.systems == ("windows",):
        assert blocks <= {"powershell", "bat"}
    elif problem.systems:
        assert blocks == {"bash"}
    else:
        assert "bash" in blocks
