"""Makes ``open.json`` (see README.md): ``python make_open.py SmolLM2-135M-Instruct.Q4_1.gguf > open.json``.

Runs with transformers 4.46.3, the last release with these decoding methods inside. `tie_at` was added by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [
    "The history of the Roman Empire begins with",
    "<|im_start|>user\nWrite a short poem about the sea.<|im_end|>\n<|im_start|>assistant\n",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
]
NEGATIVE = "You are a rude and unhelpful assistant."
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy_penalty": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "contrastive_k4": {"penalty_alpha": 0.6, "top_k": 4},
    "contrastive_k8": {"penalty_alpha": 0.3, "top_k": 8},
    "cfg_1_5": {"do_sample": False, "guidance_scale": 1.5},
    "cfg_neg": {"do_sample": False, "guidance_scale": 2.0},
    "beam4": {"num_beams": 4, "do_sample": False},
    "beam3_len": {
        "num_beams": 3,
        "do_sample": False,
        "length_penalty": 2.0,
        "early_stopping": True,
        "no_repeat_ngram_size": 2,
    },
    "group_beam": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "do_sample": False},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 5},
    "dola": {"do_sample": False, "dola_layers": "high", "repetition_penalty": 1.2},
}


def main() -> None:
    gguf = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = load(gguf)
    cases = [
        run_case(model, tokenizer, prompt, mode, kwargs) for prompt in PROMPTS for mode, kwargs in MODES.items()
    ]
    losses = [{"text": prompt, "loss": loss(model, tokenizer, prompt)} for prompt in PROMPTS]
    result = {"transformers": transformers.__version__, "model": gguf.name, "cases": cases, "losses": losses}
    json.dump(result, sys.stdout, indent=1)


def load(gguf: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, torch_dtype=torch.float32)
    model.config.tie_word_embeddings = True  # what 4.46.3 does not read out of a GGUF
    model.tie_weights()
    return model.eval()


def run_case(model: Any, tokenizer: Any, prompt: str, mode: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    ids = encode(tokenizer, prompt)
    case: dict[str, Any] = {"prompt": prompt, "prompt_ids": ids[0].tolist()}
    call = dict(kwargs)
    if mode == "cfg_neg":
        negative = encode(tokenizer, NEGATIVE)
        case |= {"negative_prompt": NEGATIVE, "negative_prompt_ids": negative[0].tolist()}
        call["negative_prompt_ids"] = negative
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=64,
        return_dict_in_generate=True,
        output_logits=True,
        **call,
    )
    new_ids = output.sequences[0, ids.shape[1] :].tolist()
    case |= {"new_ids": new_ids, "text": tokenizer.decode(new_ids), "kwargs": kwargs, "mode": mode}
    plain = "num_beams" not in kwargs and "penalty_alpha" not in kwargs
    case["min_margin"] = min(margin(scores) for scores in output.logits) if plain else None
    return case


def encode(tokenizer: Any, text: str) -> torch.Tensor:
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


def margin(scores: torch.Tensor) -> float:
    best = scores[0].topk(2).values
    return float(best[0] - best[1])


def loss(model: Any, tokenizer: Any, prompt: str) -> float:
    ids = encode(tokenizer, prompt)
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)


if __name__ == "__main__":
    main()
