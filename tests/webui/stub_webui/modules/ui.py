import gradio as gr
from modules import loaders, shared
from modules.presets import presets_params

CHAT = ["history", "textbox", "custom_system_message", "instruction_template_str", "mode"]
OTHERS = [
    "max_new_tokens", "prompt_lookup_num_tokens", "max_tokens_second", "auto_max_new_tokens", "ban_eos_token",
    "add_bos_token", "skip_special_tokens", "stream", "static_cache", "truncation_length", "seed",
    "custom_stopping_strings", "custom_token_bans", "negative_prompt", "grammar_string", "epsilon_cutoff", "eta_cutoff",
]


def list_model_elements():
    return loaders.list_model_elements()


def list_interface_input_elements():
    return list(dict.fromkeys([*presets_params(), *OTHERS, *CHAT, *list_model_elements()]))


def gather_interface_values(*values):
    output = dict(zip(list_interface_input_elements(), values, strict=False))
    shared.persistent_interface_state = {name: value for name, value in output.items() if name != "textbox"}
    return output


def apply_interface_values(state, use_persistent=False):
    state = shared.persistent_interface_state if use_persistent else state
    return [state.get(name, gr.update()) for name in list_interface_input_elements()]
