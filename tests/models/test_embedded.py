# SPDX-License-Identifier: Apache-2.0
"""The model that ships: it is there, it has learned, and its card tells the truth about it."""

import re

import pytest
import torch

from statescan.generation import generate
from statescan.models import ByteTokenizer, MambaLM, load_embedded
from statescan.models.embedded import embedded_card, embedded_directory
from statescan.training import bits_per_byte

# Psalm 23:1-3, which lies in the part that was learned from.
VERSES = (
    "The LORD is my shepherd; I shall not want.\n"
    "He maketh me to lie down in green pastures: he leadeth me beside the still waters.\n"
    "He restoreth my soul: he leadeth me in the paths of righteousness for his name's sake.\n"
)


@pytest.fixture(scope="module")
def model() -> MambaLM:
    return load_embedded()[0]


def test_it_predicts_its_corpus_and_not_noise(model: MambaLM) -> None:
    verses = torch.tensor(ByteTokenizer().encode(VERSES), dtype=torch.uint8)
    noise = verses[torch.randperm(len(verses), generator=torch.Generator().manual_seed(0))]
    assert bits_per_byte(model, verses, lanes=1) < 2.2
    assert bits_per_byte(model, noise, lanes=1) > 5


def test_it_writes_words(model: MambaLM) -> None:
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode("And the LORD said unto ")
    (text,) = generate(model, [prompt], 60, tokenizer=tokenizer).texts
    assert re.fullmatch(r"[A-Za-z ,.;:'\n]+", text)
    assert " the " in text or " of " in text


def test_the_card_and_the_files_agree(model: MambaLM) -> None:
    card = embedded_card()
    size = (embedded_directory() / "model.safetensors").stat().st_size
    assert f"{model.num_parameters():,}" in card
    assert f"{size:,} bytes" in card
    assert "statescan train" in card
    assert re.search(r"[0-9.]+ bits per byte", card)
