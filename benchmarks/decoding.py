"""What each way of decoding costs against plain decoding, on this machine: the table in the README.

    python benchmarks/decoding.py F32.gguf Q4_0.gguf

Two files of the same model: guidance, contrastive search and prompt lookup run on both, and the second one drafts for the
first and the first for the second (a draft that cannot pay). Contenders take turns within one run, each prompt starts
cold (nothing reused, the assistant included), and a prompt's figure is the median of its rounds; the table has the median
of the prompts and, in brackets, the worst and the best. Ratios of one run can be compared with other runs; seconds cannot.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from bare import Bare
from transformers_llamacpp import LlamaCppConfig, LlamaCppForCausalLM

STORIES = (
    "The history of the Roman Empire begins with",
    "Photosynthesis is the process by which",
    "Once upon a time there was a small lighthouse, and its keeper",
    "def quicksort(items):\n    ",
    "To bake a good loaf of bread you need",
)

EDITS = (
    "The ship left the harbour at dawn. The wind was steady from the west, and the captain hoped to reach the islands "
    "before the storm. Nobody on board knew what the wooden boxes in the hold contained. At noon the cook served soup and "
    "bread, and the sailors told each other stories about the old lighthouse keeper.",
    "Photosynthesis takes place in the leaves of green plants. The plant takes in water through its roots and carbon dioxide "
    "through its leaves. With the energy of sunlight it turns them into sugar and oxygen. The sugar feeds the plant, and the "
    "oxygen goes into the air that animals and people breathe.",
    "Dear Anna, thank you for your letter. The weather here is warm and sunny, and we go to the beach every morning. Yesterday "
    "we visited the old town and ate fish at a small restaurant near the harbour. Tomorrow we will take the train to the "
    "mountains. I hope you are well. Best wishes, Tom",
    "The library opens at nine in the morning and closes at six in the evening. Books can be borrowed for three weeks. Late "
    "returns cost ten cents a day. Newspapers and magazines must be read in the reading room on the second floor. The "
    "computers in the basement are free for students of the university.",
    "The first computers filled whole rooms and were used by scientists and governments. In the 1970s small companies began to "
    "build computers for people at home. Twenty years later most offices had one on every desk. Today a telephone in a pocket "
    "is a thousand times faster than the machines that took people to the moon.",
)

Measured = tuple[float, Any]


def chat(model: Any, text: str) -> torch.Tensor:
    message = [{"role": "user", "content": f"Copy this text exactly:\n\n{text}"}]
    prompt = model.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return model.tokenizer(prompt, return_tensors="pt").input_ids


def generate(model: Any, ids: torch.Tensor, n: int, assistant: Any = None, **call: Any) -> Measured:
    """Seconds per generated token after the first one, and the statistics of the call."""
    model.forget()
    if assistant is not None:
        assistant.forget()
        call["assistant_model"] = assistant
    call = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False} | call
    model.generate(ids, attention_mask=torch.ones_like(ids), **call)
    stats = model.last_stats
    return stats.generate_seconds / (stats.new_tokens - 1), stats


def compare(
    prompts: list[torch.Tensor],
    rounds: int,
    plain: Callable[[torch.Tensor], Measured],
    other: Callable[[torch.Tensor], Measured],
) -> tuple[list[float], float | None]:
    """`plain / other` for each prompt, and the share of drafted tokens that was taken."""
    ratios, drafted, accepted = [], 0, 0
    for ids in prompts:
        mine, theirs = [], []
        for _ in range(rounds):
            theirs.append(plain(ids)[0])
            seconds, stats = other(ids)
            mine.append(seconds)
            if stats is not None:
                drafted, accepted = drafted + stats.drafted_tokens, accepted + stats.accepted_tokens
        ratios.append(statistics.median(theirs) / statistics.median(mine))
    return ratios, accepted / drafted if drafted else None


def row(name: str, ratios: list[float], accepted: float | None, goal: str, inverse: bool = False) -> str:
    values = sorted(1 / ratio for ratio in ratios) if inverse else sorted(ratios, reverse=True)
    taken = "" if accepted is None else f", {accepted:.0%} of drafts taken"
    line = f"| {name} | **{statistics.median(values):.2f}** ({values[-1]:.2f} … {values[0]:.2f}){taken} | {goal} |"
    print(line, flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("f32", help="the large file, a target for the small one's drafts")
    parser.add_argument("q4", help="the small file of the same model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each call")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    options = {"n_ctx": 2048, "n_threads": args.threads, "n_threads_batch": args.threads}
    models = {
        name: LlamaCppForCausalLM.from_pretrained(path, quantization_config=LlamaCppConfig(**options))
        for name, path in (("F32", args.f32), ("Q4_0", args.q4))
    }
    n, rounds = args.tokens, args.rounds
    print("| | measured, median (worst … best prompt) | goal |\n|---|---|---|")
    for (name, model), path in zip(models.items(), (args.f32, args.q4), strict=True):
        stories = [model.tokenizer(text, return_tensors="pt").input_ids for text in STORIES]
        edits = [chat(model, text) for text in EDITS]
        negative = model.tokenizer("You are a rude and unhelpful assistant.", return_tensors="pt").input_ids

        def plain(ids: torch.Tensor, model: Any = model) -> Measured:
            return generate(model, ids, n)

        def guided(ids: torch.Tensor, model: Any = model, negative: torch.Tensor = negative) -> Measured:
            return generate(model, ids, n, guidance_scale=1.5, negative_prompt_ids=negative)

        def lookup(ids: torch.Tensor, model: Any = model) -> Measured:
            return generate(model, ids, n, prompt_lookup_num_tokens=10)

        def plain_edit(ids: torch.Tensor, model: Any = model) -> Measured:
            return generate(model, ids, n, min_new_tokens=2)  # an edit ends where the text does

        def edit(ids: torch.Tensor, model: Any = model) -> Measured:
            return generate(model, ids, n, min_new_tokens=2, prompt_lookup_num_tokens=10)

        def contrastive(ids: torch.Tensor, model: Any = model) -> Measured:
            return generate(model, ids, n, penalty_alpha=0.6, top_k=4)

        bare = Bare(path, 2048, args.threads, n_seq=4)

        def four(ids: torch.Tensor, bare: Bare = bare) -> Measured:
            return bare.side_by_side(ids[0].tolist(), n, 4) / n, None

        goal = "≤ 1.6" if name == "F32" else "≤ 1.9"
        row(f"{name}: a step with guidance / a plain step", *compare(stories, rounds, plain, guided), goal, inverse=True)
        ratios = compare(stories, rounds, four, contrastive)
        row(f"{name}: a step of contrastive search, k = 4 / a bare 4-sequence decode", *ratios, "≤ 1.15", inverse=True)
        goal = "≥ 2.0" if name == "F32" else "–"
        row(f"{name}: prompt lookup / plain, text to copy", *compare(edits, rounds, plain_edit, edit), goal)
        row(f"{name}: prompt lookup / plain, nothing to copy", *compare(stories, rounds, plain, lookup), "≥ 0.95")
    for target, draft, goal in (("F32", "Q4_0", "≥ 1.3"), ("Q4_0", "F32", "≥ 0.95")):
        model, assistant = models[target], models[draft]
        stories = [model.tokenizer(text, return_tensors="pt").input_ids for text in STORIES]

        def plain(ids: torch.Tensor, model: Any = model) -> Measured:
            return generate(model, ids, n)

        def assisted(ids: torch.Tensor, model: Any = model, assistant: Any = assistant) -> Measured:
            return generate(model, ids, n, assistant)

        row(f"{target} with {draft} drafting / plain", *compare(stories, rounds, plain, assisted), goal)


if __name__ == "__main__":
    main()
