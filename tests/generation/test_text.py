# SPDX-License-Identifier: Apache-2.0
import pytest

from statescan.errors import ArgumentError
from statescan.generation import TextStream
from statescan.models import ByteTokenizer


def run(text: str, stop=()) -> tuple[list[str], bool]:
    stream = TextStream(ByteTokenizer().decoder(), stop)
    pieces = [stream.feed(byte) for byte in text.encode()]
    return [*pieces, stream.flush()], stream.stopped


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abcdef", ["cd"], "ab"),
        ("abcdef", ["xy"], "abcdef"),
        ("aaab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("one\n\ntwo", ["\n\n"], "one"),
        ("stop", ["stop"], ""),
        ("abc", ["cd", "bc"], "a"),
        # Both end at the same byte: the text ends before the one that begins first.
        ("abc", ["c", "bc"], "a"),
        ("ab", ["abc"], "ab"),
        ("日本語です", ["語"], "日本"),
        ("", ["x"], ""),
        ("a", "a", ""),
    ],
)
def test_text_ends_before_the_stop_string(text: str, stop, expected: str) -> None:
    pieces, stopped = run(text, stop)
    assert "".join(pieces) == expected
    assert stopped == (expected != text)


def test_nothing_of_a_stop_string_shows_before_it_is_complete() -> None:
    pieces, _ = run("ab<en<end>cd", ["<end>"])
    assert pieces[:10] == ["a", "b", "", "", "", "<en", "", "", "", ""]
    assert "".join(pieces) == "ab<en"


def test_text_is_shown_at_once_where_no_stop_string_can_begin() -> None:
    pieces, _ = run("a世b", ["xyz"])
    assert pieces == ["a", "", "", "世", "b", ""]


def test_after_the_end_nothing_comes() -> None:
    stream = TextStream(ByteTokenizer().decoder(), ["b"])
    assert [stream.feed(byte) for byte in b"abc"] == ["a", "", ""]
    assert stream.flush() == ""


def test_tokens_of_several_characters() -> None:
    class Words:
        """Decoder of a vocabulary of words."""

        words = ("the ", "en", "d>", "<", "cat")

        def feed(self, token: int) -> str:
            return self.words[token]

        def flush(self) -> str:
            return ""

    stream = TextStream(Words(), ["<end>"])
    assert [stream.feed(token) for token in (0, 4, 3, 4)] == ["the ", "cat", "", "<cat"]
    assert [stream.feed(token) for token in (3, 1, 2)] == ["", "", ""]
    assert stream.stopped


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3]])
def test_empty_stop_strings_are_refused(stop) -> None:
    with pytest.raises(ArgumentError, match="at least one character"):
        run("abc", stop)
