# SPDX-License-Identifier: Apache-2.0
import pytest

from statescan.errors import ArgumentError
from statescan.models import ByteTokenizer

TEXTS = ["", "plain", "Grüße, 世界 🙂\n", "e\u0301"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize(
    "data",
    [*(text.encode() for text in TEXTS), b"a\xffb", b"\xe4\xb8", b"\xe4a", bytes(range(256))],
)
def test_a_stream_equals_the_whole(data: bytes) -> None:
    tokenizer = ByteTokenizer()
    decoder = tokenizer.decoder()
    pieces = [decoder.feed(byte) for byte in data]
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(data)


def test_half_a_character_is_held_back() -> None:
    decoder = ByteTokenizer().decoder()
    assert [decoder.feed(byte) for byte in "世".encode()] == ["", "", "世"]
    decoder.feed(0xE4)
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_tokens_that_are_no_bytes_are_refused() -> None:
    for tokens in ([256], [-1]):
        with pytest.raises(ArgumentError, match=str(tokens[0])):
            ByteTokenizer().decode(tokens)
