# SPDX-License-Identifier: Apache-2.0
"""The written files: read back by their formats, and with what they promise in them."""

import re
import shutil
import subprocess
import sys
import types

import pytest
import torch
import yaml
from packaging.requirements import Requirement

import statescan
from statescan.doctor.generate import FILES, WRITERS, smoke, steps
from statescan.doctor.generate.choices import PACKAGES, choose
from statescan.doctor.generate.matrix import ImpossibleTarget
from statescan.doctor.generate.target import Target, parse

TARGETS = (
    "cuda=12.8 torch=2.7 python=3.11",
    "cuda=11.8 torch=2.1 python=3.10",
    "cuda=13.0 torch=2.9 python=3.13 gpu=12.0",
    "cuda=12.6 torch=2.6 gpu=6.1",
    "cuda=12.8 torch=2.8 machine=aarch64",
    "torch=2.7 os=macos",
    "torch=2.7 os=windows",
    "torch=2.7 cuda=none",
)
ORIGINALS = ("mamba-ssm", "causal-conv1d")
GPU = "cuda=12.8 torch=2.7 python=3.11"


def write(kind, package="mamba-ssm", text=GPU):
    return WRITERS[kind](choose(kind, package, parse(text)))


def possible(kinds, packages=PACKAGES):
    """Every combination that is not refused."""
    found = []
    for kind in kinds:
        for package in packages:
            for text in TARGETS:
                try:
                    choose(kind, package, parse(text))
                except ImpossibleTarget:
                    continue
                found.append(pytest.param(kind, package, text, id=f"{kind}-{package}-{text}"))
    return found


def check_shell(script):
    """The text is a shell program."""
    bash = shutil.which("bash")
    assert bash
    done = subprocess.run([bash, "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, f"{script}\n{done.stderr}"


def instructions(dockerfile):
    """Instructions with their arguments, continued lines joined, here-documents as one."""
    found, lines = [], iter(dockerfile.splitlines())
    for line in lines:
        if not line or line.startswith("#"):
            continue
        while line.endswith("\\"):
            line = line[:-1].rstrip() + " " + next(lines).strip()
        name, _, rest = line.partition(" ")
        mark = re.search(r"<<'(\w+)'", rest)
        body = []
        if mark:
            body = list(iter(lambda: next(lines), mark[1]))
        found.append((name, rest, "\n".join(body)))
    return found


def stages(dockerfile):
    """Instructions of each stage."""
    found = []
    for row in instructions(dockerfile):
        if row[0] == "FROM":
            found.append([])
        found[-1].append(row)
    return found


def jobs(text):
    return yaml.safe_load(text)["jobs"]


@pytest.mark.parametrize(("kind", "package", "text"), possible(WRITERS))
def test_same_target_same_bytes(kind, package, text):
    one = write(kind, package, text)
    assert write(kind, package, text) == one
    # What says how the file was made makes it again.
    made = re.search(r"--target '([^']+)'|--target (\S+)$", one, re.M)
    assert write(kind, package, made[1] or made[2]) == one


@pytest.mark.parametrize(("kind", "package", "text"), possible(WRITERS))
def test_plain_text(kind, package, text):
    content = write(kind, package, text)
    assert content.endswith("\n")
    assert not content.endswith("\n\n")
    assert content.isascii()
    assert "\t" not in content
    assert all(line == line.rstrip() for line in content.splitlines())
    comments = [line for line in content.splitlines() if re.match(r"\s*# ", line)]
    # A command to copy may be longer than a comment: a broken one is worse.
    assert all(len(line) <= 88 or re.match(r"#   [\w=]+ ", line) for line in comments)
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b|\b\d\d:\d\d\b", content)


@pytest.mark.parametrize(("kind", "package", "text"), possible(WRITERS))
def test_every_choice_is_a_comment(kind, package, text):
    content = " ".join(line.lstrip("# ") for line in write(kind, package, text).splitlines())
    for row in choose(kind, package, parse(text)).rows:
        assert f"{row.name} {row.value}: {row.why}." in content


@pytest.mark.parametrize(("kind", "package", "text"), possible(WRITERS))
def test_what_is_to_be_typed_is_shell(kind, package, text):
    typed = [line[4:] for line in write(kind, package, text).splitlines()]
    commands = [line for line in typed if re.match(r"(export|pip|docker|conda|MAX_JOBS=)", line)]
    assert commands or kind == "ci"
    check_shell("\n".join(commands))


@pytest.mark.parametrize(("kind", "package", "text"), possible(("lock", "requirements")))
def test_lines_for_pip(kind, package, text):
    found = choose(kind, package, parse(text))
    lines = [line for line in write(kind, package, text).splitlines() if line[:1] not in ("", "#")]
    options = [line for line in lines if line.startswith("--")]
    assert options == ([f"--extra-index-url {found.index}"] if found.index else [])
    parsed = [Requirement(line) for line in lines if not line.startswith("--")]
    assert len({row.name for row in parsed}) == len(parsed)
    for row in parsed:
        (only,) = row.specifier
        assert only.operator == "=="
        assert "*" not in only.version
    names = {row.name for row in parsed}
    assert "torch" in names
    assert ("statescan" in names) == (package == "statescan")
    # They cannot be installed in one step with torch; a lock holds their versions all the same.
    assert set(ORIGINALS) & names == (
        {source.package for source in found.sources} if kind == "lock" else set()
    )


@pytest.mark.parametrize("kind", ["lock", "requirements", "conda"])
def test_the_originals_come_in_a_second_step(kind):
    content = write(kind)
    typed = [line[4:] for line in content.splitlines() if "pip install --no-build" in line]
    assert [line.split()[-1].split("==")[0] for line in typed] == ["causal-conv1d", "mamba-ssm"]
    assert "CAUSAL_CONV1D_FORCE_BUILD=TRUE" in typed[0]
    assert "MAMBA_FORCE_BUILD=TRUE MAMBA_KEEP_CUDA_BUILD=TRUE" in typed[1]
    assert all("MAX_JOBS=2" in line and "--no-deps" in line for line in typed)
    prose = " ".join(line.lstrip("# ") for line in content.splitlines())
    assert "pip's isolated environment they are built against another torch" in prose
    # Everything that the second step needs is there before it.
    assert content.index("setuptools==") < content.index("Second step")
    assert "Second step" not in write(kind, "statescan")


def test_flags_with_blanks_are_quoted():
    content = write("requirements", text="cuda=12.6 torch=2.6 gpu=6.1")
    assert "NVCC_APPEND_FLAGS='-gencode arch=compute_61,code=sm_61" in content


def test_lock_of_a_machine():
    there = Target(
        origin="facts",
        os="linux",
        machine="x86_64",
        python="3.11",
        torch="2.7.1",
        cuda="12.8",
        installed={
            "numpy": "2.1.0",
            "torch": "2.7.1+cu128",
            "Jinja2": "3.1.4",
            "pip": "24.0",
            "statescan": "0.0.1",
            "mine": None,
        },
    )
    content = WRITERS["lock"](choose("lock", "statescan", there))
    lines = [line for line in content.splitlines() if line[:1] not in ("", "#", "-")]
    assert "numpy==2.1.0" in lines
    assert "Jinja2==3.1.4" in lines
    assert lines.count("torch==2.7.1+cu128") == 1
    assert not any(line.startswith(("pip==", "mine")) for line in lines)
    assert sum(line.startswith("statescan==") for line in lines) == 1
    prose = " ".join(line.lstrip("# ") for line in content.splitlines())
    assert "mine is installed from a folder or a URL" in prose
    assert "Every distribution of the environment has a line" in prose


def test_lock_replaces_a_pair_that_does_not_fit():
    """causal-conv1d 1.4 under mamba-ssm 2.2.5 is silently unused."""
    there = Target(
        origin="facts",
        os="linux",
        machine="x86_64",
        python="3.11",
        torch="2.7.1",
        cuda="12.8",
        installed={"mamba-ssm": "2.2.5", "causal-conv1d": "1.4.0"},
    )
    content = WRITERS["lock"](choose("lock", "mamba-ssm", there))
    assert "1.4.0" not in content
    assert content.count("\ncausal-conv1d==") == content.count("\nmamba-ssm==") == 1


def test_no_hash_is_invented():
    content = write("lock")
    assert "sha256" not in content
    assert "--hash" not in content
    assert "No hashes: " in content


@pytest.mark.parametrize(("kind", "package", "text"), possible(("conda",)))
def test_conda(kind, package, text):
    found = choose(kind, package, parse(text))
    document = yaml.safe_load(write(kind, package, text))
    assert list(document) == ["name", "channels", "dependencies"]
    assert document["name"] == found.name
    *conda, pip = document["dependencies"]
    assert conda[:2] == [f"python={found.target.python}", "pip"]
    assert found.torch in pip["pip"]
    assert not any(line.startswith(ORIGINALS) for line in pip["pip"])
    assert document["channels"][-2:] == ["conda-forge", "nodefaults"]
    if found.sources:
        label = document["channels"][0]
        assert label.startswith(f"nvidia/label/cuda-{found.target.cuda}.")
        system = "aarch64" if found.target.machine == "aarch64" else "64"
        assert conda[2:] == [
            f"{label}::cuda-toolkit",
            f"gxx_linux-{system}={found.build.gcc}",
        ]
    else:
        assert len(conda) == 2


@pytest.mark.parametrize(("kind", "package", "text"), possible(("dockerfile",)))
def test_dockerfile_stages(kind, package, text):
    found = choose(kind, package, parse(text))
    build, final = stages(write(kind, package, text))
    assert build[0][1] == f"{found.images.build} AS build"
    assert final[0][1] == f"{found.images.final} AS final"
    names = [name for name, _, _ in final]
    copied = [rest for name, rest, _ in final if name == "COPY" and rest.startswith("--from")]
    assert "--from=build /opt/venv /opt/venv" in copied
    # Nothing is installed in the final stage, so no compiler can come with it.
    ran = [rest for name, rest, _ in final if name == "RUN"]
    assert not any("apt-get" in line or "pip install" in line for line in ran)
    assert any("for compiler in gcc cc nvcc" in line for line in ran)
    assert "-devel-" not in final[0][1]
    # From USER on everything runs, and is proved, without root.
    user = names.index("USER")
    assert final[user][1] == "10001:10001"
    assert names.count("USER") == 1
    proof = next(i for i, row in enumerate(final) if row[1].startswith("python -c"))
    assert user < proof < names.index("CMD")
    assert all(row[0] in ("FROM", "ENV", "RUN", "COPY", "USER", "WORKDIR", "CMD") for row in final)


@pytest.mark.parametrize(("kind", "package", "text"), possible(("dockerfile",)))
def test_dockerfile_lines_are_shell_and_python(kind, package, text):
    for name, rest, body in instructions(write(kind, package, text)):
        if name == "RUN":
            check_shell(rest)
        if body:
            assert "/home/app/smoke.py" in rest
            compile(body, "smoke.py", "exec")
            # Docker would replace a variable's name even in a here-document.
            assert "$" not in body


@pytest.mark.parametrize("package", ORIGINALS)
def test_dockerfile_builds_the_originals(package):
    found = choose("dockerfile", package, parse(GPU))
    build, final = stages(write("dockerfile", package))
    ran = [rest for name, rest, _ in build if name == "RUN"]
    order = [
        *("apt-get update", "uv venv", f"--index-url {found.index} {found.torch}"),
        *("setuptools==", *(f"{source.package}=={source.version}" for source in found.sources)),
    ]
    places = [next(i for i, line in enumerate(ran) if part in line) for part in order]
    assert places == sorted(places)
    assert ("ARG", "MAX_JOBS=2", "") in build
    built = [line for line in ran if "FORCE_BUILD=TRUE" in line]
    assert len(built) == len(found.sources)
    assert all("--no-build-isolation --no-deps" in line for line in built)
    # A value on the line itself would win over --build-arg.
    assert not any("MAX_JOBS" in line for line in built)
    variables = next(rest for name, rest, _ in build if rest.startswith("CC="))
    assert f"CC=gcc-{found.build.gcc} CXX=g++-{found.build.gcc}" in variables
    assert ("COPY", "--from=build /opt/python /opt/python", "") in final


def test_dockerfile_says_what_triton_lacks():
    assert "Triton compiles a small C file" in write("dockerfile", "mamba-ssm")
    assert "Triton" not in write("dockerfile", "causal-conv1d")


def test_dockerfile_of_statescan():
    build, final = stages(write("dockerfile", "statescan"))
    assert [row[1] for row in build if row[0] == "RUN"][-1].startswith("pip install statescan==")
    assert final[-1] == ("CMD", '["python", "/home/app/smoke.py"]', "")
    gpu = [row for row in final if "NVIDIA_VISIBLE_DEVICES=all" in row[1]]
    assert len(gpu) == 1
    cpu = stages(write("dockerfile", "statescan", "torch=2.7 cuda=none"))[1]
    assert not any("NVIDIA" in row[1] for row in cpu)


@pytest.mark.parametrize(("kind", "package", "text"), possible(("compose",)))
def test_compose(kind, package, text):
    found = choose(kind, package, parse(text))
    document = yaml.safe_load(write(kind, package, text))
    assert document["name"] == found.name
    (service,) = document["services"].values()
    assert service["image"] == found.name
    assert service["build"] == {"context": ".", "dockerfile": FILES["dockerfile"]}
    assert list(document["volumes"]) == ["cache"]
    reserved = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    if found.gpu:
        assert service["deploy"] == {"resources": {"reservations": {"devices": [reserved]}}}
    else:
        assert "deploy" not in service


@pytest.mark.parametrize(("kind", "package", "text"), possible(("ci",)))
def test_workflow(kind, package, text):
    content = write(kind, package, text)
    document = yaml.safe_load(content)
    # YAML 1.1 reads the key `on` as true; GitHub does not.
    assert set(document) == {"name", True, "permissions", "defaults", "jobs"}
    assert document["permissions"] == {"contents": "read"}
    # Windows runners would take PowerShell, which has no here-documents.
    assert document["defaults"] == {"run": {"shell": "bash"}}
    for job in document["jobs"].values():
        assert job["timeout-minutes"] <= 360
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
            else:
                check_shell(step["run"])
                program = re.search(r"<<'PY'\n(.*\n)PY\n$", step["run"], re.S)
                if program:
                    compile(program[1], step["name"], "exec")


def test_workflow_of_statescan_proves_import_and_smoke():
    (job,) = jobs(write("ci", "statescan", "torch=2.7 python=3.11 cuda=none")).values()
    ran = [step["run"].strip() for step in job["steps"] if "run" in step]
    assert ran[:-1] == [
        "pip install --index-url https://download.pytorch.org/whl/cpu torch==2.7.1+cpu",
        f"pip install {choose('ci', 'statescan', parse('torch=2.7')).extras[0]}",
        "python -c 'import statescan, torch; print(statescan.__version__, torch.__version__)'",
    ]
    assert ran[-1].startswith("python - <<'PY'\nimport torch, statescan\n")
    assert job["steps"][0]["with"]["python-version"] == "3.11"


@pytest.mark.parametrize(
    ("text", "runner"),
    [
        ("torch=2.7 cuda=none", "ubuntu-24.04"),
        ("torch=2.7 cuda=none machine=arm64", "ubuntu-24.04-arm"),
        ("torch=2.7 os=macos", "macos-14"),
    ],
)
def test_workflow_runs_on_the_target(text, runner):
    (job,) = jobs(write("ci", "statescan", text)).values()
    assert job["runs-on"] == runner


@pytest.mark.parametrize("package", ORIGINALS)
def test_workflow_of_the_originals(package):
    found = choose("ci", package, parse(GPU))
    build, gpu = jobs(write("ci", package)).values()
    assert build["container"] == found.images.build
    ran = "\n".join(step.get("run", "") for step in build["steps"])
    assert "import torch, causal_conv1d_cuda" in ran
    assert "assert found == 8" in ran
    for source in found.sources:
        assert "pip wheel --wheel-dir wheels --no-build-isolation --no-deps" in ran
        assert f"{source.package}=={source.version}" in ran
    # What needs a GPU waits for a runner that has one.
    assert gpu["if"] == "vars.GPU_RUNNER == 'true'"
    assert gpu["needs"] == "build"
    assert gpu["container"] == {"image": found.images.final, "options": "--gpus all"}
    smoke = gpu["steps"][-1]["run"]
    assert "causal_conv1d_fn(x, weight, bias)" in smoke
    assert ("selective_scan_fn(u, delta, A, B, C)" in smoke) == (package == "mamba-ssm")
    assert 'device="cuda"' not in ran


def test_the_smoke_test_of_statescan_passes_and_can_fail(capsys, monkeypatch):
    """Run as written, on the statescan of this environment."""
    program = smoke.kernels(choose("ci", "statescan", parse("torch=2.7")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    exec(program, {})
    assert "agree with the reference on cpu" in capsys.readouterr().out
    real = statescan.selective_scan
    monkeypatch.setattr(statescan, "selective_scan", lambda *args: real(*args) * 1.01)
    with pytest.raises(AssertionError, match="not close"):
        exec(program, {})


def test_the_import_of_statescan_passes(capsys):
    exec(smoke.imports(choose("ci", "statescan", parse("torch=2.7"))), {})
    assert capsys.readouterr().out.split() == [statescan.__version__, torch.__version__]


@pytest.mark.parametrize(("count", "fits"), [(8, True), (7, False)])
def test_the_arguments_are_counted(monkeypatch, count, fits):
    """pybind11 writes one argN for each argument into the docstring."""
    names = ", ".join(f"arg{number}: torch.Tensor" for number in range(count))
    function = types.SimpleNamespace(__doc__=f"causal_conv1d_fwd({names}) -> None\n\nforward")
    module = types.SimpleNamespace(causal_conv1d_fwd=function)
    monkeypatch.setitem(sys.modules, "causal_conv1d_cuda", module)
    program = smoke.arguments(choose("ci", "mamba-ssm", parse(GPU)))
    if fits:
        exec(program, {})
    else:
        with pytest.raises(AssertionError, match="7 arguments instead of 8"):
            exec(program, {})


def test_steps_name_the_file():
    found = choose("requirements", "mamba-ssm", parse(GPU))
    (use,) = steps.use("requirements", found, "my requirements.txt")
    assert use.run == ("pip", "install", "-r", "my requirements.txt")
    assert [command.run[-1] for command in steps.after("requirements", found)[1:]] == [
        f"{source.package}=={source.version}" for source in found.sources
    ]
    assert steps.after("dockerfile", found) == []
    assert steps.after("requirements", choose("requirements", "statescan", parse(GPU))) == []


def test_jobs_of_this_machine_reach_the_files():
    there = Target(origin="facts", os="linux", machine="x86_64", memory_gb=64.0, cores=32)
    for kind in ("requirements", "conda", "dockerfile"):
        assert "MAX_JOBS=10" in WRITERS[kind](choose(kind, "mamba-ssm", there))
