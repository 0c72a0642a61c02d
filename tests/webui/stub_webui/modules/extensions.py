"""Extensions: found as files, executed as flat modules, again at every restart of the page."""

import importlib
import importlib.util
import inspect
import sys

import modules.shared as shared
from modules.logging_colors import logger

state = {}
available_extensions = []
setup_called = set()


def _execute(name):
    script = shared.user_data_dir / "extensions" / name / "script.py"
    if not script.exists():
        return importlib.import_module(f"extensions.{name}.script")
    spec = importlib.util.spec_from_file_location(f"user_ext_{name}", str(script))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def load_extensions():
    global state
    state = {}
    for at, name in enumerate(shared.args.extensions):
        if name not in available_extensions:
            continue
        logger.info(f"Extension {name}")
        try:
            extension = _execute(name)
            if extension not in setup_called:  # a module that was executed again is another one
                for key in getattr(extension, "params", {}):
                    setting = f"{name}-{key}"
                    shared.default_settings[setting] = extension.params[key]
                    extension.params[key] = shared.settings.get(setting, extension.params[key])
                if hasattr(extension, "setup"):
                    extension.setup()
                setup_called.add(extension)
            state[name] = [True, at, extension]
        except ModuleNotFoundError:
            logger.error(f"Extension {name} needs a package that is not installed.")
            raise  # ends the server
        except Exception:
            logger.exception(f"Extension {name} failed")


def iterator():
    for name in sorted(state, key=lambda name: state[name][1]):
        if state[name][0]:
            yield state[name][2], name


def _texts(function, text, state, is_chat=False):
    for extension, _ in iterator():
        if hasattr(extension, function):
            call = getattr(extension, function)
            names = list(inspect.signature(call).parameters)
            given = [text, state][: len([name for name in names if name != "is_chat"])]
            text = call(*given, **({"is_chat": is_chat} if "is_chat" in names else {}))
    return text


def _each(function, *values):
    """Every extension in turn; what it returns takes the place of the last values."""
    for extension, _ in iterator():
        if hasattr(extension, function):
            result = getattr(extension, function)(*values)
            values = result if isinstance(result, tuple) else (result,)
    return values if len(values) > 1 else values[0]


def _tokenizers(state, prompt, input_ids, embeds):
    for extension, _ in iterator():
        if hasattr(extension, "tokenizer_modifier"):
            prompt, input_ids, embeds = extension.tokenizer_modifier(state, prompt, input_ids, embeds)
    return prompt, input_ids, embeds


def _processors(processors, input_ids):
    for extension, _ in iterator():
        if hasattr(extension, "logits_processor_modifier"):
            result = extension.logits_processor_modifier(processors, input_ids)
            processors = result if isinstance(result, list) else processors
    return processors


def _generator():
    return next((module.custom_generate_reply for module, _ in iterator() if hasattr(module, "custom_generate_reply")), None)


def apply_extensions(kind, *args, **kwargs):
    if kind in ("input", "output"):
        return _texts(f"{kind}_modifier", *args, **kwargs)
    calls = {
        "state": lambda state: _each("state_modifier", state),
        "history": lambda history: _each("history_modifier", history),
        "tokenizer": _tokenizers,
        "logits_processor": _processors,
        "custom_generate_reply": _generator,
    }
    return calls[kind](*args, **kwargs)


def _is_tab(extension):
    return getattr(extension, "params", {}).get("is_tab", False)


def create_extensions_block():
    import gradio as gr

    shown = [extension for extension, _ in iterator() if hasattr(extension, "ui") and not _is_tab(extension)]
    if shown:
        with gr.Column(elem_id="extensions"):
            for extension in shown:
                extension.ui()


def create_extensions_tabs():
    import gradio as gr

    for extension, name in iterator():
        if hasattr(extension, "ui") and _is_tab(extension):
            with gr.Tab(extension.params.get("display_name", name), elem_classes="extension-tab"):
                extension.ui()
