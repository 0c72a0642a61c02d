"""Which loader shows which widgets. The tables are plain and changed in place; what is derived from them is cached."""

import functools
from collections import OrderedDict

loaders_and_params = OrderedDict(
    {
        "llama.cpp": [
            "gpu_layers", "fit_target", "cpu_moe", "threads", "threads_batch", "batch_size", "ubatch_size", "ctx_size",
            "cache_type", "tensor_split", "extra_flags", "streaming_llm", "split_mode", "no_kv_offload", "no_mmap",
            "mlock", "numa", "ik", "parallel", "model_draft", "draft_max", "gpu_layers_draft", "device_draft",
            "ctx_size_draft", "spec_type", "speculative_decoding_accordion", "vram_info",
        ],
        "Transformers": ["cpu_memory", "load_in_8bit", "load_in_4bit", "cpu", "disk", "bf16", "no_use_fast"],
        "ExLlamav3_HF": ["ctx_size", "cache_type", "gpu_split", "cfg_cache", "no_use_fast"],
    }
)


def transformers_samplers():
    return {
        "temperature", "dynatemp_low", "dynatemp_high", "dynatemp_exponent", "smoothing_factor", "smoothing_curve",
        "min_p", "top_p", "top_k", "typical_p", "xtc_threshold", "xtc_probability", "epsilon_cutoff", "eta_cutoff", "tfs",
        "top_a", "top_n_sigma", "adaptive_target", "adaptive_decay", "dry_multiplier", "dry_allowed_length", "dry_base",
        "dry_sequence_breakers", "repetition_penalty", "frequency_penalty", "presence_penalty",
        "encoder_repetition_penalty", "no_repeat_ngram_size", "repetition_penalty_range", "penalty_alpha",
        "guidance_scale", "negative_prompt", "mirostat_mode", "mirostat_tau", "mirostat_eta", "prompt_lookup_num_tokens",
        "do_sample", "dynamic_temperature", "temperature_last", "auto_max_new_tokens", "ban_eos_token", "add_bos_token",
        "skip_special_tokens", "static_cache", "seed", "sampler_priority", "custom_token_bans", "grammar_string",
        "grammar_file_row",
    }


loaders_samplers = {
    "Transformers": transformers_samplers(),
    "ExLlamav3_HF": transformers_samplers() - {"static_cache"},
    "llama.cpp": {
        "temperature", "min_p", "top_p", "top_k", "typical_p", "repetition_penalty", "frequency_penalty",
        "presence_penalty", "dry_multiplier", "dry_allowed_length", "dry_base", "auto_max_new_tokens", "ban_eos_token",
        "add_bos_token", "seed", "sampler_priority", "custom_token_bans", "grammar_string", "grammar_file_row",
    },
}


@functools.cache
def list_all_samplers():
    return sorted(set().union(*loaders_samplers.values()))


@functools.cache
def get_all_params():
    return sorted(set().union(*loaders_and_params.values()))


@functools.cache
def list_model_elements():
    return [
        "filter_by_loader", "loader", "cpu_memory", "gpu_layers", "fit_target", "cpu_moe", "threads", "threads_batch",
        "batch_size", "ubatch_size", "ctx_size", "cache_type", "tensor_split", "extra_flags", "streaming_llm",
        "gpu_split", "load_in_8bit", "load_in_4bit", "cpu", "disk", "split_mode", "no_kv_offload", "no_mmap", "mlock",
        "numa", "parallel", "bf16", "cfg_cache", "no_use_fast", "model_draft", "draft_max", "gpu_layers_draft",
        "device_draft", "ctx_size_draft", "spec_type", "ik",
    ]


def _shown(names, chosen):
    import gradio as gr

    return [gr.update(visible=name in chosen) for name in names]


def blacklist_samplers(loader, dynamic_temperature):
    everything = list_all_samplers()
    chosen = set(everything if loader == "All" else loaders_samplers[loader])  # KeyError for a loader missing there
    if not dynamic_temperature:
        chosen -= {"dynatemp_low", "dynatemp_high", "dynatemp_exponent"}
    return _shown(everything, chosen)


def make_loader_params_visible(loader):
    return _shown(get_all_params(), loaders_and_params.get(loader, ()))
