# SPDX-License-Identifier: Apache-2.0
"""Turns a row's tokens into text while they come, and ends the text before a stop string.

No model and no sampling here.
"""

from __future__ import annotations

from collections.abc import Sequence

from statescan.errors import ArgumentError
from statescan.models.tokenizer import TextDecoder


class TextStream:
    """Text of one row: complete characters only, never any part of a stop string.

    Args:
        decoder: Turns tokens into text.
        stop: Strings that end the text; they are not part of it.
    """

    def __init__(self, decoder: TextDecoder, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str):
            stop = (stop,)
        if not all(isinstance(text, str) and text for text in stop):
            raise ArgumentError(
                f"generation: got stop={list(stop)!r}.\n"
                "Every stop string must hold at least one character.\n"
                "Leave 'stop' out to write until max_new_tokens."
            )
        self._decoder = decoder
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """Text that is certain now; "" once stopped."""
        return "" if self.stopped else self._advance(self._decoder.feed(token), final=False)

    def flush(self) -> str:
        """What was held back because a stop string might have followed."""
        return "" if self.stopped else self._advance(self._decoder.flush(), final=True)

    def _advance(self, piece: str, final: bool) -> str:
        text = self._held + piece
        ends = [text.find(stop) for stop in self._stop if stop in text]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        held = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        certain = len(text) - held
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
