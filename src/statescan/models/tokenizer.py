# SPDX-License-Identifier: Apache-2.0
"""The byte tokenizer: token i is byte i of the UTF-8 text.

Tokenizers with a vocabulary of their own are in ``text_tokenizer``; any object with the same two
methods works in their place.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from statescan.errors import ArgumentError


class TextDecoder(Protocol):
    """Turns tokens into text one at a time, holding back what is not complete."""

    def feed(self, token: int) -> str:
        """Text that became certain with this token."""

    def flush(self) -> str:
        """What was held back, as well as it can be shown."""


class Tokenizer(Protocol):
    """What generation needs: a text's tokens, and a decoder for streams."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""

    def decoder(self) -> TextDecoder:
        """A decoder for one stream of tokens."""


class ByteTokenizer:
    """UTF-8 bytes as tokens; decoding shows U+FFFD for bytes that are no text."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """Bytes of the text."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the bytes."""
        return _to_bytes(tokens).decode("utf-8", errors="replace")

    def decoder(self) -> ByteDecoder:
        """A decoder that never shows half a character."""
        return ByteDecoder()


class ByteDecoder:
    """Incremental UTF-8 decoding: the pieces joined equal ``ByteTokenizer.decode`` of all bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The character that this byte completes, or ""."""
        return self._decoder.decode(_to_bytes((token,)))

    def flush(self) -> str:
        """End the stream: a character cut in half becomes U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _to_bytes(tokens: Iterable[int]) -> bytes:
    values = [int(token) for token in tokens]
    try:
        return bytes(values)
    except ValueError:
        wrong = next(value for value in values if not 0 <= value < 256)
        raise ArgumentError(
            f"ByteTokenizer: got the token {wrong}.\n"
            "Tokens are bytes, 0 to 255.\n"
            "This model has another vocabulary: decode with its own tokenizer."
        ) from None
