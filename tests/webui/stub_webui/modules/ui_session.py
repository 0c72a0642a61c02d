import gradio as gr
from modules import shared, ui, utils
from modules.utils import gradio

RELOAD = "() => { setTimeout(() => location.reload(), 2500); return [] }"


def create_ui():
    with gr.Tab("Session", elem_id="session-tab"):
        shared.gradio["reset_interface"] = gr.Button("Apply and restart")
        found = utils.get_available_extensions()
        chosen = [name for name in shared.args.extensions or [] if name in found]
        shared.gradio["extensions_menu"] = gr.CheckboxGroup(found, value=chosen, label="Available extensions")
        flags = get_boolean_arguments()
        active = [name for name in flags if getattr(shared.args, name)]
        shared.gradio["bool_menu"] = gr.CheckboxGroup(flags, value=active, label="Flags")
        shared.gradio["reset_interface"].click(
            set_interface_arguments, gradio("extensions_menu", "bool_menu"), None
        ).then(None, None, None, js=RELOAD)


def set_interface_arguments(extensions, active):
    shared.args.extensions = extensions
    for name in get_boolean_arguments():
        setattr(shared.args, name, name in active)
    shared.need_restart = True


def get_boolean_arguments():
    found = {name for name, value in vars(shared.args).items() if isinstance(value, bool)}
    return sorted(found - set(ui.list_model_elements()))
