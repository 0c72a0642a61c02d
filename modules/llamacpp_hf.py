"""The `llamacpp_HF` loader of text-generation-webui: GGUF models with transformers' `generate()`.

    from modules.llamacpp_hf import LlamacppHF, register

    register()                                       # the webui knows the loader from now on
    model, tokenizer = LlamacppHF.from_pretrained("model.gguf")

Nothing of the webui is edited: `llamacpp_hf_seams.py`, beside this file, registers the loader. Without llama-cpp-python the
loader is there all the same, and says at loading what is missing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from modules import shared, utils

__all__ = ["LOADER", "LlamacppHF", "engine", "panel", "part", "problem", "register", "settings", "take_over"]

LOADER = "llamacpp_HF"
ENGINE = "transformers_llamacpp"
HERE = Path(__file__).resolve().parent

# -- the engine --------------------------------------------------------------------------------------------------------


def engine(module: str = "") -> Any:
    """The package `transformers_llamacpp`, or a module of it: the installed one, else the folder beside this file.

    It has one name wherever it lies: two copies of its classes would not know each other. Raises `ImportError` with the
    cure where llama-cpp-python is missing.
    """
    if ENGINE not in sys.modules and importlib.util.find_spec(ENGINE) is None:
        _load_file(ENGINE, HERE / ENGINE / "__init__.py")
    return importlib.import_module(f"{ENGINE}.{module}" if module else ENGINE)


def _load_file(name: str, file: Path) -> ModuleType:
    """The module in `file`, under `name`. Raises `ImportError`."""
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"the {LOADER} loader needs {name}, installed or in {file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for broken in [other for other in sys.modules if other == name or other.startswith(f"{name}.")]:
            del sys.modules[broken]
        raise
    return module


def part(name: str) -> Any:
    """Another file of the loader, beside this one: "seams" or "replies"."""
    module = f"{__name__}_{name}"
    return sys.modules.get(module) or _load_file(module, HERE / f"llamacpp_hf_{name}.py")


def problem() -> str | None:
    """Why no model can be loaded, `None` where one can."""
    try:
        engine()
    except ImportError as error:
        return f"The {LOADER} loader cannot be used: {error}"
    return None


def folder() -> Path:
    """Where this loader keeps its files."""
    return Path(shared.user_data_dir) / "llamacpp_hf"


@functools.cache
def settings() -> Any:
    """What the panel sets (`transformers_llamacpp.webui.settings.Settings`)."""
    return engine("webui.settings").Settings(folder() / "settings.json")


_Model: Any = object if problem() else engine("webui.model").WebuiModel


class LlamacppHF(_Model):
    """A GGUF as the webui's `shared.model`."""

    @classmethod
    def from_pretrained(cls, model_name: str) -> tuple[Any, Any]:  # type: ignore[override]
        """`(model, tokenizer)` for a file, a folder or a first shard: a path, or a name in the webui's folder of models,
        with the options in `shared.args` and in the panel. Raises `LlamaCppError`, or `ImportError` without an engine."""
        if reason := problem():
            raise ImportError(reason)
        loading, files = engine("webui.loading"), engine("files")
        path = files.resolve_gguf(utils.resolve_model_path(model_name))
        trained = engine("gguf_reader").context_length(path)
        options = loading.load_options(shared.args, trained, settings().load())

        def find_draft(name: str) -> tuple[Path, dict[str, Any]]:
            return files.resolve_gguf(utils.resolve_model_path(name)), loading.draft_options(shared.args, options["n_ctx"])

        try:
            model = cls.open(path, options, settings(), find_draft)
        except engine("errors").UnsupportedFeatureError as error:
            if shared.args.streaming_llm and error.feature in ("n_sink", "reuse_min_chunk"):
                raise type(error)(f"streaming-llm, which sets n_sink and reuse_min_chunk: {error}", error.feature) from error
            raise
        try:
            if draft := loading.wanted_draft(shared.args):
                model.use_draft(draft, loading.draft_max(shared.args))
            return model, model.tokenizer
        except BaseException:
            model.unload()
            raise


@functools.cache
def panel() -> Any:
    """What the tab of the extension shows and does (`transformers_llamacpp.webui.panel.Panel`)."""

    seams = part("seams")
    return engine("webui.panel").Panel(settings(), seams.loaded_model, seams.failure, seams.load_again)


def register() -> None:
    """Make the loader known to the webui. Idempotent, and called again after the page's modules were imported."""
    part("seams").register()


def take_over() -> None:
    """Load the model of the command line, where it asked for this loader: the webui, which did not know it then, loaded the
    model with another one, or none."""
    part("seams").take_over()
