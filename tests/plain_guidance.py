"""Classifier-free guidance as the paper defines it, to compare with: nothing is cached, nothing is shared."""

from __future__ import annotations

from typing import Any

import torch

from transformers_llamacpp.decoding import GuidanceProcessor


class PlainGuidance(GuidanceProcessor):
    """Evaluates the unconditional side from its beginning for every row and token. `prompt` is the length of the input,
    `negative` has one list of ids for every so many rows; `None` starts from the last token of the prompt.

    Group beams apply a `GuidanceProcessor` before their penalty, so this is one; it shares nothing else.
    """

    def __init__(self, model: Any, scale: float, prompt: int, negative: list[list[int]] | None) -> None:
        self.model, self.scale, self.prompt, self.negative = model, scale, prompt, negative

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        other = []
        for row, ids in enumerate(input_ids.tolist()):
            start = ids[self.prompt - 1 : self.prompt]
            if self.negative is not None:
                start = self.negative[row * len(self.negative) // len(input_ids)]
            text = torch.tensor([start + ids[self.prompt :]])
            other.append(self.model(text, logits_to_keep=1, use_cache=False).logits[0, -1])
        unconditional = torch.log_softmax(torch.stack(other), dim=-1)
        conditional = torch.log_softmax(scores, dim=-1)
        return self.scale * (conditional - unconditional) + unconditional
