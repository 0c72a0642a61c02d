"""Classifier-free guidance: Sanchez et al. 2023, "Stay on topic with Classifier-Free Guidance",
https://arxiv.org/abs/2306.17806.

    log p  =  log p_uncond  +  scale * (log p_cond - log p_uncond)

The conditional side is the prompt and what was generated; the unconditional side is the negative prompt (without one: the
prompt's last token) and what was generated. Both sides of all rows go into one `llama_decode`: the unconditional rows live
in a `companion` of the call's cache, which follows it through every reorder, crop and repeat. So guidance works under
every loop, and whatever a loop asks the model for, the unconditional logits of the same columns are there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LogitsProcessor

from ..cache import LlamaCppCache
from ..engine import Usage
from ..errors import InvalidInputError
from ..rows import Feed

__all__ = ["Guidance", "GuidanceProcessor", "check_scale"]


class Guidance:
    """The unconditional side of one `generate()` call.

    `negative_ids` int64 `(1 or rows, length)` and its mask, or `None`. It lives as long as the call: `close` leaves the
    caller's cache as if there had been no guidance, and its own sequences as candidates for prefix reuse.
    """

    def __init__(self, model: Any, negative_ids: torch.Tensor | None, negative_mask: torch.Tensor | None) -> None:
        self._model = model
        if negative_ids is not None:
            negative_ids, negative_mask = _left_padded(negative_ids, negative_mask)
        self._negative = None if negative_ids is None else _read(model, negative_ids, negative_mask)
        self._negative_ids, self._negative_mask = negative_ids, negative_mask
        self._cache: LlamaCppCache | None = None
        self._prompt_columns = 0
        self._ends = np.zeros(0, np.intp)
        self._logits = np.zeros((0, 0, 0), np.float32)

    def guides(self, cache: LlamaCppCache) -> bool:
        """Whether `cache` is that of the call; the first one that is asked about is."""
        if self._cache is None:
            self._cache = cache
        return self._cache is cache

    def feed(
        self, new: Feed, past_mask: npt.NDArray[np.bool_] | None, usage: Usage
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
        """As `LlamaCppCache.feed`, with the unconditional rows in the same decodes."""
        cache = self._cache
        assert cache is not None
        past = cache.get_seq_length()
        first = cache.companion is None
        if first:
            beside = self._start(new)
            cache.companion = LlamaCppCache(self._model)
        else:
            beside = Feed(new.ids, None, new.mask, new.kept, new.n_rows, new.n_columns)
        try:
            logits, hidden, theirs = cache.feed_beside(new, past_mask, usage, beside)
        except BaseException:
            if first:
                self.close()
            raise
        self._prompt_columns = past + new.n_columns if first else self._prompt_columns
        self._ends = np.array([past + new.n_columns]) if first else past + new.kept + 1
        self._logits = theirs
        return logits, hidden

    def follow(self, tokens: npt.NDArray[np.int32], usage: Usage) -> None:
        """The conditional rows went on by themselves: let the unconditional ones take `tokens`, int32 `(rows,)`, too."""
        cache = self._cache
        if cache is None or cache.companion is None:
            return
        new = Feed(tokens[:, None], None, None, np.zeros(1, np.intp), len(tokens), 1)
        self._logits, _ = cache.companion.feed(new, None, usage)
        self._ends = np.array([cache.get_seq_length()])

    def logits(self, input_ids: torch.Tensor, prompt: int) -> torch.Tensor:
        """The unconditional logits for the token after `input_ids` `(rows, length)`: float32 `(rows, n_vocab)`.

        `prompt` is the length `input_ids` had at the beginning of the call.
        """
        column = self._prompt_columns + input_ids.shape[1] - prompt
        at = np.flatnonzero(self._ends == column)
        if len(at) and len(self._logits) == len(input_ids):
            return torch.from_numpy(self._logits[:, at[-1]])
        return self._from_the_beginning(input_ids, prompt)

    def close(self) -> None:
        if self._cache is not None and self._cache.companion is not None:
            self._cache.companion.close()
            self._cache.companion = None

    def _start(self, new: Feed) -> Feed:
        """The unconditional side's prompt, for the rows of the conditional one."""
        if self._negative is None:
            if new.ids is None:
                raise InvalidInputError(
                    "guidance without a negative prompt starts from the prompt's last token, and inputs_embeds has none: "
                    "pass negative_prompt_ids"
                )
            last = np.full(new.n_rows, -1) if new.mask is None else new.n_columns - 1 - new.mask[:, ::-1].argmax(axis=1)
            return Feed(new.ids[np.arange(new.n_rows), last][:, None], None, None, np.zeros(1, np.intp), new.n_rows, 1)
        negative = self._negative
        times = _times(new.n_rows, negative.n_rows)
        assert negative.ids is not None
        mask = None if negative.mask is None else negative.mask.repeat(times, axis=0)
        return Feed(negative.ids.repeat(times, axis=0), None, mask, negative.kept, new.n_rows, negative.n_columns)

    def _from_the_beginning(self, input_ids: torch.Tensor, prompt: int) -> torch.Tensor:
        """For loops that keep no cache (`use_cache=False`)."""
        rows = len(input_ids)
        if self._negative_ids is None:
            start, mask = input_ids[:, prompt - 1 : prompt], None
        else:
            times = _times(rows, len(self._negative_ids))
            start = self._negative_ids.repeat_interleave(times, dim=0).to(input_ids.device)
            mask = self._negative_mask
        text = torch.cat([start, input_ids[:, prompt:]], dim=1)
        if mask is not None:
            mask = mask.repeat_interleave(times, dim=0).to(input_ids.device)
            mask = torch.cat([mask, torch.ones_like(text[:, start.shape[1] :], dtype=mask.dtype)], dim=1)
        answer: torch.Tensor = self._model(text, attention_mask=mask, logits_to_keep=1, use_cache=False).logits[:, -1]
        return answer


class GuidanceProcessor(LogitsProcessor):  # type: ignore[misc]
    """Combines the two sides; stands where transformers puts its own, in front of all other processors."""

    def __init__(self, scale: float, guidance: Guidance, request: Any) -> None:
        self.scale, self._guidance, self._request = scale, guidance, request

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` are logits or log-probabilities `(rows, n_vocab)`; the answer is not normalised."""
        conditional = torch.log_softmax(scores.float(), dim=-1)
        other = self._guidance.logits(input_ids, self._request.input_length).to(scores.device)
        unconditional = torch.log_softmax(other, dim=-1)
        return self.scale * (conditional - unconditional) + unconditional


def _times(rows: int, given: int) -> int:
    times, rest = divmod(rows, given)
    if rest or not times:
        raise InvalidInputError(
            f"negative_prompt_ids has {given} rows and the input {rows}: give one negative prompt, or one for each prompt"
        )
    return times


def check_scale(scale: Any) -> None:
    """Raises `InvalidInputError` for what is no number."""
    if scale is not None and (not isinstance(scale, (int, float)) or not math.isfinite(scale)):
        raise InvalidInputError(f"guidance_scale={scale!r} is no number; 1 is no guidance, more follows the prompt closer")


def _left_padded(ids: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The negative prompts with their padding in front, because text is going to follow them."""
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.numel():
        what = f"of shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else f"a {type(ids).__name__}"
        raise InvalidInputError(f"negative_prompt_ids is {what}; a tensor of ids (1 or rows, length) is needed")
    if mask is None:
        return ids, None
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        what = f"of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
        raise InvalidInputError(
            f"negative_prompt_attention_mask is {what}; a tensor of the shape of negative_prompt_ids, {tuple(ids.shape)}, is "
            "needed"
        )
    real = mask != 0
    if not real.any(dim=1).all():
        row = int((~real.any(dim=1)).nonzero()[0])
        raise InvalidInputError(f"row {row} of negative_prompt_ids has no token at all: its attention mask is all zeros")
    order = torch.argsort(real.long(), dim=1, stable=True)
    return ids.gather(1, order), mask.gather(1, order)


def _read(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> Feed:
    empty = LlamaCppCache(model)
    try:
        feed: Feed = model.read_input(ids, None, mask, empty, 1)[0]
        return feed
    except InvalidInputError as error:
        raise InvalidInputError(f"the negative prompt: {error}") from error
    finally:
        empty.close()
