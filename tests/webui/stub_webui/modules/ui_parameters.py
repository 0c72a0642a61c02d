"""One widget for each sampler; which of them are seen depends on "Filter by loader"."""

import gradio as gr
from modules import loaders, shared
from modules.presets import default_preset_values
from modules.utils import gradio

LIMITS = {
    "temperature": (0.01, 5),
    "top_p": (0, 1),
    "top_k": (0, 200, 1),
    "penalty_alpha": (0, 5),
    "guidance_scale": (-0.5, 2.5, 0.05),
    "encoder_repetition_penalty": (0.8, 1.5),
    "repetition_penalty_range": (0, 4096, 64),
    "no_repeat_ngram_size": (0, 20, 1),
    "mirostat_mode": (0, 2, 1),
    "max_new_tokens": (1, 4096, 1),
    "prompt_lookup_num_tokens": (0, 10, 1),
    "max_tokens_second": (0, 20, 1),
}
LABELS = {
    "sampler_priority": "Sampler priority",
    "negative_prompt": "Negative prompt",
    "custom_stopping_strings": "Custom stopping strings",
    "custom_token_bans": "Token bans",
    "custom_system_message": "Custom system message",
    "ban_eos_token": "Ban the eos_token",
    "grammar_string": "Grammar",
}


def _widget(name, value):
    label = LABELS.get(name, name)
    if isinstance(value, bool):
        return gr.Checkbox(value=value, label=label)
    if isinstance(value, str):
        return gr.Textbox(value=value, label=label, lines=2)
    low, high, *step = LIMITS.get(name, (0, 20))
    return gr.Slider(low, high, value=value, step=step[0] if step else 0.01, label=label)


def create_ui():
    with gr.Tab("Parameters", elem_id="parameters"):
        choices = ["llama.cpp"] if shared.args.portable else ["All", *loaders.loaders_and_params]
        shared.gradio["filter_by_loader"] = gr.Dropdown(choices, value=choices[0], label="Filter by loader")
        with gr.Row():
            with gr.Column():
                for name in default_preset_values:
                    shared.gradio[name] = _widget(name, shared.settings[name])
            with gr.Column():
                others = """max_new_tokens prompt_lookup_num_tokens max_tokens_second auto_max_new_tokens ban_eos_token
                    add_bos_token skip_special_tokens stream static_cache custom_stopping_strings custom_token_bans
                    negative_prompt custom_system_message instruction_template_str"""
                for name in others.split():
                    shared.gradio[name] = _widget(name, shared.settings[name])
                shared.gradio["truncation_length"] = gr.Number(shared.settings["truncation_length"], label="Truncation length")
                shared.gradio["seed"] = gr.Number(shared.settings["seed"], label="Seed (-1 for random)")
                with gr.Row() as shared.gradio["grammar_file_row"]:
                    shared.gradio["grammar_string"] = _widget("grammar_string", "")


def create_event_handlers():
    shared.gradio["filter_by_loader"].change(
        loaders.blacklist_samplers,
        gradio("filter_by_loader", "dynamic_temperature"),
        gradio(loaders.list_all_samplers()),
        show_progress="hidden",
    )
