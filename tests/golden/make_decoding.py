"""Makes ``decoding.json`` (see README.md): ``python make_decoding.py SmolLM2-135M-Instruct.Q4_1.gguf > decoding.json``.

As ``make_open.py``, with transformers 4.46.3: batches with padding, end tokens, processors and constraints, which the
open cases leave out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from make_open import PROMPTS, encode, load
from transformers import AutoTokenizer
from transformers.generation import utils

ROMAN, SEA, CODE = range(3)
DOT, COMMA = 30, 28
END = {"eos_token_id": DOT, "pad_token_id": 0}
NO_END = {"eos_token_id": 2, "pad_token_id": 0}
CONTRASTIVE: dict[str, Any] = {"penalty_alpha": 0.6, "top_k": 4}
GROUPS: dict[str, Any] = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}
CASES: list[tuple[str, list[int], dict[str, Any]]] = [
    ("contrastive batch", [ROMAN, SEA, CODE], {**CONTRASTIVE, **NO_END}),
    ("contrastive ends", [ROMAN, CODE, SEA], {**CONTRASTIVE, **END, "top_k": 5}),
    ("contrastive processors", [ROMAN, CODE], {**CONTRASTIVE, **NO_END, "repetition_penalty": 1.3,
                                               "no_repeat_ngram_size": 2, "bad_words_ids": [[COMMA]]}),
    ("contrastive two", [SEA], {**NO_END, "penalty_alpha": 0.2, "top_k": 2, "min_new_tokens": 20}),
    ("contrastive fifty", [ROMAN], {**NO_END, "penalty_alpha": 0.5}),
    ("groups batch", [ROMAN, CODE], {**GROUPS, **END, "num_return_sequences": 3}),
    ("groups of three", [ROMAN, SEA], {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 1.2, **END,
                                       "num_return_sequences": 6, "length_penalty": 0.5}),
    ("groups of one", [CODE], {"num_beams": 3, "num_beam_groups": 3, "diversity_penalty": 0.8, **NO_END,
                               "num_return_sequences": 3}),
    ("groups early", [ROMAN, SEA], {**GROUPS, **END, "early_stopping": True, "length_penalty": -1.0}),
    ("groups never", [ROMAN, SEA], {**GROUPS, **END, "early_stopping": "never", "num_return_sequences": 2}),
    ("groups processors", [ROMAN], {**GROUPS, **NO_END, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2,
                                    "num_return_sequences": 4}),
    ("constrained phrase", [ROMAN], {"num_beams": 4, **NO_END, "force_words_ids": [" Carthage was destroyed"],
                                     "num_return_sequences": 2}),
    ("constrained two", [ROMAN, SEA], {"num_beams": 5, **END, "force_words_ids": [" blue", " Greek gods"]}),
    ("constrained choice", [SEA, ROMAN], {"num_beams": 4, **END, "force_words_ids": [[" whales", " dolphins", " fish"],
                                                                                     " storm"]}),
    ("constrained early", [CODE, ROMAN], {"num_beams": 3, **END, "force_words_ids": [" memory"],
                                          "early_stopping": True, "num_return_sequences": 3}),
    ("constrained too much", [ROMAN], {"num_beams": 2, **NO_END, "max_new_tokens": 3, "force_words_ids": [
        " a very long phrase that does not fit"]}),
]  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    gguf = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = load(gguf)
    result = {"transformers": transformers.__version__, "model": gguf.name,
              "cases": [run(model, tokenizer, *case) for case in CASES]}  # fmt: skip
    json.dump(result, sys.stdout)


def run(model: Any, tokenizer: Any, name: str, prompts: list[int], kwargs: dict[str, Any]) -> dict[str, Any]:
    texts = [encode(tokenizer, PROMPTS[prompt])[0].tolist() for prompt in prompts]
    width = max(map(len, texts))
    ids = [[0] * (width - len(text)) + text for text in texts]
    mask = [[0] * (width - len(text)) + [1] * len(text) for text in texts]
    call = {"max_new_tokens": 24, "do_sample": False} | kwargs
    if "force_words_ids" in call:
        call["force_words_ids"] = [words(tokenizer, word) for word in call["force_words_ids"]]
    gaps: list[float] = []
    ranking = utils._ranking_fast
    utils._ranking_fast = watch(ranking, gaps)
    try:
        output = model.generate(
            torch.tensor(ids), attention_mask=torch.tensor(mask), return_dict_in_generate=True, output_scores=True,
            **call,
        )  # fmt: skip
    finally:
        utils._ranking_fast = ranking
    case = {"name": name, "ids": ids, "mask": mask, "kwargs": call, "new_ids": output.sequences[:, width:].tolist()}
    if "sequences_scores" in output:
        case["sequences_scores"] = output.sequences_scores.tolist()
    else:
        case["min_gap"] = min(gaps)
    return case


def words(tokenizer: Any, word: Any) -> Any:
    if isinstance(word, list):
        return [words(tokenizer, one) for one in word]
    return encode(tokenizer, word)[0].tolist()


def watch(ranking: Any, gaps: list[float]) -> Any:
    """The smallest distance between the best candidate and the next, over all steps and rows (ended ones too)."""

    def ranked(context: Any, hidden: Any, probabilities: Any, mask: Any, alpha: float, k: int) -> Any:
        cosines = torch.nn.functional.cosine_similarity(context, hidden, dim=2)
        penalty = cosines.masked_fill(mask == 0, -torch.inf).amax(1)
        scores = ((1 - alpha) * probabilities.view(-1) - alpha * penalty).view(-1, k)
        best = scores.topk(2).values
        gaps.append(float((best[:, 0] - best[:, 1]).min()))
        return ranking(context, hidden, probabilities, mask, alpha, k)

    return ranked


if __name__ == "__main__":
    main()
