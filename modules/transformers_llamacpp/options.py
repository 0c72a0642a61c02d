"""One frozen table of the options people set: label, range, unit, help.

The page, the command line and `LlamaCppConfig` read it, so that a range or a help text is written once. It lists our own
options and the llama.cpp options people set most; every other name the installed binding knows is accepted by
`LlamaCppConfig` all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import OptionError

__all__ = ["OPTIONS", "OWN_OPTIONS", "Option", "option", "options_in", "parse"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `kind` is the Python type of its value; `minimum` and `maximum` are included in the range."""

    name: str
    kind: type
    default: Any
    group: str
    help: str
    label: str
    minimum: float | None = None
    maximum: float | None = None
    step: float | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()
    own: bool = False
    """True: ours (DESIGN: memory and reuse); False: llama.cpp's or transformers' under its own name."""

    def has_type(self, value: Any) -> bool:
        """An int will do for a float; a bool is no number."""
        if isinstance(value, bool):
            return self.kind is bool
        return isinstance(value, (int, float) if self.kind is float else self.kind)

    def check(self, value: Any) -> str | None:
        """What is wrong with `value`, or `None`."""
        if value is None and self.default is None:
            return None
        if not self.has_type(value):
            return f"{self.name} takes {self.kind.__name__}, not {type(value).__name__} {value!r}"
        if self.minimum is not None and not value >= self.minimum:  # NaN is in no range
            return f"{self.name}={value!r} is below its minimum {self.minimum:g}"
        if self.maximum is not None and not value <= self.maximum:
            return f"{self.name}={value!r} is above its maximum {self.maximum:g}"
        if self.choices and value not in self.choices:
            return f"{self.name}={value!r} is not one of {', '.join(self.choices)}"
        return None


GIB = 1 << 30
UINT32 = 2**32 - 1

OPTIONS: tuple[Option, ...] = (
    # -- memory and reuse: ours ------------------------------------------------------------------------------
    Option("n_ctx", int, 4096, "context", "Tokens one conversation may hold, prompt and answer together; 0 takes the "
           "length the model was trained for.", "Context length", 0, 2**31 - 1, 1, "tokens", own=True),
    Option("n_cells", int, None, "context", "KV cells shared by all sequences; by default as many as n_ctx. Beams and "
           "candidates share the cells of their common prefix, so they cost only what differs.", "KV cells", 1,
           2**31 - 1, 1, "cells", own=True),
    Option("n_seq_max", int, None, "context", "Sequences at once (64, recurrent and hybrid models 8); grows by itself "
           "when a call has more rows.", "Sequences", 1, 256, 1, "sequences", own=True),
    Option("host_cache_bytes", int, GIB, "context", "Host memory for the state of conversations that are not in use right "
           "now, and for checkpoints.", "Host cache", 0, None, 1, "bytes", own=True),
    Option("prefix_reuse", bool, True, "context", "Start from the longest prefix still in memory instead of evaluating "
           "the whole prompt. Off: every call is computed in the same cells, warm and cold bit for bit the same.",
           "Reuse prefixes", own=True),
    Option("n_sink", int, None, "context", "StreamingLLM: when the context is full, keep this many first tokens and drop the "
           "oldest quarter of the rest, so that generation never ends; by default a full context ends it.",
           "Attention sinks", 0, 2**31 - 1, 1, "tokens", own=True),
    Option("reuse_min_chunk", int, 0, "context", "Reuse chunks of at least this many tokens that moved, as when old messages "
           "are dropped, by shifting their positions. They still know what stood before them, so that answers may differ a "
           "little from those of a fresh evaluation; 0 is off.", "Smallest moved chunk", 0, 2**31 - 1, 1, "tokens", own=True),
    Option("state_dir", str, None, "context", "Folder for the state of conversations that host memory has no place for; they "
           "go on from there, also after a restart.", "State folder", own=True),
    Option("state_dir_bytes", int, 10 * GIB, "context", "Disk space that state_dir may take; what was used longest ago is "
           "deleted.", "State folder size", 0, None, 1, "bytes", own=True),
    # -- loading: llama.cpp's -------------------------------------------------------------------------------
    Option("n_gpu_layers", int, -1, "model", "Layers on the GPU; the rest runs on the CPU. -1: all that there are, "
           "0: none.", "GPU layers", -1, 2**31 - 1, 1, "layers"),
    Option("n_threads", int, None, "model", "Threads for one token at a time; by default one per physical core.",
           "Threads", 1, 512, 1, "threads"),
    Option("n_threads_batch", int, None, "model", "Threads for prompts; by default as n_threads.", "Prompt threads", 1,
           512, 1, "threads"),
    Option("n_batch", int, 512, "model", "Most tokens in one decode of a prompt; a call can be stopped between two.",
           "Batch size", 1, UINT32, 1, "tokens"),
    Option("n_ubatch", int, 512, "model", "Tokens llama.cpp computes at once inside a batch; lower needs less memory.",
           "Micro-batch size", 0, UINT32, 1, "tokens"),
    Option("type_k", str, "f16", "model", "Type of the K cache.", "K cache type",
           choices=("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")),
    Option("type_v", str, "f16", "model", "Type of the V cache; a quantised one needs flash attention.", "V cache type",
           choices=("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")),
    Option("flash_attn", bool, None, "model", "Flash attention on or off; by default off on the CPU, where it is the "
           "less exact path, and llama.cpp's choice on a GPU or with a quantised V cache.",
           "Flash attention"),
    Option("use_mmap", bool, True, "model", "Map the file into memory instead of reading it.", "Memory-map the file"),
    Option("use_mlock", bool, False, "model", "Keep the model in RAM, never swapped.", "Lock in RAM"),
    Option("swa_full", bool, True, "model", "Keep all cells of sliding-window models, so that any prefix can be reused; "
           "off saves memory.", "Full sliding-window cache"),
    Option("verbose", bool, False, "model", "Show llama.cpp's own log.", "Verbose log"),
    # -- the method ------------------------------------------------------------------------------------------
    Option("method", str, "sampling", "method", "Sampling draws tokens by their probability, greedy takes the likeliest, "
           "contrastive the likeliest that repeats least; beams write several texts and keep the most probable.", "Method",
           choices=("sampling", "greedy", "contrastive", "beams")),
    # -- sampling: transformers' ----------------------------------------------------------------------------
    Option("temperature", float, 0.8, "sampling", "Higher is more varied, lower more predictable; 0 always takes the "
           "most likely token.", "Temperature", 0.0, 5.0, 0.01),
    Option("top_p", float, 0.95, "sampling", "Sample from the smallest set of tokens whose probabilities add up to "
           "this; 1 is off.", "Top-p", 0.0, 1.0, 0.01),
    Option("top_k", int, 40, "sampling", "Sample from the k most likely tokens; 0 is off.", "Top-k", 0, 1000, 1,
           "tokens"),
    Option("min_p", float, 0.05, "sampling", "Drop tokens less likely than this share of the most likely one; 0 is off.",
           "Min-p", 0.0, 1.0, 0.01),
    Option("repetition_penalty", float, 1.0, "sampling", "Above 1 makes tokens that already occurred less likely; 1 is "
           "off.", "Repetition penalty", 0.5, 2.0, 0.01),
    Option("seed", int, -1, "sampling", "The same seed draws the same tokens again from the same probabilities, which are the "
           "same bit for bit with prefix_reuse=False only; -1 draws a new seed each time.", "Seed", -1, 2**32 - 1, 1),
    Option("max_new_tokens", int, 512, "sampling", "Most tokens in one answer.", "Max new tokens", 1, 2**31 - 1, 1,
           "tokens"),
    Option("typical_p", float, 1.0, "cutting", "Keep the tokens about as surprising as expected, up to this mass; 1 is off.",
           "Typical-p", 0.01, 1.0, 0.01),
    Option("no_repeat_ngram_size", int, 0, "penalties", "No run of this many tokens occurs twice; 0 is off.",
           "No run twice of", 0, 64, 1, "tokens"),
    Option("presence_penalty", float, 0.0, "penalties", "Subtracted from the scores of written tokens.", "Presence penalty",
           -2.0, 2.0, 0.05),
    Option("frequency_penalty", float, 0.0, "penalties", "Subtracted from the score of a token for each time it was written.",
           "Frequency penalty", -2.0, 2.0, 0.05),
    Option("stop", str, "", "ending", "The text ends before one of these strings.", "Stop strings"),
    Option("top_logprobs", int, 5, "inspection", "For each token, so many of the likeliest at its place are kept with their "
           "probabilities, to be looked at; 0 keeps none, and is a little faster.", "Alternatives kept", 0, 20, 1, "tokens"),
    # -- chats ------------------------------------------------------------------------------------------------
    Option("system_prompt", str, "", "chat", "Goes before the conversation; empty leaves it to the model's template.",
           "System prompt"),
    Option("chat_template", str, "", "chat", "How the conversation becomes the text that the model reads, as the GGUF says.",
           "Template"),
    # -- ways of decoding: transformers' --------------------------------------------------------------------
    Option("contrastive_search", bool, False, "contrastive", "Of the k most likely tokens take the one that repeats least of "
           "what the text says already. Greedy: temperature and the other samplers rest.", "Contrastive search"),
    Option("penalty_alpha", float, 0.6, "contrastive", "How much repetition counts against probability; 0 is plain greedy "
           "search.", "Alpha", 0.0, 1.0, 0.05),
    Option("contrastive_k", int, 4, "contrastive", "Candidates for each token. All are one decode, which costs as much as "
           "writing that many texts at once.", "Candidates (k)", 2, 64, 1, "candidates"),
    Option("guidance_scale", float, 1.0, "guidance", "Above 1 the answer follows the prompt closer, and away from the negative "
           "prompt; 1 is off. Both sides are one decode, 1.2 to 1.5 times a plain one.", "Guidance scale", 0.0, 10.0, 0.05),
    Option("negative_prompt", str, "", "guidance", "What the answer is to stay away from; without it, the last token of the "
           "prompt.", "Negative prompt"),
    Option("speculation", str, "draft model", "speculation", "Who guesses the next tokens, which the model then checks several "
           "at a time. The text is that of plain decoding. Without a draft model, \"draft model\" is plain decoding.",
           "Who drafts", choices=("off", "prompt lookup", "draft model", "both")),
    Option("draft_model", str, "", "speculation", "A small GGUF that guesses; without it, the one chosen at loading "
           "(model-draft).", "Draft model"),
    Option("num_assistant_tokens", int, 0, "speculation", "Tokens in one draft; 0 takes those set at loading (draft-max) for a "
           "draft model, and 10 for prompt lookup.", "Tokens per draft", 0, 64, 1, "tokens"),
    Option("assistant_confidence_threshold", float, 0.4, "speculation", "A draft ends where the draft model is less sure of "
           "its token than this.", "Confidence", 0.0, 1.0, 0.05),
    Option("num_beams", int, 1, "beams", "Texts that are written side by side, of which the most probable is kept; 1 is off. "
           "Which one that is shows at the end.", "Beams", 1, 32, 1, "beams"),
    Option("num_beam_groups", int, 1, "beams", "Groups of beams that keep away from each other's tokens; 1 is off.",
           "Beam groups", 1, 32, 1, "groups"),
    Option("diversity_penalty", float, 0.0, "beams", "How much a group avoids what the groups before it wrote.",
           "Diversity penalty", 0.0, 10.0, 0.1),
    Option("length_penalty", float, 1.0, "beams", "Above 0 favours longer beams, below 0 shorter ones.", "Length penalty",
           -10.0, 10.0, 0.1),
    Option("early_stopping", bool, False, "beams", "Stop as soon as there are as many finished texts as beams.",
           "Early stopping"),
    Option("min_new_tokens", int, 0, "other", "The answer does not end before it has this many tokens.", "Min new tokens",
           0, 4096, 1, "tokens"),
    Option("dola_layers", str, "off", "other", "DoLa: contrast the last layer with earlier ones, so that less is made up; "
           "\"high\" for short answers, \"low\" for long ones.", "DoLa", choices=("off", "low", "high")),
    # -- adapters: at loading -------------------------------------------------------------------------------
    Option("lora_path", str, "", "adapter", "A LoRA as a GGUF file, applied when the model is loaded.", "LoRA"),
    Option("lora_scale", float, 1.0, "adapter", "How strongly the LoRA counts.", "LoRA scale", -10.0, 10.0, 0.05),
)

OWN_OPTIONS: dict[str, Option] = {entry.name: entry for entry in OPTIONS if entry.own}


def option(name: str) -> Option:
    """The option called `name`. Raises `KeyError`."""
    for entry in OPTIONS:
        if entry.name == name:
            return entry
    raise KeyError(name)


def parse(entry: Option, text: str) -> Any:
    """The value that `text` stands for, as on a command line or in a request. Raises `OptionError`."""
    words = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
    try:
        value = words[text.strip().lower()] if entry.kind is bool else entry.kind(text)
    except (KeyError, ValueError):
        kind = "yes or no" if entry.kind is bool else "number"
        raise OptionError(f"{entry.name}={text!r} is no {kind}", entry.name) from None
    if wrong := entry.check(value):
        raise OptionError(wrong, entry.name)
    return value


def options_in(group: str) -> tuple[Option, ...]:
    """All options of a group, in the order of the table: "context", "model", "adapter" (loading), "method",
    "sampling", "cutting", "penalties", "ending", "inspection", "contrastive", "guidance", "speculation", "beams", "other" (ways
    of decoding), "chat"."""
    return tuple(entry for entry in OPTIONS if entry.group == group)
