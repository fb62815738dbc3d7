# SPDX-License-Identifier: Apache-2.0
"""What a log shows about the machine and its packages: versions, ABI, platform, GPU, isolation.

Observations with the lines they were seen at; which of them matters is for the rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from statescan.doctor.logs import commands
from statescan.doctor.logs.record import Attempt, Hit, Log
from statescan.doctor.symbols.binary import WrongKindError
from statescan.doctor.symbols.generation import version as pair_of
from statescan.doctor.symbols.names import WheelName, wheel_name

_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)?[\w.+]*")
_PRINTED = re.compile(
    r"(?P<package>torch|mamba_ssm|causal_conv1d|triton|transformers)\.__version__"
    r"|(?P<cuda>torch\.version\.cuda)|(?P<abi>_GLIBCXX_USE_CXX11_ABI|compiled_with_cxx11_abi)"
    r"|(?P<other>is_available\(\)|version\.hip|get_device_\w+\(\)|sys\.version\w*)"
)
_LISTED = re.compile(r"([A-Za-z][\w.-]*?)-(\d[\w.+!]*)(?=\s|$)")
_PYTHON = re.compile(r"(?:python|cpython-|cp|Python |py)(3)\.?(\d{1,2})(?=\D)")
_CAPABILITY = re.compile(r"\((?P<major>[5-9]|1[0-2]), (?P<minor>\d)\)")


@dataclass(frozen=True)
class Seen:
    """A version that the log shows.

    Attributes:
        version: With its local part.
        number: Line.
        text: That line.
    """

    version: str
    number: int
    text: str


@dataclass(frozen=True)
class WheelSeen:
    """A wheel of one of the packages that the log names."""

    name: WheelName
    file: str
    number: int
    text: str
    how: str


def normal(name: str) -> str:
    """A distribution's name in normal form; conda's name of torch too."""
    plain = re.sub(r"[-_.]+", "-", name).lower()
    return "torch" if plain == "pytorch" else plain


class Evidence:
    """Observations of one log."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def has(self, *names: str) -> bool:
        """Whether a signature was seen anywhere."""
        return bool(self.log.of(*names))

    def first(self, *names: str) -> Hit | None:
        """The first hit of these signatures."""
        hits = self.log.of(*names)
        return hits[0] if hits else None

    def last(self, *names: str) -> Hit | None:
        """The last hit of these signatures."""
        hits = self.log.of(*names)
        return hits[-1] if hits else None

    @cached_property
    def macos(self) -> Hit | None:
        """The line that shows a Mac."""
        return self.first("macos")

    @cached_property
    def windows(self) -> bool:
        """Whether it is a log of Windows."""
        return self.has("windows") and not self.macos

    @cached_property
    def rocm(self) -> Hit | None:
        """The line that shows ROCm."""
        return self.first("rocm")

    @cached_property
    def aarch64(self) -> Hit | None:
        """The line that shows an ARM machine."""
        return self.first("aarch64")

    @cached_property
    def packages(self) -> dict[str, list[Seen]]:
        """The versions that were installed, by package, in the order of the log."""
        found: dict[str, list[Seen]] = {}

        def note(name: str, version: str, hit: Hit) -> None:
            found.setdefault(normal(name), []).append(Seen(version, hit.number, hit.text))

        for attempt in self.log.attempts:
            for hit in attempt.hits:
                values = hit.values
                if hit.id == "installed":
                    for name, version in _LISTED.findall(values["list"]):
                        note(name, version, hit)
                elif hit.id in ("requirement-satisfied", "listed", "pinned", "direct-reference"):
                    if "version" in values:
                        note(values["package"], values["version"], hit)
                elif hit.id == "uv-change" and values["sign"] == "+":
                    note(values["package"], values["version"], hit)
                elif hit.id == "collect-env-torch":
                    note("torch", values["version"], hit)
                elif hit.id == "show-name" and hit.follow:
                    match = re.match(r"Version: (\S{1,40})", hit.follow[0])
                    if match:
                        note(values["package"], match[1], hit)
                elif hit.id == "torch-print":
                    for name, version in self._printed(attempt, hit).items():
                        if name in (
                            "torch",
                            "mamba_ssm",
                            "causal_conv1d",
                            "triton",
                            "transformers",
                        ):
                            note(name, version, hit)
        return found

    def _printed(self, attempt: Attempt, hit: Hit) -> dict[str, str]:
        """What a command that prints versions printed: the values in the order asked for."""
        if hit.text != attempt.command and ">>>" not in hit.text and "print" not in hit.text:
            source = attempt.command if attempt.command in hit.text else ""
        else:
            source = hit.text
        asked = [match["package"] or match.lastgroup or "" for match in _PRINTED.finditer(source)]
        if not asked or "=  " in hit.text:
            return {}
        answer = next((line for line in hit.follow if line.strip()), "")
        words = re.sub(r"[(),'\"]", " ", answer).split()
        if not words or not re.match(r"\d+\.\d+|True|False|None", words[0]):
            return {}
        if len(words) < len(asked):
            words = re.sub(r"[(),'\"]", " ", " ".join(hit.follow)).split()
        return {name: word for name, word in zip(asked, words, strict=False) if name != "other"}

    @cached_property
    def printed(self) -> dict[str, tuple[str, Hit]]:
        """The last answers of printing commands, by "torch", "cuda", "abi" and module names."""
        answers: dict[str, tuple[str, Hit]] = {}
        for attempt in self.log.attempts:
            for hit in attempt.of("torch-print"):
                for name, value in self._printed(attempt, hit).items():
                    answers[name] = (value, hit)
        return answers

    def version(self, package: str) -> str:
        """The version installed last, empty when the log does not tell."""
        seen = self.packages.get(package)
        return seen[-1].version if seen else ""

    @cached_property
    def torch_of_build(self) -> Hit | None:
        """The line in which a setup.py printed the torch that it was run with."""
        return self.last("torch-build")

    @cached_property
    def torch(self) -> str:
        """The version of the installed torch, "" when unknown."""
        local = [seen.version for seen in self.packages.get("torch", [])]
        if local:
            # A plain 2.5.1 of pip's list and a 2.5.1+cu124 are one version; the longer tells more.
            same = [
                version
                for version in local
                if version.partition("+")[0] == local[-1].partition("+")[0]
            ]
            return max(same, key=len)
        build = self.torch_of_build
        if build is not None and not self.isolated():
            return build.values["version"]
        return ""

    @cached_property
    def torch_cuda(self) -> str:
        """CUDA version of the installed torch: "12.4", "none" for a build without, "" unknown."""
        if "cuda" in self.printed:
            value = self.printed["cuda"][0]
            return "none" if value == "None" else value
        env = self.last("collect-env-cuda")
        if env is not None:
            return "none" if env.values["version"] == "None" else env.values["version"]
        listed = self.last("conda-build")
        if listed is not None and listed.values["build"] == "cpu":
            return "none"
        return cuda_of(self.torch)

    @cached_property
    def torch_abi(self) -> bool | None:
        """The C++11 ABI of torch as it was printed, else by a wheel of torch's version."""
        if "abi" in self.printed and self.printed["abi"][0] in ("True", "False", "0", "1"):
            return self.printed["abi"][0] in ("True", "1")
        return None

    def usual_torch_abi(self) -> bool | None:
        """The C++11 ABI that pip's builds of that torch have; 2.6 differs by CUDA version."""
        if not self.torch or "a0" in self.torch or self.has("ngc"):
            return None
        pair = pair_of(self.torch)
        if pair == (2, 6):
            return (
                True if self.torch_cuda.startswith("12.6") else False if self.torch_cuda else None
            )
        return pair > (2, 6)

    def isolated(self, attempt: Attempt | None = None) -> Hit | None:
        """The line that shows a build in an environment of its own."""
        attempts = [attempt] if attempt else self.log.attempts
        for one in attempts:
            for hit in one.of("isolation-path", "isolation-step"):
                if "no-build-isolation" not in one.command:
                    return hit
        return None

    @cached_property
    def wheels(self) -> list[WheelSeen]:
        """Wheels of the packages that were installed or made, in the order of the log."""
        found = []
        for attempt in self.log.attempts:
            files = [("installed", attempt.first, attempt.command, attempt.command)] * bool(
                ".whl" in attempt.command
            )
            for hit in attempt.hits:
                if hit.id in ("using-cached", "created-wheel", "wheel", "collecting"):
                    text = hit.values.get("wheel") or hit.values.get("found", "")
                    files.append((hit.id, hit.number, hit.text, text))
            for how, number, text, words in files:
                for file in re.findall(r"[^\s/\\'\"=]{1,200}\.whl", words):
                    try:
                        name = wheel_name(file)
                    except WrongKindError:
                        continue
                    guessed = "Guessing wheel" in text
                    found.append(WheelSeen(name, file, number, text, "guessed" if guessed else how))
        return found

    def wheel_of(self, package: str) -> WheelSeen | None:
        """The last wheel of a package that was installed; a guessed address counts for nothing."""
        fits = [
            seen
            for seen in self.wheels
            if normal(seen.name.distribution) == package and seen.how != "guessed"
        ]
        return fits[-1] if fits else None

    @cached_property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU."""
        for hit in self.log.of("torch-arch", "capability", "torch-print"):
            if hit.id == "torch-arch" and "sm" in hit.values:
                number = int(hit.values["sm"][:3])
                return divmod(number, 10)
            for text in (hit.text, *hit.follow):
                match = _CAPABILITY.search(text)
                if match:
                    return int(match["major"]), int(match["minor"])
        return None

    @cached_property
    def torch_archs(self) -> list[str]:
        """What torch was compiled for: "sm_80", "compute_90"."""
        hit = self.last("arch-list", "arch-supported")
        return re.findall(r"(?:sm|compute)_\d+", hit.values["list"]) if hit else []

    @cached_property
    def nvcc_version(self) -> str:
        """Of nvcc, as it printed it or as torch or a gate named it."""
        for hit in reversed(
            self.log.of("nvcc-release", "minor-mismatch", "cuda-mismatch", "cuda-mismatch-tuple")
        ):
            version = hit.values.get("version") or hit.values.get("found", "")
            if version:
                return version
        return ""

    @cached_property
    def gcc_version(self) -> str:
        """Of gcc as it printed it."""
        hit = self.last("gcc-version")
        return hit.values["version"] if hit else ""

    @cached_property
    def cuda_home(self) -> str:
        """What CUDA_HOME was said to be."""
        hit = self.last("cuda-home")
        return hit.values["path"] if hit else ""

    @cached_property
    def python(self) -> str:
        """Version of Python, "3.10", by the paths and the wheels in the log."""
        counts: dict[str, int] = {}
        for attempt in self.log.attempts:
            for hit in attempt.hits:
                texts = [hit.text, *(frame.path for frame in hit.frames)]
                for match in _PYTHON.finditer(" ".join(texts)[:4000] + " "):
                    name = f"3.{match[2]}"
                    counts[name] = counts.get(name, 0) + 1
        return max(counts, key=lambda name: counts[name]) if counts else ""

    def command_is_about(self, attempt: Attempt) -> bool:
        """Whether the attempt concerns the packages of this doctor, or does not say."""
        return not attempt.command or commands.is_about_modules(attempt.command)


def cuda_of(torch_version: str) -> str:
    """The CUDA version in a torch version: "2.4.1+cu121" is 12.1, "+cpu" is "none"."""
    local = torch_version.partition("+")[2]
    match = re.match(r"cu(\d{2})(\d)$", local)
    if match:
        return f"{match[1]}.{match[2]}"
    return "none" if local.startswith(("cpu", "rocm")) else ""


def major(version: str) -> str:
    """The first number of a version."""
    return version.partition(".")[0]
