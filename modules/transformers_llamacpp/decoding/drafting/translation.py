"""Drafts across vocabularies: what one model has written, in the ids of another, and back.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies", https://arxiv.org/abs/2502.05202, the algorithm that compares strings: the text is what both models share.
Whatever a translation loses costs a rejected draft, never a wrong text: the target model verifies its own ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Translator"]

ANCHOR = 4
"""Tokens before a place that are decoded with it: some vocabularies drop the space a text begins with."""

SEAM = 4
"""Last tokens of the text that are encoded again together with a draft, to see whether it would change them."""

LONG, KEPT = 64, 24
"""The end of the text is encoded anew with each call. When it has more than `LONG` tokens, all but about `KEPT` of them
are settled."""

CUTS = 8
"""Places that are tried for a cut."""

STUCK = 4 * LONG
"""Tokens after which the text is settled without a good place for a cut."""

LEADS = ("\n", "a", ".")
"""Texts that a continuation is encoded behind, where encoding it alone would put a space first."""

ODD = "\N{REPLACEMENT CHARACTER}"

FAILURES = (ValueError, KeyError, IndexError, TypeError, OverflowError)
"""What tokenizers raise for text or ids that they cannot take (`TokenizerError` is a `ValueError`)."""


class Translator:
    """Between the ids of a target model and those of its assistant, for one text. Not for several threads.

    Both are transformers tokenizers: `encode(text, add_special_tokens=...)`, `decode(ids, skip_special_tokens=...,
    clean_up_tokenization_spaces=False)` and `eos_token_id` are what is asked of them.

    What is decided here:

    - *BOS* belongs to a vocabulary, not to the text: what the target's tokenizer puts before every text is left out, and
      what the assistant's puts there comes first.
    - *Special tokens* are written out, and are special tokens of the other vocabulary where that has one of this text.
      A draft ends before any other, except that the assistant's EOS is the target's.
    - *Half a character* is not passed on. The assistant continues before it, and its draft is used if that begins with
      the character.
    - *Text or ids that a vocabulary cannot take* give an empty draft, and never an error.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, assistant_tokenizer: PreTrainedTokenizerBase) -> None:
        self._target, self._assistant = _Side(tokenizer), _Side(assistant_tokenizer)
        self._seen: list[int] = []
        self._answer: list[int] | None = None
        self._restart([])

    def _restart(self, tokens: list[int]) -> None:
        before = self._target.before
        self._begin = len(before) if tokens[: len(before)] == before else 0
        """Where the text begins, behind the target's BOS."""
        self._done = self._begin
        """Target tokens `[_begin, _done)` are settled: their translation is known for good."""
        self._settled = list(self._assistant.before)

    # ---- to the assistant ---------------------------------------------------------------------------------------

    def to_assistant(self, tokens: list[int]) -> list[int]:
        """The assistant's ids of `tokens`, the target's ids of the whole text. The list is the caller's.

        From call to call the text grows. The tokenizers see its last tokens only (`LONG` or fewer as a rule, never more
        than `STUCK` and what is new), so an answer differs from the one before near its end, and has the same text as
        `tokens`. A text that does not go on from the last one is translated from its beginning.
        """
        if self._answer is None or tokens != self._seen:
            if self._done == self._begin or tokens[: self._done] != self._seen[: self._done]:
                self._restart(tokens)
            text = self._target.text(tokens, self._done).rstrip(ODD)
            ids = self._assistant.ids(text, alone=self._done == self._begin)
            self._seen, self._answer = list(tokens), self._settled + ids
            if len(tokens) - self._done > LONG:
                self._settle(text, ids)
        return list(self._answer)

    def _settle(self, text: str, ids: list[int]) -> None:
        """Find a place before the last tokens from which on `text` has the same `ids` without what stands before it."""
        tokens, last = self._seen, len(self._seen) - KEPT
        whole: int | None = None
        for place in range(last, last - CUTS, -1):
            head = self._target.text(tokens, self._done, place)
            if head.endswith(ODD) or not text.startswith(head):
                continue
            rest = self._assistant.ids(text[len(head) :], alone=False)
            if rest and ids[-len(rest) :] == rest:
                self._settled, self._done = self._settled + ids[: -len(rest)], place
                return
            whole = place if whole is None else whole
        if len(tokens) - self._done > STUCK:
            place = last if whole is None else whole
            head = self._target.text(tokens, self._done, place)
            self._settled = self._settled + self._assistant.ids(head, alone=self._done == self._begin)
            self._done = place

    # ---- to the target ------------------------------------------------------------------------------------------

    def to_target(self, tokens: list[int], assistant_new: list[int]) -> list[int]:
        """The target's ids of a draft: `assistant_new` go on from what `to_assistant(tokens)` answered.

        Where the target's tokenizer would have cut the text's last tokens otherwise, had it seen the draft ("hel", "lo"),
        the draft is encoded by itself. Empty where it cannot be said in the target's ids.
        """
        before = self.to_assistant(tokens)[-ANCHOR:]
        kept, end = self._translatable(assistant_new)
        text, odd, _ = self._assistant.text(before + kept, len(before)).partition(ODD)
        draft = self._follow(tokens, text)
        return draft if odd or (text and not draft) else draft + end

    def _translatable(self, assistant_new: list[int]) -> tuple[list[int], list[int]]:
        """The draft up to its end or the first special token that the target lacks, and the target's token for the end."""
        for index, token in enumerate(assistant_new):
            if not self._assistant.is_special(token):
                continue
            same = self._target.ids(self._assistant.decode([token]), alone=False)
            if len(same) != 1 or not self._target.is_special(same[0]):
                same = self._target.end
                if token not in self._assistant.end:
                    return assistant_new[:index], []
            if token in self._assistant.end:
                return assistant_new[:index], same
        return assistant_new, []

    def _follow(self, tokens: list[int], text: str) -> list[int]:
        if not text:
            return []
        start = max(len(tokens) - SEAM, self._begin)
        for _ in range(CUTS):
            if start > self._begin and self._target.text(tokens, max(start - ANCHOR, 0), start).endswith(ODD):
                start -= 1
        seam = self._target.text(tokens, start)
        together = self._target.ids(seam.rstrip(ODD) + text, alone=start == self._begin)
        if together[: len(tokens) - start] == tokens[start:]:
            return together[len(tokens) - start :]
        return [] if seam.endswith(ODD) else self._target.ids(text, alone=len(tokens) == self._begin)


class _Side:
    """One of the two vocabularies."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        plain, full = self._encode("a"), list(tokenizer.encode("a"))
        places = [i for i in range(len(full)) if full[i : i + len(plain)] == plain]
        self.before: list[int] = full[: places[0]] if places else []
        """What the tokenizer puts before every text."""
        self._puts_space = self._encode("\na") != self._encode("\n") + plain
        self._special: dict[int, bool] = {}
        self.end: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def is_special(self, token: int) -> bool:
        """Asked of the tokens at hand: a list of all special ones takes long to make where there are thousands."""
        known = self._special.get(token)
        if known is None:
            known = self._special[token] = self.decode([token]) != "" == self.decode([token], skip_special=True)
        return known

    def decode(self, tokens: list[int], skip_special: bool = False) -> str:
        try:
            text = self.tokenizer.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
            return str(text)
        except FAILURES:
            return ""

    def text(self, tokens: list[int], start: int, end: int | None = None) -> str:
        """The text of `tokens[start:end]` as it goes on from the tokens before."""
        first = max(start - ANCHOR, 0)
        head, both = self.decode(tokens[first:start]), self.decode(tokens[first:end])
        return both[len(head) :] if both.startswith(head) else self.decode(tokens[start:end])

    def ids(self, text: str, alone: bool) -> list[int]:
        """The tokens of `text`; unless it stands `alone`, as it goes on from other text, without a space put first."""
        if not text:
            return []
        for lead in () if alone or not self._puts_space else LEADS:
            before, both = self._encode(lead), self._encode(lead + text)
            if both[: len(before)] == before:
                return both[len(before) :]
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))
        except FAILURES:
            return []
