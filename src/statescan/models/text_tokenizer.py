# SPDX-License-Identifier: Apache-2.0
"""Tokenizers with a vocabulary of their own: tokenizer.json, read by the ``tokenizers`` library.

The byte tokenizer is in ``tokenizer``; nothing is downloaded here but by ``hub``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from statescan.errors import ArgumentError, CheckpointError, MissingExtraError
from statescan.models.hub import find_optional_file, why_offline
from statescan.models.model_writer import write_json, write_text
from statescan.models.safe_files import check_regular, one_line, read_json_object, reason

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

TOKENIZER_NAME = "tokenizer.json"
_SETTINGS_NAME = "tokenizer_config.json"
NEOX = "EleutherAI/gpt-neox-20b"
"""Whose tokenizer the original state-spaces checkpoints use without saying so."""

_MAX_BYTES = 256 * 2**20
_MAX_HELD = 64
"""Tokens that may wait for the rest of a character; the longest character takes four bytes."""


class TextTokenizer:
    """A tokenizer.json: text to tokens and back.

    Args:
        library: The ``tokenizers.Tokenizer``.
        eos_token_id: The token that ends a text, if it is known.
    """

    def __init__(self, library: Library, eos_token_id: int | None = None) -> None:
        self._library = library
        self.eos_token_id = eos_token_id

    @property
    def vocab_size(self) -> int:
        """Tokens that exist, added ones included."""
        return self._library.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with those that the tokenizer puts around every text."""
        # Lone surrogates stand for bytes that are no text; the library takes Unicode only.
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        return list(self._library.encode(clean).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the tokens, without special ones."""
        values = [int(token) for token in tokens]
        if any(value < 0 for value in values):
            raise ArgumentError(
                f"TextTokenizer: got the token {min(values)}.\n"
                f"Tokens are numbers from 0 to {self.vocab_size - 1}.\n"
                "Leave out what stands for padding."
            )
        return str(self._library.decode(values))

    def decoder(self) -> TokenDecoder:
        """A decoder that never shows half a character."""
        return TokenDecoder(self)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write tokenizer.json into a model folder, and which token ends a text."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / TOKENIZER_NAME, self._library.to_str(pretty=False))
        if self.eos_token_id is not None:
            eos = self._library.id_to_token(self.eos_token_id)
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
            write_json(folder / _SETTINGS_NAME, settings)


class TokenDecoder:
    """Incremental decoding: the pieces joined equal ``TextTokenizer.decode`` of all tokens.

    A token's text may depend on its left neighbour (a space) and may be part of a character, so
    each piece is what the newest tokens add to the text of those before them. Only in a run of
    bytes that is no text as a whole pieces may differ: where a tokenizer with byte fallback gives
    up all of it, the characters at its beginning have been shown already.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        """Text that became certain with this token."""
        self._held.append(int(token))
        before = self._tokenizer.decode(self._shown)
        text = self._tokenizer.decode(self._shown + self._held)
        full = len(self._held) >= _MAX_HELD
        if len(text) <= len(before):
            # Special tokens have no text; a long row of them is forgotten.
            self._held = [] if full else self._held
            return ""
        if text.endswith("\ufffd") and not full:
            return ""
        # Only the neighbours of what comes next are kept, so that the work stays the same.
        self._shown, self._held = self._held, []
        return text[len(before) :]

    def flush(self) -> str:
        """End the stream: a character cut in half becomes U+FFFD."""
        before = self._tokenizer.decode(self._shown)
        text = self._tokenizer.decode(self._shown + self._held)
        self._shown, self._held = [], []
        return text[len(before) :]


def load_tokenizer(source: str | os.PathLike[str], *, revision: str | None = None) -> TextTokenizer:
    """The tokenizer beside a checkpoint.

    Args:
        source: Folder with a tokenizer.json, such a file itself, or an id on the hub.
        revision: Branch, tag or commit on the hub.

    Raises:
        CheckpointError: there is none, or it is damaged. The original state-spaces checkpoints
            have none: theirs is that of "EleutherAI/gpt-neox-20b".
        MissingExtraError: tokenizers or huggingface_hub is needed and not installed.
    """
    tokenizer = find_tokenizer(source, revision=revision)
    if tokenizer is None:
        raise CheckpointError(
            f"{source} has no {TOKENIZER_NAME}{why_offline(source)}; the original state-spaces "
            f"checkpoints have none and use that of {NEOX}: load it from there, or copy its "
            f"{TOKENIZER_NAME} to the model"
        )
    return tokenizer


def find_tokenizer(
    source: str | os.PathLike[str], *, revision: str | None = None
) -> TextTokenizer | None:
    """``load_tokenizer``, or None where the checkpoint has no tokenizer.json."""
    if Path(source).is_file():
        path, settings = Path(source), Path(source).parent / _SETTINGS_NAME
        return _read(path, settings if settings.is_file() else None)
    found = find_optional_file(source, TOKENIZER_NAME, revision)
    if found is None:
        return None
    return _read(found, find_optional_file(source, _SETTINGS_NAME, revision))


def _read(path: Path, settings: Path | None) -> TextTokenizer:
    size = check_regular(path)
    if size > _MAX_BYTES:
        raise CheckpointError(f"{path} has {size} bytes; {_MAX_BYTES} are the most that is read")
    library = _import_tokenizers()
    try:
        tokenizer = library.Tokenizer.from_str(path.read_bytes().decode("utf-8"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # The library's errors are plain Exceptions, and its panics are not even that.
        raise CheckpointError(f"{path} is damaged or no tokenizer: {reason(error)}") from error
    # Both would change what a model reads; they belong to training in batches.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return TextTokenizer(tokenizer, None if settings is None else _eos(tokenizer, settings))


def _eos(tokenizer: Library, settings: Path) -> int | None:
    """The token that tokenizer_config.json names as the end of a text."""
    token = read_json_object(settings).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    number = tokenizer.token_to_id(token) if isinstance(token, str) else None
    if number is None:
        raise CheckpointError(
            f"{settings} names the eos_token {one_line(repr(token))}, which the tokenizer has not"
        )
    return number


def _import_tokenizers() -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError(
            f"{TOKENIZER_NAME} needs the tokenizers library, which is not installed: "
            "pip install 'statescan[models]'"
        ) from error
    return tokenizers
