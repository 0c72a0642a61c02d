from pathlib import Path

import modules.shared as shared
import torch
import transformers
from modules.text_generation import get_reply_from_output_ids
from transformers import LogitsProcessor


class _StopEverythingStoppingCriteria(transformers.StoppingCriteria):
    def __call__(self, input_ids, _scores):
        return shared.stop_everything


class Stream(transformers.StoppingCriteria):
    """Stops nothing: shows what it is called with."""

    def __init__(self, callback_func=None):
        self.callback_func = callback_func

    def __call__(self, input_ids, scores):
        if self.callback_func is not None:
            self.callback_func(input_ids[0])
        return False


class LogitsBiasProcessor(LogitsProcessor):
    def __init__(self, logit_bias=None):
        self.keys = [int(key) for key in logit_bias or {}]
        self.values = torch.tensor(list((logit_bias or {}).values()), dtype=torch.float, device=shared.model.device)

    def __call__(self, input_ids, logits):
        if self.keys:
            logits[0, self.keys] += self.values
        return logits


class LogprobProcessor(LogitsProcessor):
    """Writes down the best tokens of each call: as many entries as there were calls."""

    def __init__(self, logprobs=None):
        self.logprobs = logprobs
        self.token_alternatives = {}
        self.token_alternatives_history = []

    def __call__(self, input_ids, logits):
        if self.logprobs is not None:
            values, ids = torch.topk(torch.log_softmax(logits, dim=1), k=self.logprobs)
            texts = [get_reply_from_output_ids([token]) for token in ids[0]]
            self.token_alternatives = dict(zip(texts, values[0].tolist(), strict=True))
            self.token_alternatives_history.append(self.token_alternatives)
        return logits


def load_tokenizer(model_name, tokenizer_dir=None):
    return transformers.AutoTokenizer.from_pretrained(Path(tokenizer_dir or Path(shared.args.model_dir) / model_name))


def load_model_HF(model_name):
    folder = Path(shared.args.model_dir) / model_name
    if not folder.is_dir():
        raise OSError(f"{folder} is no folder with a model of transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder)
