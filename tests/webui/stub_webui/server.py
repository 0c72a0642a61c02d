"""A small stand-in for text-generation-webui: the same seams and the same traps, none of its code.

What an extension meets while the webui starts, in the webui's order: the command line is parsed when ``modules.shared`` is
imported, ``--model`` is loaded before any extension is known, and every restart of the page executes the extensions again.
"""

import sys
import time
from functools import partial
from pathlib import Path
from threading import Lock, Thread

import modules.extensions as extensions_module
import yaml
from modules import shared, utils
from modules.logging_colors import logger
from modules.LoRA import add_lora_to_model
from modules.models import load_model, unload_model_if_idle
from modules.models_settings import get_model_metadata, update_model_parameters


def create_interface():
    import gradio as gr
    from modules import ui, ui_chat, ui_model_menu, ui_parameters, ui_session
    from modules.utils import gradio

    if shared.args.extensions:
        extensions_module.load_extensions()
    if shared.args.api:
        from modules.api.script import setup

        setup()

    shown = "llama.cpp" if shared.args.portable else shared.args.loader or "All"
    shared.persistent_interface_state.update(
        mode=shared.settings["mode"], loader=shared.args.loader or "llama.cpp", filter_by_loader=shown
    )
    shared.input_elements = ui.list_interface_input_elements()
    with gr.Blocks(title="stub", analytics_enabled=False) as shared.gradio["interface"]:
        shared.gradio["interface_state"] = gr.State(dict.fromkeys(shared.input_elements))
        ui_chat.create_ui()
        ui_parameters.create_ui()
        ui_model_menu.create_ui()
        ui_session.create_ui()
        ui_chat.create_event_handlers()
        ui_parameters.create_event_handlers()
        ui_model_menu.create_event_handlers()
        restore = partial(ui.apply_interface_values, {}, use_persistent=True)
        shared.gradio["interface"].load(restore, None, gradio(shared.input_elements), show_progress="hidden")
        extensions_module.create_extensions_tabs()
        extensions_module.create_extensions_block()

    shared.gradio["interface"].queue()
    shared.gradio["interface"].launch(
        max_threads=64,
        prevent_thread_lock=True,
        server_name=(shared.args.listen_host or "0.0.0.0") if shared.args.listen else None,
        server_port=shared.args.listen_port,
        allowed_paths=["extensions"],
    )


def read_settings():
    file = Path(shared.args.settings) if shared.args.settings else shared.user_data_dir / "settings.yaml"
    if file.exists():
        logger.info(f"Settings of {file}")
        shared.settings.update(yaml.safe_load(file.read_text(encoding="utf-8")) or {})


def find_extensions():
    extensions_module.available_extensions = utils.get_available_extensions()
    wanted = list(shared.args.extensions or [])
    wanted += [name for name in shared.settings["default_extensions"] if name not in wanted]
    if "openai" in wanted:  # the name of the API from when it was an extension
        wanted.remove("openai")
        shared.args.api = True
    shared.args.extensions = wanted or shared.args.extensions


def load_first_model():
    if shared.args.model is None:
        return
    shared.model_name = shared.args.model
    metadata = get_model_metadata(shared.model_name)
    update_model_parameters(metadata, initial=True)
    if "instruction_template_str" in metadata:
        shared.settings["instruction_template_str"] = metadata["instruction_template_str"]
    shared.model, shared.tokenizer = load_model(shared.model_name)
    if shared.args.lora:
        add_lora_to_model(shared.args.lora)


if __name__ == "__main__":
    logger.info("Starting")
    read_settings()
    find_extensions()
    utils.get_available_models()
    load_first_model()
    shared.generation_lock = Lock()
    if shared.args.idle_timeout > 0:
        Thread(target=unload_model_if_idle, daemon=True).start()

    if shared.args.nowebui:
        if shared.args.extensions:
            extensions_module.load_extensions()
        if not shared.args.api:
            sys.exit(0)
        from modules.api.script import setup

        setup()
    else:
        create_interface()
        while True:
            time.sleep(0.5)
            if shared.need_restart:
                shared.need_restart = False
                time.sleep(0.5)
                shared.gradio["interface"].close()
                time.sleep(0.5)
                create_interface()
