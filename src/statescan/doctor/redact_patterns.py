# SPDX-License-Identifier: Apache-2.0
"""The forms of credentials and names in a piece of text, and what stands for each.

Works on one string; documents, and what this machine is called, are ``redact``'s, addresses of
machines ``redact_addresses``'. Every pattern
either starts at a place that cannot lie inside its own match or has a bound, so time is linear.
"""

from __future__ import annotations

import re
from collections.abc import Iterator


def words(text: str) -> frozenset[str]:
    """The words of a text, for lists that read better as one."""
    return frozenset(text.split())


HIDDEN = "***"

_ML = (
    r"(?<!(?:pad|eos|bos|unk|sep|cls|max|min|num|new|per|end)[_-])"
    r"(?<!(?:mask|stop|next|last)[_-])(?<!special[_-])(?<!\bn[_-])"
)
"""Before "token" these make it a piece of a text that a model reads."""
_NAME = (
    rf"(?:{_ML}token(?![_-](?:id|type|count|index|len|limit|size|pos|embed|class|mix|shift))"
    r"|passwd|password|passphrase|secret|api[_-]?key)"
    # A part of a word ends before a sign or, as in accessTokenFile, before a capital.
    r"(?:(?![a-z])|(?-i:(?<=[a-z])(?=[A-Z])))"
)
_KEY = _NAME + r"[\w-]{0,24}"
_SECRET_KEY = re.compile(rf"(?i){_NAME}|authorization")
_GAP = r"[ \t]{0,4}"
_QUOTE = r"\\{0,3}[\"']"
_PLAIN = r"(?:[^\s&;'\"]|['\"](?=\w))+"
_QUOTED = rf"(?P<quote>{_QUOTE})(?P<quoted>[^\n]*?)(?P<end>(?<!\\)(?P=quote)|$)"
_VALUE = rf"(?:{_QUOTED}|(?P<plain>{_PLAIN}))"
_PAIR = re.compile(
    rf"(?im)(?P<head>(?P<key>{_KEY})(?P<keyend>(?:{_QUOTE})?){_GAP}"
    rf"(?P<sign>:=|=>|=(?!=)|:(?!:)){_GAP}){_VALUE}"
)
_OPTION = re.compile(rf"(?im)(?P<head>(?<![\w-])--?[\w-]*?{_KEY}[ \t]+)(?!-){_VALUE}")
# The whole of NAME=VALUE stands in quotes, so that the value may have spaces.
_IN_QUOTES = re.compile(
    rf"(?i)(?P<head>(?P<quote>[\"'])-{{0,2}}[\w-]{{0,40}}?{_KEY}=)(?P<quoted>[^\n\"']*)(?P<end>(?P=quote))"
)
_NO_VALUE = re.compile(
    r"(?i:none|null|true|false)|\*{3}|\$\{.*|(?-i:\$[A-Z_][A-Z0-9_]*)|\$env:\w+|%\w+%|<.*"
    r"|(?:os\.)?(?:environ|getenv)\W.*"
)
_NO_ARGUMENT = words(
    "is are was must may can needs requires required or and for to option argument flag "
    "has not with in"
)
_RANDOM = re.compile(r"(?=\D{0,40}\d)(?=[^A-Za-z]{0,40}[A-Za-z])\S{6,}|\S{20,}")

_ONE_WORD = r"(?:bearer|basic|token|apikey)"
_SCHEME = rf"(?:(?:{_ONE_WORD}|digest|negotiate|ntlm|oauth|hoba|mutual|aws4-hmac-sha256)[ \t]+)?"
_AUTHORIZATION = (
    re.compile(
        rf"(?im)((?P<quote>[\"'])(?:proxy-)?authorization{_GAP}[:=]{_GAP}{_SCHEME})[^\n]*?"
        r"(?P<end>(?<!\\)(?P=quote)|$)"
    ),
    re.compile(
        rf"(?im)(authorization(?:{_QUOTE})?{_GAP}[:=]{_GAP}(?P<quote>{_QUOTE}){_SCHEME})[^\n]*?"
        r"(?P<end>(?<!\\)(?P=quote)|$)"
    ),
    re.compile(
        rf"(?i)((?<![\"'])(?<![\"']proxy-)authorization{_GAP}[:=]{_GAP}{_ONE_WORD}[ \t]+)"
        r"[^\s'\"]+(?P<end>)"
    ),
    re.compile(
        rf"(?i)((?<![\"'])(?<![\"']proxy-)authorization{_GAP}[:=]"
        rf"(?![ \t]*(?:{_QUOTE}|{_ONE_WORD}[ \t])){_GAP}{_SCHEME})[^\s][^\n]*(?P<end>)"
    ),
)
_FORMS = re.compile(
    r"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{6,}|github_pat_\w{4,}|glpat-[\w-]{8,}"
    r"|pypi-A[\w-]{8,}|xox[abprs]-[\w-]{8,}|AKIA[A-Z0-9]{16}|eyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*"
    r"|sk-(?:[a-z]{2,8}\d{0,2}-){0,2}(?=[A-Za-z_]{0,40}[A-Z0-9])[A-Za-z0-9_]{16,}[\w-]*"
    r"|hf_(?!transformers|configuration|pretrained|checkpoint|quantiz|tokeniz|integration"
    r"|implementation|generation)[A-Za-z0-9]{10,}(?!\w))"
)
_BEARER = re.compile(r"(\bBearer )(?=[\w.~+/=-]{12})[\w.~+/=-]+")
# netrc's login and password, curl's --user name:password, and what a browser is known by.
_MORE = (
    re.compile(r"(?i)(\blogin\s+\S{1,64}\s+(?:account\s+\S{1,64}\s+)?password\s+)\S+"),
    re.compile(
        r"((?<![\w-])(?:-u|--(?:proxy-)?user)[ \t=]+(?!\d+:\d+\b)[^\s:'\"$]{1,64}:)[^\s'\"$]+"
    ),
    re.compile(r"(?i)(\b(?:set-)?cookie:[ \t]*)[^\s'\"][^\n'\"]*"),
)

# Of an address: what stands before its last "@", with or without a password.
_LOGIN = re.compile(
    r"://(?P<user>[^\s/@:'\"<>\[]*)(?P<rest>:[^\s@:]*(?::(?!//)[^\s@:]*)*)?@(?:[^\s@/'\"<>]*@)*"
    r"(?=(?P<named>(?:[\w-]+\.)+[a-z]{2,}(?![\w.])|localhost\b|[\w.-]+:\d{1,5}(?!\w)))?"
)
_PORT_AND_PATH = re.compile(r":\d{1,5}(?=[/?#'\"]|$)")
_REFERENCE = re.compile(r"(?:\$\{?\w+\}?|%\w+%)(?::(?:\$\{?\w+\}?|%\w+%))?")
_BARE_LOGIN = re.compile(
    r"(?<![^\s=,;'\"(\[{|])(?!mailto:)[\w.%+-]{1,64}:(?!//)"
    r"(?:[^\s@'\"<>/]{1,128}@(?!sha\d)(?=[a-z_][\w-]*(?:[.:]|$)|\d{1,3}(?:\.\d{1,3}){3}\b)"
    r"|[^\s@'\"<>]{1,128}@(?=[\w.-]{1,64}:\d{2,5}(?!\w)))",
    re.IGNORECASE,
)

_FOLDER = r"(?![$%{<*~])[^/\\\s:'\"<>]{0,63}[^/\\\s:'\"<>.,;)\]}]"
_WINDOWS_FOLDER = rf"(?:{_FOLDER}(?: [^/\\\s:'\"<>]{{1,32}}){{1,2}}(?=\\)|{_FOLDER})"
_FOLDERS = re.compile(
    rf"(?P<unix>/(?:home|[Uu]sers|scratch|data\d+)/)(?:{_FOLDER})"
    rf"|(?P<windows>\b[A-Za-z]:[\\/]{{1,4}}(?i:users)[\\/]{{1,4}}){_WINDOWS_FOLDER}"
)
_OWNER = re.compile(
    rf"(?<![\w.:/~-])(?:/[\w.-]{{1,32}}){{0,3}}?/(?:home|[Uu]sers)/(?P<unix>{_FOLDER})"
    rf"|\b[A-Za-z]:[\\/]{{1,4}}(?i:users)[\\/]{{1,4}}(?P<windows>{_WINDOWS_FOLDER})"
)
_LOGIN_NAME = r"(?P<user>[A-Za-z_][\w.-]{0,31})@(?P<host>[A-Za-z][\w.-]{0,63}|\d[\w-]{0,63})"
# alice@box:~/x$, [alice@box x]$ and, at the start of a line, alice@box ~ %.
_PROMPTS = (
    re.compile(rf"(?<![\w.+/:@-])(?!git@){_LOGIN_NAME}(?=:[~/])"),
    re.compile(rf"(?<=\[){_LOGIN_NAME}(?= [^\]\n]{{1,80}}\][$#%])"),
    re.compile(rf"(?m)^(?:\([\w.-]{{1,40}}\) )?{_LOGIN_NAME}(?= [~/][^\n$#%>@]{{0,80}}[$#%>])"),
    re.compile(rf"(?<=ssh ){_LOGIN_NAME}"),
)
KEPT_NAMES = words(
    "user users root home admin ubuntu debian runner localhost host mail conda jovyan "
    "linuxbrew vscode docker container nobody public shared default guest"
)
"""Accounts and hosts that tell nothing of anybody."""

_MAIL = re.compile(
    r"(?<![\w.+*-])(?!(?:git|hg|svn)@)[\w.+-]{1,64}"
    r"@(?!v?\d+(?:\.\d+)*\.(?:dev|post|rc|alpha|beta|final|pre|nightly)\b|self\.)"
    r"(?:[\w-]{1,63}\.){1,5}(?P<last>[A-Za-z]{2,24})(?![\w(@-]|\.\w)"
)
_NO_DOMAINS = words(
    "so py cu sh cpp cc hpp whl gz zip json txt log toml yml yaml weight bias grad data mt "
    "mh service slice socket timer mount target png jpg"
)
_DOMAINS = words("com org net edu gov io ai de fr uk eu jp cn ch at nl es it ca us")


def is_secret_name(name: str) -> bool:
    """Whether what goes by this name is not for others: ``HF_TOKEN``, ``password``."""
    return _SECRET_KEY.search(name) is not None


def hide_credentials(text: str) -> str:
    """``text`` with ``***`` for passwords, tokens and keys."""
    text = _in_logins(text)
    lower = text.lower()
    if "authorization" in lower:
        for pattern in _AUTHORIZATION:
            text = pattern.sub(rf"\1{HIDDEN}\g<end>", text)
    if any(word in lower for word in ("token", "pass", "secret", "api")):
        text = _IN_QUOTES.sub(_hidden_value, text)
        text = _PAIR.sub(_hidden_pair, text)
        text = _OPTION.sub(_hidden_argument, text)
    for pattern in (_BEARER, *_MORE):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return _FORMS.sub(HIDDEN, text)


def _in_logins(text: str) -> str:
    if "@" not in text:
        return text
    if "://" in text:
        text = _LOGIN.sub(_hidden_login, text)
    return _BARE_LOGIN.sub(f"{HIDDEN}@", text) if ":" in text else text


def _hidden_login(match: re.Match[str]) -> str:
    whole, user, rest = match[0], match["user"], match["rest"]
    login = whole[3:-1]
    if _REFERENCE.fullmatch(login) or login in ("git", "hg", "svn"):
        return whole
    # http://host:8080/a@b or http://alice:80/80@host.org: the dots tell which it is.
    is_host = "." in user or user == "localhost" or not match["named"]
    if rest and _PORT_AND_PATH.match(rest) and is_host:
        return whole
    return f"://{HIDDEN}@"


def _hidden_value(match: re.Match[str]) -> str:
    groups = match.groupdict()
    value = groups["quoted"] if groups["quoted"] is not None else groups["plain"]
    if not value or _NO_VALUE.fullmatch(value):
        return match[0]
    if groups["quoted"] is not None:
        opening = "" if match.re is _IN_QUOTES else groups["quote"]
        return f"{groups['head']}{opening}{HIDDEN}{groups['end']}"
    kept = value[len(value.rstrip(",)]}")) :]
    return match["head"] + HIDDEN + kept if kept != value else match[0]


def _hidden_pair(match: re.Match[str]) -> str:
    """``token: x`` is also what parsers say of their input: there only a likely secret goes."""
    if match["sign"] == ":" and match["key"].lower() == "token" and not match["keyend"]:
        line = match.string.rfind("\n", max(0, match.start() - 80), match.start()) + 1
        before = match.string[line : match.start()]
        alone = not (before[-1:].isalnum() or before[-1:] in ("_", "-") or before[-1:] == ".")
        entry = match["quoted"] is not None and not before.strip(" \t-{,")
        value = match["quoted"] if match["quoted"] is not None else match["plain"]
        if alone and not entry and not _RANDOM.fullmatch(value):
            return match[0]
    return _hidden_value(match)


def _hidden_argument(match: re.Match[str]) -> str:
    return match[0] if match["plain"] in _NO_ARGUMENT else _hidden_value(match)


def owners(text: str) -> Iterator[tuple[str, str]]:
    """Names of people and machines that prompts and home folders show, each with its stand-in."""
    if "sers" in text.lower() or "/home/" in text:
        for match in _OWNER.finditer(text):
            yield match["unix"] or match["windows"], "USER"
    if "@" in text:
        for pattern in _PROMPTS:
            for match in pattern.finditer(text):
                yield match["user"], "USER"
                yield match["host"], "HOST"


def hide_owners(text: str) -> str:
    """``text`` without the names in prompts, home folders and mail addresses."""
    if "@" in text:
        for pattern in _PROMPTS:
            text = pattern.sub(_hidden_prompt, text)
        text = _MAIL.sub(_hidden_mail, text)
    return _FOLDERS.sub(lambda match: f"{match['unix'] or match['windows']}USER", text)


def _hidden_prompt(match: re.Match[str]) -> str:
    user = match["user"] if match["user"].lower() in KEPT_NAMES else "USER"
    host = match["host"] if match["host"].lower() in KEPT_NAMES else "HOST"
    start = match[0][: match.start("user") - match.start()]
    return f"{start}{user}@{host}"


def _hidden_mail(match: re.Match[str]) -> str:
    labels = match[0].lower().rpartition("@")[2].split(".")
    if labels[-1] in _NO_DOMAINS and labels[-2] not in _DOMAINS:
        return match[0]
    # After a slash it is rather a revision: https://host/project@branch.name
    if match.string[match.start() - 1 : match.start()] == "/" and labels[-1] not in _DOMAINS:
        return match[0]
    return "MAIL"
