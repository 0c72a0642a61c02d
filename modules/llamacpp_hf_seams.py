"""How the loader of `llamacpp_hf.py`, whose engine is `transformers_llamacpp`, becomes known to a webui that has a fixed list
of loaders, without an edit.

`register()` adds it to the webui's tables and puts functions of its own in the place of those that know the list, wherever
they were imported. Here is what loads, unloads and saves; `llamacpp_hf_replies.py` has what answers.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml
from modules import llamacpp_hf as host
from modules import loaders, models, models_settings, shared, utils
from modules.llamacpp_hf import LOADER, LlamacppHF, engine
from modules.logging_colors import logger

__all__ = ["failure", "is_ours", "load_again", "loaded_model", "register", "replace", "take_over"]

LOAD_PARAMETERS = [
    "gpu_layers", "threads", "threads_batch", "batch_size", "ubatch_size", "ctx_size", "cache_type", "tensor_split",
    "split_mode", "no_kv_offload", "no_mmap", "mlock", "numa", "streaming_llm", "cfg_cache", "model_draft", "draft_max",
    "gpu_layers_draft", "ctx_size_draft", "speculative_decoding_accordion",
]  # fmt: skip
"""Elements of the Model tab that this loader reads."""

FLAGS = [name for name in LOAD_PARAMETERS if not name.endswith("_accordion")]


# -- what is remembered ------------------------------------------------------------------------------------------------


class _Remembered:
    """The models whose saved loader is this one. The webui's own file must not name it: where the extension is off, the
    webui would not start with it."""

    def file(self) -> Path:
        return host.folder() / "loaders.json"

    def all(self) -> dict[str, str]:
        try:
            found = json.loads(self.file().read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            return {}

    def __contains__(self, model: Any) -> bool:
        return any(value == LOADER and _matches(pattern, model) for pattern, value in self.all().items())

    def set(self, pattern: str, ours: bool) -> None:
        found = self.all()
        if (found.get(pattern) == LOADER) == ours:
            return
        found.pop(pattern, None)
        if ours:
            found[pattern] = LOADER
        self.file().parent.mkdir(parents=True, exist_ok=True)
        self.file().write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


remembered = _Remembered()


def _matches(pattern: str, model: Any) -> bool:
    """As the webui finds a model's saved settings, or the name itself, which may be no pattern."""
    name = Path(str(model)).name.lower()
    try:
        return pattern.lower() == f"{name}$" or re.match(pattern.lower(), name) is not None
    except re.error:
        return False


def _pattern(model: str) -> str:
    """What the webui saves a model's settings under, and finds: its name, escaped where that is another pattern."""
    name = Path(model).name
    try:
        plain = re.match(f"{name.lower()}$", name.lower()) is not None
    except re.error:
        plain = False
    return f"{name if plain else re.escape(name)}$"


class _Failure:
    """Why the last load failed, for the page and the API; "" after one that did not."""

    message = ""


class _Intent:
    """What the webui keeps in `shared.args` for the model that is loaded and for the one that is being chosen.

    `flags`: those that the model of ours was loaded with. `asleep`: the name of one that was unloaded for idleness, and is to
    come back as it was. `loader`: what was chosen for the next load while a model of ours is there; `shared.args.loader`,
    which the webui asks about the model it has, must not tell that yet."""

    flags: ClassVar[dict[str, Any]] = {}
    asleep: str | None = None
    loader: str | None = None

    @classmethod
    def as_loaded(cls) -> None:
        """The flags of the model that is there, or asleep, again."""
        for name, value in cls.flags.items():
            setattr(shared.args, name, value)


def is_ours(loader: Any) -> bool:
    return re.sub(r"[^a-z]", "", str(loader).lower()) == "llamacpphf"


def loaded_model() -> Any:
    """The model, where it is this loader's."""
    return shared.model if isinstance(shared.model, LlamacppHF) else None


def failure() -> str:
    """Why the last load failed; "" after one that did not."""
    return _Failure.message


# -- registration ------------------------------------------------------------------------------------------------------

_replaced: dict[str, tuple[Any, Any]] = {}


def replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(function)` in the function's place, in its module and in all that imported it by name. Once; called again
    it looks for what was imported since."""
    key = f"{module.__name__}.{name}"
    if key not in _replaced:
        old = getattr(module, name)
        _replaced[key] = old, functools.wraps(old)(make(old))
    old, new = _replaced[key]
    for other in list(sys.modules.values()):
        for attribute, value in list(getattr(other, "__dict__", {}).items()):
            if value is old and other is not sys.modules[__name__]:
                setattr(other, attribute, new)


def register() -> None:
    """Make the loader known. Idempotent, and called again after the page's modules were imported."""
    loaders.loaders_and_params[LOADER] = LOAD_PARAMETERS
    loaders.loaders_samplers[LOADER] = loaders.transformers_samplers() - {"static_cache"}
    for cached in (loaders.list_all_samplers, loaders.get_all_params, loaders.list_model_elements):
        cached.cache_clear()
    replace(shared, "fix_loader_name", _fix_loader_name)
    if shared.args.loader is None and is_ours(shared.original_args.loader):
        shared.args.loader = shared.original_args.loader = LOADER
    _clean_user_config()
    replace(models, "load_model", _load_model)
    replace(models, "unload_model", _unload_model)
    replace(models, "load_model_if_idle_unloaded", _one_at_a_time)
    replace(models_settings, "get_model_metadata", _get_model_metadata)
    replace(models_settings, "update_model_parameters", _update_model_parameters)
    replace(models_settings, "apply_model_settings_to_state", _apply_model_settings_to_state)
    replace(models_settings, "save_model_settings", _save_model_settings)
    replace(importlib.import_module("modules.LoRA"), "add_lora_to_model", _add_lora_to_model)
    if (menu := sys.modules.get("modules.ui_model_menu")) is not None:
        replace(menu, "update_truncation_length", _update_truncation_length)
        replace(menu, "load_model_wrapper", _load_model_wrapper)
    host.part("replies").register()


def take_over() -> None:
    """Load the model of the command line, where it asked for this loader: the webui, which did not know it then, loaded the
    model with another one, or none."""
    name = shared.model_name
    provided = "loader" in shared.provided_arguments
    wanted = is_ours(shared.original_args.loader) if provided else name not in (None, "None") and name in remembered
    if not wanted:
        return
    shared.args.loader = LOADER
    if name in (None, "None") or loaded_model() is not None or _Failure.message:
        return
    models.unload_model(keep_model_name=True)
    try:
        shared.model, shared.tokenizer = models.load_model(name, LOADER)
    except Exception:
        logger.error(_Failure.message)


def _fix_loader_name(old: Any) -> Any:
    return lambda name: LOADER if is_ours(name) else old(name)


def _clean_user_config() -> None:
    """Take our name out of the webui's file of saved settings, where webuis of before April 2025 wrote it."""
    if host.problem():
        return
    path = Path(shared.args.model_dir) / "config-user.yaml"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    cleaned, patterns = engine("webui.yaml_lines").without_loader(text, LOADER)
    if patterns:
        try:
            for pattern in patterns:
                remembered.set(pattern, True)
            path.write_text(cleaned, encoding="utf-8")
            logger.info(f"{LOADER}: remembers the loader of {', '.join(patterns)} in {remembered.file()} from now on")
        except OSError as error:
            logger.warning(f"{LOADER}: {path} names this loader, at which the webui dies when this extension is off: {error}")
    for saved in shared.user_config.values():
        if isinstance(saved, dict) and is_ours(saved.get("loader")):
            del saved["loader"]


def _write_user_config(config: Any) -> Path:
    path = Path(shared.args.model_dir) / "config-user.yaml"
    path.write_text(yaml.dump(dict(config), sort_keys=False), encoding="utf-8")
    return path


# -- loading -----------------------------------------------------------------------------------------------------------


def _load_model(old: Any) -> Any:
    def load_model(model_name: str, loader: str | None = None) -> Any:
        if loader is None and _Intent.asleep == model_name:
            loader = LOADER
            _Intent.as_loaded()
        chosen = loader or _Intent.loader or shared.args.loader or (LOADER if model_name in remembered else None)
        _Failure.message, _Intent.asleep, _Intent.loader = "", None, None
        if not is_ours(chosen):
            return old(model_name, chosen)
        try:
            return _load(model_name)
        except Exception as error:
            _Failure.message = _why(model_name, error)
            raise

    return load_model


def _no_gguf(model_name: Any) -> Exception | None:
    path = utils.resolve_model_path(model_name)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        start = file.read(4)
    return None if start == b"GGUF" else ValueError(f"it is not a GGUF file (it starts with {start!r})")


def _why(model_name: str, error: Exception) -> str:
    return f"{model_name} could not be loaded with {LOADER}: {' '.join(str(error).split()) or type(error).__name__}"


def _load(model_name: str) -> tuple[Any, Any]:
    logger.info(f'Loading "{model_name}" with {LOADER}')
    began = time.time()
    shared.is_seq2seq = False
    shared.model_name = model_name
    shared.args.loader = LOADER
    if reason := host.problem():
        raise ImportError(reason)
    importlib.import_module("modules.transformers_loader")  # quietens transformers, which generation would do anyway
    importlib.import_module("modules.sampler_hijack").hijack_samplers()  # before the model makes its GenerationConfig
    metadata = models_settings.get_model_metadata(model_name)
    _Intent.flags = {name: getattr(shared.args, name) for name in FLAGS}
    model, tokenizer = LlamacppHF.from_pretrained(model_name)
    shared.settings.update({name: value for name, value in metadata.items() if name in shared.settings})
    shared.settings["truncation_length"] = model.config.max_position_embeddings
    shared.is_multimodal = False
    shared.persistent_interface_state["loader"] = LOADER  # for pages that are opened from now on
    for other in logger.handlers:  # what the engine warns of is to be seen where the webui's own warnings are
        if other not in logging.getLogger(host.ENGINE).handlers:
            logging.getLogger(host.ENGINE).addHandler(other)
    if changed := host.settings().changed():
        logger.info(f"{LOADER}: set in the tab, for the page and the API: {changed}")
    logger.info(f'Loaded "{model_name}" in {time.time() - began:.2f} seconds, {model.config.max_position_embeddings} tokens')
    return model, tokenizer


_waking = threading.Lock()


def _one_at_a_time(old: Any) -> Any:
    def load_model_if_idle_unloaded() -> None:
        with _waking:  # several requests find it asleep, and one wakes it
            old()

    return load_model_if_idle_unloaded


def _unload_model(old: Any) -> Any:
    def unload_model(keep_model_name: bool = False) -> None:
        ours = loaded_model()
        _Failure.message = ""
        if ours is not None:
            ours.unload()
            _Intent.asleep = shared.model_name if keep_model_name else None
        old(keep_model_name)

    return unload_model


def _add_lora_to_model(old: Any) -> Any:
    """The menu of LoRAs, `--lora` and the API's: a LoRA is part of a load here, so that the model is loaded again."""

    def add_lora_to_model(lora_names: list[str]) -> None:
        if loaded_model() is None:
            old(lora_names)
            return
        names = [name for name in lora_names if name not in (None, "", "None")]
        errors, before = engine("errors"), host.settings()["lora_path"]
        try:
            if len(names) > 1:
                raise errors.UnsupportedFeatureError(f"{LOADER} takes one LoRA at a time, not {len(names)}", "lora_path")
            paths = [str(engine("files").resolve_gguf(Path(shared.args.lora_dir) / name)) for name in names]
            host.settings().set(lora_path="".join(paths))
            try:
                load_again()
            except errors.LlamaCppError:
                host.settings().set(lora_path=before)
                reason = _Failure.message
                load_again()
                raise errors.ModelLoadError(reason) from None
            shared.lora_names = names
        except errors.LlamaCppError as error:
            raise host.part("replies").told(error, "gradio" in sys.modules) from error

    return add_lora_to_model


def load_again() -> None:
    name = shared.model_name
    models.unload_model(keep_model_name=True)
    _Intent.as_loaded()
    shared.model, shared.tokenizer = models.load_model(name, LOADER)


def _get_model_metadata(old: Any) -> Any:
    def get_model_metadata(model: Any) -> Any:
        try:
            found = old(model)
        except Exception as error:  # it believes what it finds in the file
            _Failure.message = _why(model, _no_gguf(model) or error)
            raise
        return {**found, "loader": LOADER} if found.get("loader") == "llama.cpp" and model in remembered else found

    return get_model_metadata


def _update_model_parameters(old: Any) -> Any:
    def update_model_parameters(state: dict[str, Any], initial: bool = False) -> None:
        # the webui puts updates of its page into its state, and then takes them for the flags
        state = {name: value for name, value in state.items() if not (isinstance(value, dict) and "__type__" in value)}
        _Intent.loader = None
        if loaded_model() is not None and "loader" in state:
            _Intent.loader = state.pop("loader")
        old(state, initial)

    return update_model_parameters


# -- the Model tab -----------------------------------------------------------------------------------------------------


def _apply_model_settings_to_state(old: Any) -> Any:
    def apply_model_settings_to_state(model: Any, state: dict[str, Any]) -> dict[str, Any]:
        before = state.get("loader")
        state = old(model, state)
        chosen = any("loader" in saved for pattern, saved in shared.user_config.items() if _matches(pattern, model))
        loaded = loaded_model() is not None and model == shared.model_name
        if (is_ours(before) or loaded) and state.get("loader") == "llama.cpp" and not chosen:
            state["loader"] = LOADER
        elif is_ours(state.get("loader")):
            found = models_settings.get_model_metadata(model)
            if "gpu_layers" in found:
                gr = importlib.import_module("gradio")
                state["gpu_layers"] = gr.update(value=found["gpu_layers"], maximum=found.get("max_gpu_layers", 256))
        return state

    return apply_model_settings_to_state


def _save_model_settings(old: Any) -> Any:
    def save_model_settings(model: str, state: dict[str, Any]) -> Iterator[str]:
        pattern = _pattern(str(model))
        if model == "None" or not is_ours(state.get("loader")):
            if model != "None":
                remembered.set(pattern, False)
            yield from old(model, state)
            return
        config = dict(shared.load_user_config() or {})
        entry = {name: value for name, value in (config.get(pattern) or {}).items() if name != "loader"}
        names = [name for name in loaders.list_model_elements() if name in LOAD_PARAMETERS and name in state]
        config[pattern] = entry | {name: state[name] for name in names}
        shared.user_config = config
        path = _write_user_config(config)
        remembered.set(pattern, True)
        yield f"Settings for `{model}` saved to `{path}`, its loader to `{remembered.file()}`."

    return save_model_settings


def _update_truncation_length(old: Any) -> Any:
    def update_truncation_length(current_length: Any, state: dict[str, Any]) -> Any:
        if is_ours(state.get("loader")) and loaded_model() is not None:
            return shared.settings["truncation_length"]
        return old(current_length, state)

    return update_truncation_length


def _load_model_wrapper(old: Any) -> Any:
    def load_model_wrapper(selected_model: str, loader: str, autoload: bool = False) -> Iterator[str]:
        try:
            for text in old(selected_model, loader, autoload):
                failed = autoload and _Failure.message and not text.startswith("Loading")
                yield f"### Not loaded\n\n{_Failure.message}" if failed else text
        except Exception as error:  # the webui reads the file's metadata first, and believes what it finds
            if not is_ours(loader):
                raise
            yield f"### Not loaded\n\n{_Failure.message or _why(selected_model, error)}"

    return load_model_wrapper
