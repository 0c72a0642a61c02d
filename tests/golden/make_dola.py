"""Makes ``dola.json`` (see README.md): ``python make_dola.py SmolLM2-135M-Instruct.Q4_1.gguf > dola.json``.

Runs with transformers 4.46.3, beside ``make_open.py``. One row a call: in a batch 4.46 takes one layer for all rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from make_open import load

PROMPTS = [
    [504, 1463, 282, 260, 4469, 7057, 5634, 351],  # The history of the Roman Empire begins with
    [1604, 3987, 46477, 24, 94],
    [2683, 359, 253, 30879, 284, 551, 44222, 11173, 30],
]
SETTINGS: list[dict[str, Any]] = [
    {"dola_layers": "low"},
    {"dola_layers": "high"},
    {"dola_layers": [0, 3, 29]},
    {"dola_layers": [12]},
    {"dola_layers": "low", "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    {"dola_layers": [12, 20], "do_sample": True, "top_k": 0},
    {"dola_layers": "high", "do_sample": True, "temperature": 5.0, "top_p": 0.9},
]
SEED = 7


def main() -> None:
    model = load(Path(sys.argv[1]))
    cases = [run(model, prompt, settings) for prompt in PROMPTS for settings in SETTINGS]
    json.dump({"transformers": transformers.__version__, "seed": SEED, "cases": cases}, sys.stdout)


def run(model: Any, prompt: list[int], settings: dict[str, Any]) -> dict[str, Any]:
    kwargs = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 2, "eos_token_id": 2} | settings
    torch.manual_seed(SEED)
    output = model.generate(torch.tensor([prompt]), **kwargs)
    return {"ids": prompt, "kwargs": kwargs, "new_ids": output[0, len(prompt) :].tolist()}


if __name__ == "__main__":
    main()
