"""The prompts: English text of exactly so many tokens, another one for each row."""

from __future__ import annotations

import random
from pathlib import Path

from ..errors import LlamaCppError
from ..native.vocab import NativeVocab, open_vocab

__all__ = ["prompts"]

SENTENCES = (
    "The ship left the harbour at dawn, and the captain hoped to reach the islands before the storm.",
    "Photosynthesis turns water and carbon dioxide into sugar with the energy of sunlight.",
    "In the old town a clockmaker repaired the things that nobody else would touch.",
    "Most rivers of the country rise in the mountains and end in the shallow western sea.",
    "She opened the letter twice before she understood what her brother had written.",
    "A good loaf of bread needs flour, water, salt, yeast and more patience than work.",
    "The first computers filled whole rooms and were used by a few scientists.",
    "Nobody on board knew what the wooden boxes in the hold contained.",
    "To sort a list, take the first item and put the smaller ones before it.",
    "The library opens at nine in the morning; newspapers must be read on the second floor.",
    "When the train arrived, the musicians were still looking for their instruments.",
    "Under the roof of the barn a pair of swallows had built their nest again.",
    "The committee met every Tuesday and agreed on nothing but the date of the next meeting.",
    "Stars of this kind burn for ten billion years, then swell and become dim and red.",
    "He asked for three rooms with a view, and was given one without a window.",
    "Rain fell on the vineyards for a week, which was good for the ducks alone.",
)


def prompts(file: Path, length: int, rows: int) -> list[list[int]]:
    """`rows` lists of `length` token ids. The sentences come in another order in each row and each time round, so that no
    text only repeats itself; texts begin as the model was taught they do."""
    vocab = open_vocab(file)
    try:
        return [_prompt(vocab, length, row) for row in range(rows)]
    finally:
        vocab.close()


def _prompt(vocab: NativeVocab, length: int, row: int) -> list[int]:
    shuffled = random.Random(row)
    text = SENTENCES[row % len(SENTENCES)]
    ids = vocab.tokenize(text)
    while len(ids) < length:
        for _ in range(8):
            text += " " + " ".join(shuffled.sample(SENTENCES, len(SENTENCES)))
        longer = vocab.tokenize(text)
        if len(longer) <= len(ids):
            raise LlamaCppError(f"the vocabulary gives no text of {length} tokens")
        ids = longer
    return ids[:length]
