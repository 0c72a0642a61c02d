"""Gives PyPI's gradio 4.37.2 the names that text-generation-webui's own build of it has, in a folder for PYTHONPATH.

Where they exist nothing is changed. `gr.Headless` carries a value to the page's scripts without showing it, `gr.DragDrop`
holds the names of samplers, one a line, and `Blocks(dark_theme=)` chooses a colour; `HfFolder` left huggingface_hub, and
today's pydantic writes `true` where gradio_client 1.0 expects a schema.
"""

import importlib.abc
import importlib.machinery
import inspect
import sys


class _Names(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != "gradio":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_add(module):
                _add_to_hub()
                run(module)
                _add_to_gradio(module)

            spec.loader.exec_module = run_and_add
        return spec


def _add_to_hub():
    import huggingface_hub

    if not hasattr(huggingface_hub, "HfFolder"):
        huggingface_hub.HfFolder = type("HfFolder", (), {"get_token": staticmethod(lambda: None)})


def _add_to_gradio(gradio):
    if not gradio.__version__.startswith("4."):
        return
    import gradio_client.utils

    read = gradio_client.utils._json_schema_to_python_type
    gradio_client.utils._json_schema_to_python_type = lambda schema, defs: (
        "Any" if isinstance(schema, bool) else read(schema, defs)
    )
    if not hasattr(gradio, "Headless"):
        gradio.Headless = _like(gradio.JSON, visible=False)
    if not hasattr(gradio, "DragDrop"):
        gradio.DragDrop = _like(gradio.Textbox, lines=3)
    init = gradio.Blocks.__init__
    if "dark_theme" not in inspect.signature(init).parameters:

        def blocks(self, *args, dark_theme=None, **kwargs):
            init(self, *args, **kwargs)

        gradio.Blocks.__init__ = blocks


def _like(component, **fixed):
    """The component itself under another name: the page knows its front end by the class's name."""

    def make(*args, **kwargs):
        return component(*args, **{**kwargs, **fixed})

    return make


sys.meta_path.insert(0, _Names())
