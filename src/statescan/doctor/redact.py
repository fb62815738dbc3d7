# SPDX-License-Identifier: Apache-2.0
"""Takes names of people and machines, and secrets, out of a document before it is shown to others.

Works on JSON data, on text, and on the doctor's own results before they are laid out in lines:
a secret that is broken over two lines would not be recognised. Forms are ``redact_patterns``'s
and ``redact_addresses``'.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from statescan.doctor import redact_patterns as patterns
from statescan.doctor.model import Fact, Facts, Problem
from statescan.doctor.redact_addresses import hide_addresses

_MOST_NAMES = 32
"""Names that are learned from one document; more would cost more time for each word of it."""
_WORDS = patterns.words(
    "art may max mark will grace rose pat bill test data main work build source wheel "
    "compile install load import run error ok none file line name path python torch cuda "
    "nvidia nvcc gcc pip conda mamba triton transformers statescan linux windows macos "
    "bash powershell cmd gpu cpu app apps project projects models model tmp venv env bin "
    "lib include src share local opt usr var etc workspace guide docs index html dev the "
    "and for not all new"
)
"""Words of documents that are also somebody's name: they are hidden only where one must stand."""
_HARDWARE = re.compile(r"(?:[abhlptv]|gb|rtx|gtx|mi|sm_?|cu)\d+\w*", re.IGNORECASE)


def redactor(secrets: Mapping[str, str] | None = None) -> Callable[[Any], Any]:
    """A function that redacts text, JSON data and the results of the doctor's stages.

    It remembers the names of people and machines that prompts and home folders showed, and hides
    them wherever they stand alone, in the same value and in all later ones.

    Args:
        secrets: What to replace by what; this machine's home, user and host by default.
    """
    return _Redactor(local_secrets() if secrets is None else secrets)


def local_secrets() -> dict[str, str]:
    """This machine's home folder, user name and host name, and what stands for each."""
    found = {}
    home = os.path.expanduser("~")  # noqa: PTH111  (Path.home raises where there is none)
    if home not in ("~", "/", ""):
        found[home] = "~"
    environment = dict(os.environ)
    users = [environment.get(name, "") for name in ("LOGNAME", "USER", "USERNAME")]
    for name, shown in (*((user, "USER") for user in users), (platform.node(), "HOST")):
        if _is_telling(name):
            found[name] = shown
    return found


class _Redactor:
    """Redacts values, and learns names from them."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._known = {secret: shown for secret, shown in secrets.items() if secret}
        self._learned: set[str] = set()
        self._pattern = self._compiled()

    def __call__(self, value: Any) -> Any:
        for text in _texts(value):
            self._learn(text)
        return self._walk(value, "", False)

    def _learn(self, text: str) -> None:
        before = len(self._learned)
        for name, shown in patterns.owners(text):
            if before + _MOST_NAMES <= len(self._learned) or len(self._learned) >= _MOST_NAMES:
                break
            if name in self._known or not _is_telling(name):
                continue
            if shown == "HOST" and (not re.search(r"[\d.-]", name) or _HARDWARE.fullmatch(name)):
                continue
            self._learned.add(name)
            self._known[name] = shown
        if len(self._learned) > before:
            self._pattern = self._compiled()

    def _compiled(self) -> re.Pattern[str] | None:
        # The longest first, so that a home folder goes before the user's name inside it.
        ordered = sorted(self._known, key=lambda name: -len(name))
        if not ordered:
            return None
        return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, ordered))})(?![\w-])")

    def _text(self, text: str, label: str) -> str:
        # Credentials first: a name inside a password must not change how it looks.
        text = patterns.hide_credentials(text)
        if self._pattern is not None:
            text = self._pattern.sub(lambda match: self._known[match[0]], text)
        return hide_addresses(patterns.hide_owners(text), label)

    def _walk(self, value: Any, label: str, secret: bool) -> Any:
        """Redact one value.

        Args:
            value: Any.
            label: The name that it goes by.
            secret: Whether all text in it is.
        """
        if isinstance(value, str):
            if secret:
                return patterns.HIDDEN if value else value
            return self._text(value, label)
        if isinstance(value, PurePath):
            return type(value)(self._text(str(value), label))
        if isinstance(value, Mapping):
            return self._mapping(value, secret)
        if isinstance(value, (list, tuple)):
            return type(value)(self._sequence(value, label, secret))
        if isinstance(value, Facts):
            return Facts({fact.name: self._fact(fact) for fact in value})
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, Problem)):
            return self._dataclass(value)
        return value

    def _mapping(self, value: Mapping[Any, Any], secret: bool) -> dict[Any, Any]:
        # A row such as {"name": "HF_TOKEN", "value": ...}.
        named = isinstance(value.get("name"), str) and patterns.is_secret_name(value["name"])
        shown: dict[Any, Any] = {}
        for key, item in value.items():
            text = isinstance(key, str)
            hidden = secret or (text and patterns.is_secret_name(key)) or (named and key == "value")
            new = name = self._text(key, "") if text else key
            count = 1
            while new in shown:
                # Two folders of two users are still two.
                count += 1
                new = f"{name} ({count})"
            # Inside a mapping it is JSON data, which knows lists only.
            item = list(item) if isinstance(item, tuple) else item
            shown[new] = self._walk(item, key if text else "", hidden)
        return shown

    def _sequence(self, value: Any, label: str, secret: bool) -> Iterator[Any]:
        """The items; of a command line also the argument after an option such as --token."""
        argument = False
        for item in value:
            option = isinstance(item, str) and re.fullmatch(r"(--?[\w-]+)(=[^\n]*)?", item)
            if argument and isinstance(item, str) and not option:
                yield patterns.HIDDEN
            elif option and option[2] and patterns.is_secret_name(option[1]):
                yield f"{option[1]}={patterns.HIDDEN}"
            else:
                yield self._walk(item, label, secret)
            argument = bool(option and not option[2] and patterns.is_secret_name(option[1]))

    def _fact(self, fact: Fact) -> Fact:
        secret = patterns.is_secret_name(fact.name)
        return Fact(
            *(fact.name, self._walk(fact.value, fact.name, secret)),
            *(self._text(fact.source, ""), self._text(fact.problem, "")),
        )

    def _dataclass(self, value: Any) -> Any:
        changes = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = self._walk(old, field.name, False)
            if new is not old and new != old:
                changes[field.name] = new
        return dataclasses.replace(value, **changes) if changes else value


def _texts(value: Any) -> Iterator[str]:
    """Every string of a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, PurePath):
        yield str(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple, Facts)):
        for item in value:
            yield from _texts(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, Problem)):
        for field in dataclasses.fields(value):
            yield from _texts(getattr(value, field.name))


def _is_telling(name: str) -> bool:
    """Whether a name may be hidden wherever it stands alone."""
    lower = name.lower()
    return len(name) > 2 and lower not in patterns.KEPT_NAMES and lower not in _WORDS
