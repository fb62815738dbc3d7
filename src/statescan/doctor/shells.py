# SPDX-License-Identifier: Apache-2.0
"""Writes commands for bash, PowerShell and cmd, each with the quoting of its shell.

Nothing is run here, and no command is invented: ``model.Command`` says what, this says how.
"""

from __future__ import annotations

import re
import shlex

from statescan.doctor.model import Command

SHELLS = ("bash", "powershell", "cmd")

_PLAIN = re.compile(r"[\w@%+=:,./\\-]+")
_VARIABLE = re.compile(r"\$(\w+)")


def shell_of(os_name: str, shell: str | None) -> str:
    """The kind of shell to write for: the one in use if it is known, else the system's usual."""
    if shell in SHELLS:
        return shell
    if os_name == "windows":
        return "powershell"
    return "bash"


def lines(command: Command, shell: str) -> list[str]:
    """What to type, line by line; a note becomes a comment above it."""
    writer = {"bash": _bash, "powershell": _powershell, "cmd": _cmd}[shell]
    comment = {"bash": "# ", "powershell": "# ", "cmd": "rem "}[shell]
    note = [comment + command.note] if command.note else []
    return note + writer(command)


def _bash(command: Command) -> list[str]:
    written = [f"unset {name}" for name in command.unset]
    written += [f"export {name}={_bash_value(value)}" for name, value in command.set.items()]
    written += [
        f"export {name}={_bash_value(value)}${{{name}:+:${name}}}"
        for name, value in command.prepend.items()
    ]
    if command.run:
        words = [f"{name}={_bash_value(value)}" for name, value in command.env.items()]
        written.append(" ".join([*words, *map(_bash_quote, command.run)]))
    return written


def _bash_quote(word: str) -> str:
    """Quoted so that ``$NAME`` is still replaced by the shell and nothing else is."""
    if not _VARIABLE.search(word):
        return shlex.quote(word)
    escaped = re.sub(r'(["\\`])', r"\\\1", word)
    return f'"{escaped}"'


def _bash_value(value: str) -> str:
    """The same after ``NAME=``, where the shell splits nothing and plain text needs no quotes."""
    plain = _VARIABLE.search(value) and _PLAIN.fullmatch(value.replace("$", ""))
    return value if plain else _bash_quote(value)


def _powershell(command: Command) -> list[str]:
    written = [f"Remove-Item Env:{name} -ErrorAction SilentlyContinue" for name in command.unset]
    variables = {**command.set, **command.env}
    written += [f"$env:{name} = {_powershell_text(value)}" for name, value in variables.items()]
    written += [
        f'$env:{name} = {_powershell_text(value)} + ";" + $env:{name}'
        for name, value in command.prepend.items()
    ]
    if command.run:
        program = _powershell_quote(command.run[0])
        call = "& " if program.startswith(("'", '"')) else ""
        written.append(" ".join([call + program, *map(_powershell_quote, command.run[1:])]))
        # A variable of one command does not exist here; left behind, it would change later ones.
        written += [f"Remove-Item Env:{name}" for name in command.env]
    return written


def _powershell_quote(word: str) -> str:
    if re.fullmatch(r"[\w.=:/\\+-]+", word):
        return word
    return _powershell_text(word)


def _powershell_text(word: str) -> str:
    if _VARIABLE.search(word):
        inner = re.sub(r'([`"])', r"`\1", word)
        return '"' + _VARIABLE.sub(r"$env:\1", inner) + '"'
    return "'" + word.replace("'", "''") + "'"


def _cmd(command: Command) -> list[str]:
    written = [f"set {name}=" for name in command.unset]
    variables = {**command.set, **command.env}
    written += [f'set "{name}={_cmd_variables(value)}"' for name, value in variables.items()]
    written += [
        f'set "{name}={_cmd_variables(value)};%{name}%"' for name, value in command.prepend.items()
    ]
    if command.run:
        written.append(" ".join(map(_cmd_quote, command.run)))
        written += [f"set {name}=" for name in command.env]
    return written


def _cmd_variables(word: str) -> str:
    return _VARIABLE.sub(r"%\1%", word)


def _cmd_quote(word: str) -> str:
    word = _cmd_variables(word)
    if re.fullmatch(r"[\w@+=:./\\%-]+", word):
        return word
    return '"' + word.replace('"', '""') + '"'
