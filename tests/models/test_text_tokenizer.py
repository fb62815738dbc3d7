# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from tokenizer.json: streams without broken characters, and damaged files."""

import json
import os
import random
import sys
from pathlib import Path

import pytest

from statescan.errors import ArgumentError, CheckpointError, MissingExtraError
from statescan.generation import TextStream
from statescan.models import TextTokenizer, load_tokenizer

tokenizers = pytest.importorskip(
    "tokenizers", reason="tokenizers is not installed: pip install 'statescan[models]'"
)
from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: E402  (after the skip)

TEXT = "The quick brown fox — naïve café, 東京 2024 🙂🙃 grüße\n\tx = 1;  done. "


def byte_level() -> TextTokenizer:
    """As GPT-NeoX': tokens are runs of bytes, which may begin or end inside a character."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([TEXT] * 3, trainer)
    return TextTokenizer(library, 0)


def byte_fallback() -> TextTokenizer:
    """As SentencePiece's: words with a mark for their space, and bytes for unknown characters."""
    words = ["▁The", "▁fox", "▁caf", "é", "▁", "x", "🙂", "▁done", "."]  # typos: ignore
    names = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    library = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    )
    library.add_special_tokens(["<s>"])
    library.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return TextTokenizer(library, 0)


KINDS = {"byte-level": byte_level, "byte fallback": byte_fallback}


def pieces(tokenizer: TextTokenizer, tokens: list[int]) -> list[str]:
    decoder = tokenizer.decoder()
    return [*(decoder.feed(token) for token in tokens), decoder.flush()]


def test_text_survives() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    assert len(tokens) < len(TEXT.encode())
    assert max(tokens) < tokenizer.vocab_size


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_text_join_to_it_without_half_characters(kind: str) -> None:
    tokenizer = KINDS[kind]()
    for text in (TEXT, "東" * 20, "🙂🙃" * 5, "a\ufffdb", "é"):
        tokens = byte_level().encode(text) if kind == "byte-level" else [
            1 + byte for byte in text.encode()
        ]  # fmt: skip
        parts = pieces(tokenizer, tokens)
        assert "".join(parts) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in part for part in parts)


def test_pieces_of_any_tokens_join_to_their_text() -> None:
    """Random tokens are mostly no text: the worst that a model can write."""
    tokenizer = byte_level()
    draw = random.Random(0)
    for length in range(60):
        tokens = [draw.randrange(tokenizer.vocab_size) for _ in range(length)]
        assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_characters_before_bytes_that_are_no_text_are_shown() -> None:
    """Byte fallback gives up a whole run of bytes for one bad one; a stream has shown the rest."""
    tokenizer = byte_fallback()
    tokens = [1 + byte for byte in "é".encode() + b"\xff"] + [258]
    assert tokenizer.decode(tokens) == "\ufffd\ufffd\ufffd fox"
    assert "".join(pieces(tokenizer, tokens)).startswith("é")
    assert "".join(pieces(tokenizer, tokens)).endswith(" fox")


def test_a_stream_that_is_never_text_is_shown_all_the_same() -> None:
    """What waits for the rest of a character is bounded, and so is the work for each token."""
    tokenizer = byte_level()
    # The first byte of a long character, which byte-level tokenizers write as this letter.
    token = tokenizer._library.token_to_id("ð")
    assert tokenizer.decode([token]) == "\ufffd"
    decoder = tokenizer.decoder()
    shown = "".join(decoder.feed(token) for _ in range(1000))
    assert len(shown) > 900


def test_special_tokens_have_no_text_however_many_there_are() -> None:
    decoder = byte_fallback().decoder()
    tokens = [257, *[0] * 500, 258]
    assert "".join(decoder.feed(token) for token in tokens) == "The fox"


def test_stop_strings_work_on_tokens() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer.decoder(), ["café"])
    text = "".join(stream.feed(token) for token in tokenizer.encode(TEXT)) + stream.flush()
    assert text == TEXT[: TEXT.index("café")]
    assert stream.stopped


def test_a_decoder_begins_anew_after_flush() -> None:
    tokenizer = byte_fallback()
    decoder = tokenizer.decoder()
    first = [decoder.feed(token) for token in (257, 258)] + [decoder.flush()]
    assert "".join(first) == "The fox"
    assert decoder.feed(258) == "fox"


def test_saved_and_loaded_from_a_folder_and_a_file(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save(tmp_path)
    for source in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        back = load_tokenizer(source)
        assert back.encode(TEXT) == tokenizer.encode(TEXT)
        assert back.eos_token_id == 0


def test_the_end_of_a_text_is_found_as_transformers_writes_it(tmp_path: Path) -> None:
    byte_level().save(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": {"content": "<|endoftext|>", "special": True}}))
    assert load_tokenizer(tmp_path).eos_token_id == 0
    settings.write_text(json.dumps({"eos_token": None}))
    assert load_tokenizer(tmp_path).eos_token_id is None
    settings.unlink()
    assert load_tokenizer(tmp_path).eos_token_id is None
    for wrong in ("</s>", 3, {"content": 3}, []):
        settings.write_text(json.dumps({"eos_token": wrong}))
        with pytest.raises(CheckpointError, match="which the tokenizer has not"):
            load_tokenizer(tmp_path)


def test_padding_and_truncation_of_training_are_switched_off(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer._library.enable_truncation(3)
    tokenizer._library.enable_padding(length=100)
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(TEXT) == byte_level().encode(TEXT)


def test_a_checkpoint_without_tokenizer_says_whose_to_use(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="EleutherAI/gpt-neox-20b") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_tokens_and_texts_that_are_none() -> None:
    tokenizer = byte_level()
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode(tokenizer.encode("a\udc80b")) == "a?b"
    assert tokenizer.decode([10**6]) == ""
    with pytest.raises(ArgumentError, match="the token -1"):
        tokenizer.decode([-1])


def test_damaged_files_give_one_line(tmp_path: Path) -> None:
    byte_level().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = path.read_bytes()
    draw = random.Random(0)
    damaged = [content[:cut] for cut in range(0, len(content) - 1, len(content) // 40)]
    damaged += [b"{}", b"[]", b"\xff\xfe", b"[" * 10**5, b'{"model":' * 10**5, b"null"]
    for _ in range(60):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] = draw.randrange(256)
        damaged.append(bytes(flipped))
    lines = []
    for text in damaged:
        path.write_bytes(text)
        try:
            load_tokenizer(tmp_path).encode(TEXT)
        except CheckpointError as error:
            lines.append(str(error))
    assert len(lines) > 46
    assert all(line.startswith(str(path)) and "\n" not in line for line in lines)


@pytest.mark.parametrize("target", ["nowhere", "/dev/zero", "tokenizer.json", "fifo"])
def test_links_pipes_and_devices_are_refused(tmp_path: Path, target: str) -> None:
    path = tmp_path / "tokenizer.json"
    if target == "fifo":
        if not hasattr(os, "mkfifo"):
            pytest.skip("this system has no named pipes; nothing to do")
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_level().save(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'statescan\[models\]'"):
        load_tokenizer(tmp_path)
