"""transformers' logits processors at the cost of what they decide, not of the vocabulary.

    chain = Chain(processors)                     # once per generate() call
    candidates = chain.run(input_ids, logits)     # each step: dense, or the few tokens that are left
    scores = chain(input_ids, scores)             # or a tensor, as a LogitsProcessorList gives it

The same tokens as transformers' own keep, and the same scores: a truncation finds its threshold without a sort of the
vocabulary, what follows works on the tokens that are left, and where a decision lies within rounding, transformers' arithmetic
makes it. Everything runs on the calling thread.
"""

from __future__ import annotations

from .warping.chain import Chain
from .warping.rows import Few, Scores

__all__ = ["Chain", "Few", "Scores"]
