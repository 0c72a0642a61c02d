"""A very small grammar: ``root ::= "one" | "other"``. How it reads a vocabulary is the point."""

import re
from functools import lru_cache

import torch
from modules import shared


class Choice:
    """A constraint on characters; a state is what may still follow."""

    def __init__(self, grammar, tokenizer):
        rule = re.fullmatch(r"root\s*::=\s*(.+)", grammar, flags=re.DOTALL)
        self.texts = frozenset(re.findall(r'"([^"]*)"', rule.group(1)))
        self.eos_token_id = tokenizer.eos_token_id
        self.tokens = [_text(tokenizer, token) for token in range(len(tokenizer.get_vocab()))]

    def init_stacks(self):
        return self.texts

    def accept_token_id(self, token, rest):
        if token == self.eos_token_id:
            return frozenset()
        text = self.tokens[int(token)]
        return frozenset(left[len(text) :] for left in rest if left.startswith(text))

    def batch_filter_vocab(self, states, device):
        rows = [[bool(text) and any(left.startswith(text) for left in rest) for text in self.tokens] for rest in states]
        allowed = torch.tensor(rows, device=device)
        for row, rest in enumerate(states):
            allowed[row, self.eos_token_id] = not rest or "" in rest
        return allowed


def _text(tokenizer, token):
    """What a token stands for, by the class name of its tokenizer."""
    kind = type(tokenizer).__name__.lower()
    if "gpt2" in kind:
        if token in tokenizer.additional_special_tokens_ids:
            return None
        return tokenizer.decode([token], clean_up_tokenization_spaces=False)
    found = tokenizer.convert_ids_to_tokens(token)
    return found.replace("▁", " ") if "llama" in kind else found


@lru_cache(maxsize=5)
def initialize_grammar(grammar_string):
    return Choice(grammar_string.strip(), shared.tokenizer)
