import math

from transformers import LogitsProcessor


class GrammarConstrainedLogitsProcessor(LogitsProcessor):
    """Follows one text: each call must bring one token more than the last."""

    def __init__(self, grammar_constraint):
        self.grammar_constraint = grammar_constraint
        self.last_size = None
        self.states = None

    def __call__(self, input_ids, scores):
        if self.last_size is None:
            self.states = [self.grammar_constraint.init_stacks() for _ in input_ids]
        elif len(input_ids[0]) == self.last_size + 1:
            pairs = zip(input_ids, self.states, strict=True)
            self.states = [self.grammar_constraint.accept_token_id(ids[-1], state) for ids, state in pairs]
        else:
            raise RuntimeError(f"{len(input_ids[0])} tokens after {self.last_size}: the grammar can only follow one text")
        scores[~self.grammar_constraint.batch_filter_vocab(self.states, scores.device)] = -math.inf
        self.last_size = len(input_ids[0])
        return scores
