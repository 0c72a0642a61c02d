"""The tab `llamacpp_HF` of text-generation-webui, and what makes its loader known there.

One file without neighbours: the webui runs it by its path, again at every restart of the page. What it needs is in
`modules/llamacpp_hf.py`, the loader.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

NAME = "modules.llamacpp_hf"

SECONDS = 3
"""Between two looks at the model's state."""

params = {"display_name": "llamacpp_HF", "is_tab": True}


def loader() -> Any:
    """The loader, always the same module: where the webui's own folder `modules` has none, the one of the checkout that this
    file was linked from."""
    if NAME not in sys.modules and importlib.util.find_spec(NAME) is None:
        file = Path(__file__).resolve().parents[2] / "modules" / "llamacpp_hf.py"
        spec = importlib.util.spec_from_file_location(NAME, file)
        if spec is None or spec.loader is None or not file.is_file():
            raise ImportError(
                f"the llamacpp_HF extension needs modules/llamacpp_hf.py in the webui's folder, or {file}: install both with "
                "transformers-llamacpp webui-install"
            )
        module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[NAME]
            raise
    return importlib.import_module(NAME)


def setup() -> None:
    """Register the loader; load the model with it where the command line asked for that."""
    loader().register()
    loader().take_over()


def ui() -> None:
    """The tab. Every change holds at once, for the page and for the API."""
    import gradio as gr  # there may be none where the webui runs without a page

    host = loader()
    if (reason := host.problem()) is not None:
        gr.Markdown(f"## llamacpp_HF\n\n{reason}")
        return
    panel, sections = host.panel(), host.engine("webui.panel").SECTIONS
    mine = not host.shared.args.multi_user  # as in the Model tab: what one sets holds for all
    controls, message = [], gr.Markdown("", render=False)
    with gr.Row():
        with gr.Column():
            for section in sections[:3]:
                controls += block(section, host, message)
        with gr.Column():
            status = live(panel.status)
            message.render()
            with gr.Row():
                names = ("Save settings", "Undo changes", "Defaults", "Reload model")
                save, revert, reset, reload = (gr.Button(name, size="sm", interactive=mine) for name in names)
            for section in sections[3:]:
                controls += block(section, host, message)
    save.click(panel.save, None, message)
    revert.click(panel.revert, None, controls)
    reset.click(panel.reset, None, controls)
    reload.click(panel.reload, None, message).then(panel.status, None, status)


def custom_css() -> str:
    """The status is renewed all the time; Gradio would draw a bar above it as long as that goes on."""
    return "#llamacpp-hf-status .generating, #llamacpp-hf-status.generating { border: none; animation: none; }"


def live(text: Any) -> Any:
    """HTML that shows `text()` anew every few seconds."""
    import gradio as gr

    if hasattr(gr, "Timer"):
        shown = gr.HTML(text, elem_id="llamacpp-hf-status")
        gr.Timer(SECONDS).tick(text, None, shown, show_progress="hidden")
        return shown
    return gr.HTML(text, every=SECONDS, elem_id="llamacpp-hf-status")  # before Gradio 4.40


def block(section: Any, host: Any, message: Any) -> list[Any]:
    """A section's controls."""
    import gradio as gr

    controls = []
    with gr.Accordion(section.title, open=not section.folded):
        if section.note:
            gr.Markdown(section.note)
        for entry in section.options:
            controls.append(made := make(entry, host))
            made.change(functools.partial(host.panel().change, entry), made, message, show_progress="hidden")
    return controls


def make(entry: Any, host: Any) -> Any:
    """The Gradio component of an option, with the value it has when the page is opened."""
    import gradio as gr

    panel = host.panel()
    arguments = host.engine("webui.panel").control(entry, None)
    kind = arguments.pop("kind")
    arguments |= {"value": functools.partial(panel.value, entry), "interactive": not host.shared.args.multi_user}
    if kind == "model":
        names = ["None", *host.utils.get_available_models()]
        return gr.Dropdown(choices=names, allow_custom_value=True, **arguments)
    made = {"checkbox": gr.Checkbox, "radio": gr.Radio, "slider": gr.Slider, "number": gr.Number, "text": gr.Textbox}
    return made[kind](**arguments)
