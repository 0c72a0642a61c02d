import traceback
from functools import partial

import gradio as gr
from modules import loaders, shared, ui, utils
from modules.logging_colors import logger
from modules.LoRA import add_lora_to_model
from modules.models import load_model, unload_model
from modules.models_settings import (
    apply_model_settings_to_state,
    get_model_metadata,
    save_model_settings,
    update_gpu_layers_and_vram,
    update_model_parameters,
)
from modules.utils import gradio

SLIDERS = {"gpu_layers": (-1, 256, 1), "ctx_size": (0, 1048576, 1024), "threads": (0, 256, 1), "threads_batch": (0, 256, 1)}
SLIDERS |= {"batch_size": (1, 4096, 1), "ubatch_size": (1, 4096, 1), "parallel": (1, 64, 1), "gpu_layers_draft": (0, 256, 1)}
DRAFT = ("draft_max", "gpu_layers_draft", "device_draft", "ctx_size_draft", "spec_type")
DASHED = [
    "gpu_layers", "ctx_size", "cache_type", "streaming_llm", "draft_max", "gpu_layers_draft", "ctx_size_draft", "no_mmap",
    "cfg_cache", "split_mode", "cpu_moe", "fit_target", "extra_flags", "device_draft", "spec_type", "gpu_split",
    "load_in_8bit", "load_in_4bit",
]


def _widget(name, value):
    label = name.replace("_", "-") if name in DASHED else name
    if name in SLIDERS:
        low, high, step = SLIDERS[name]
        return gr.Slider(low, high, value=value, step=step, label=label)
    if isinstance(value, bool):
        return gr.Checkbox(value=value, label=label)
    if isinstance(value, (int, float)):
        return gr.Number(value=value, label=label, precision=0)
    return gr.Textbox(value=value, label=label)


def create_ui():
    with gr.Tab("Model", elem_id="model-tab"):
        with gr.Row():
            models = utils.get_available_models()
            shared.gradio["model_menu"] = gr.Dropdown(
                models, value=lambda: shared.model_name, label="Model", allow_custom_value=True
            )
            for name, text in (("load_model", "Load"), ("unload_model", "Unload"), ("save_model_settings", "Save settings")):
                shared.gradio[name] = gr.Button(text)
        choices = ["llama.cpp"] if shared.args.portable else list(loaders.loaders_and_params)
        shared.gradio["loader"] = gr.Dropdown(choices, value=None, label="Model loader")
        with gr.Accordion("Speculative decoding", open=False) as shared.gradio["speculative_decoding_accordion"]:
            drafts = ["None", *models]
            shared.gradio["model_draft"] = gr.Dropdown(drafts, value=lambda: shared.args.model_draft, label="model-draft")
            for name in DRAFT:
                shared.gradio[name] = _widget(name, getattr(shared.args, name))
        for name in loaders.list_model_elements():
            if name not in ("loader", "filter_by_loader", "model_draft", *DRAFT):
                shared.gradio[name] = _widget(name, getattr(shared.args, name))
        shared.gradio["vram_info"] = gr.HTML("VRAM:")
        loras = utils.get_available_loras()
        shared.gradio["lora_menu"] = gr.Dropdown(loras, value=shared.lora_names, multiselect=True, label="LoRA(s)")
        shared.gradio["lora_menu_apply"] = gr.Button("Apply LoRAs")
        status = "No model is loaded" if shared.model_name == "None" else "Ready"
        shared.gradio["model_status"] = gr.Markdown(status, elem_id="model-status")


def create_event_handlers():
    every, state, hidden = gradio(shared.input_elements), gradio("interface_state"), {"show_progress": "hidden"}
    shared.gradio["loader"].change(
        loaders.make_loader_params_visible, gradio("loader"), gradio(loaders.get_all_params()), **hidden
    )
    final = (handle_load_model_event_final, gradio("truncation_length", "loader", "interface_state"))
    outputs = gradio("truncation_length", "filter_by_loader")
    chosen, status = gradio("model_menu", "loader"), gradio("model_status")
    shared.gradio["model_menu"].change(ui.gather_interface_values, every, state).then(
        handle_load_model_event_initial,
        gradio("model_menu", "interface_state"),
        [*every, *state, *gradio("vram_info")],
        **hidden,
    ).then(partial(load_model_wrapper, autoload=False), chosen, status).success(*final, outputs, **hidden)
    shared.gradio["load_model"].click(ui.gather_interface_values, every, state).then(update_model_parameters, state, None).then(
        partial(load_model_wrapper, autoload=True), chosen, status
    ).success(*final, outputs, **hidden)
    size = gradio("loader", "model_menu", "gpu_layers", "ctx_size", "cache_type")
    vram = (update_gpu_layers_and_vram, size, gradio("vram_info"))
    shared.gradio["unload_model"].click(handle_unload_model_click, None, status, **hidden).then(*vram, **hidden)
    for name in ("ctx_size", "cache_type", "gpu_layers"):
        shared.gradio[name].change(*vram, **hidden)
    shared.gradio["save_model_settings"].click(ui.gather_interface_values, every, state).then(
        save_model_settings, gradio("model_menu", "interface_state"), status, **hidden
    )
    shared.gradio["lora_menu_apply"].click(load_lora_wrapper, gradio("lora_menu"), status, **hidden)


def load_model_wrapper(selected_model, loader, autoload=False):
    try:
        settings = get_model_metadata(selected_model)
    except FileNotFoundError:
        yield traceback.format_exc()
        return
    if not autoload:
        yield f"### {selected_model}\n\nPress Load. It was trained with {settings['truncation_length_info']} tokens."
        return
    if selected_model == "None":
        yield "No model is chosen."
        return
    try:
        yield f"Loading `{selected_model}`..."
        unload_model()
        if selected_model != "":
            shared.model, shared.tokenizer = load_model(selected_model, loader)
        yield f"{'Failed to load' if shared.model is None else 'Successfully loaded'} `{selected_model}`."
    except Exception:
        logger.exception("The model could not be loaded")
        yield traceback.format_exc().replace("\n", "\n\n")


def load_lora_wrapper(selected_loras):
    yield f"Applying {', '.join(selected_loras)}"
    add_lora_to_model(selected_loras)
    yield "The LoRAs were applied successfully"


def update_truncation_length(current_length, state):
    if "loader" in state and (state["loader"].lower().startswith("exllama") or state["loader"] == "llama.cpp"):
        return state["ctx_size"] or shared.settings["truncation_length"]
    return current_length


def handle_load_model_event_initial(model, state):
    state = apply_model_settings_to_state(model, state)
    output = ui.apply_interface_values(state)
    update_model_parameters(state)
    return [*output, state, state.get("vram_info", "VRAM:")]


def handle_load_model_event_final(truncation_length, loader, state):
    return [update_truncation_length(truncation_length, state), loader]


def handle_unload_model_click():
    unload_model()
    return "Model unloaded"
