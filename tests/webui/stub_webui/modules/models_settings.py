"""What a model's file says about it, and what the user saved for it in config-user.yaml."""

import functools
import json
import re
from pathlib import Path

import yaml
from modules import loaders, metadata_gguf, shared
from modules.utils import resolve_model_path


@functools.lru_cache(maxsize=1)
def load_gguf_metadata_with_cache(model_file):
    return metadata_gguf.load_metadata(model_file)


def infer_loader(model_name, model_settings=None, hf_quant_method=None):
    path = resolve_model_path(model_name)
    if not path.exists():
        return None
    gguf = shared.args.portable or model_name.lower().endswith(".gguf") or any(path.glob("*.gguf"))
    return "llama.cpp" if gguf else "Transformers"


def get_model_metadata(model):
    path = resolve_model_path(model)
    settings = {
        "bf16": False,
        "ctx_size": 8192,
        "truncation_length": shared.settings["truncation_length"],
        "truncation_length_info": shared.settings["truncation_length"],
        "skip_special_tokens": shared.settings["skip_special_tokens"],
        "loader": infer_loader(model),
    }
    shared.bos_token, shared.eos_token = "<s>", "</s>"
    if settings["loader"] == "llama.cpp":
        settings.update(_of_gguf(path))
    elif (path / "config.json").exists():
        length = json.loads((path / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings", 2048)
        settings.update(truncation_length=length, truncation_length_info=length, ctx_size=min(length, 8192))
    settings.setdefault("instruction_template", "stub")
    settings.setdefault("instruction_template_str", shared.default_settings["instruction_template_str"])
    for pattern, saved in shared.user_config.items():
        if re.match(pattern.lower(), Path(model).name.lower()):
            settings.update(saved)
    return settings


def _of_gguf(path):
    file = path if path.is_file() else next(iter(path.glob("*.gguf")))
    found = load_gguf_metadata_with_cache(file)
    settings = {}
    for name, value in found.items():
        if name.endswith(".context_length"):
            settings.update(ctx_size=0, truncation_length_info=value)
        elif name.endswith(".block_count"):
            settings.update(gpu_layers=-1, max_gpu_layers=value + 1)
    if "tokenizer.chat_template" in found:
        tokens = found["tokenizer.ggml.tokens"]
        for kind in ("bos", "eos"):
            at = found.get(f"tokenizer.ggml.{kind}_token_id")
            setattr(shared, f"{kind}_token", "" if at is None else tokens[at])
        settings["instruction_template"] = "from the file"
        settings["instruction_template_str"] = found["tokenizer.chat_template"]
    return settings


def update_model_parameters(state, initial=False):
    for name in loaders.list_model_elements():
        if name in state and not (initial and name in shared.provided_arguments):
            setattr(shared.args, name, state[name])


def apply_model_settings_to_state(model, state):
    """A model was picked: its settings go into the widgets, the loader that its file asks for among them."""
    import gradio as gr

    settings = get_model_metadata(model)
    loader = settings.pop("loader")
    if not (loader == "ExLlamav3_HF" and state["loader"] == "ExLlamav3"):
        state["loader"] = loader
    state.update({name: value for name, value in settings.items() if name in state and name != "gpu_layers"})
    if state["loader"] == "llama.cpp" and "gpu_layers" in settings:
        layers = settings["gpu_layers"]
        state["gpu_layers"] = gr.update(value=layers, maximum=settings.get("max_gpu_layers", 256))
        state["vram_info"] = update_gpu_layers_and_vram(
            state["loader"], model, layers, state["ctx_size"], state["cache_type"]
        )
    return state


def save_model_settings(model, state):
    if model == "None":
        yield "No model is chosen."
        return
    config = shared.load_user_config()
    saved = config.setdefault(Path(model).name + "$", {})
    for name in loaders.list_model_elements():
        if name == "loader" or name in loaders.loaders_and_params[state["loader"]]:
            saved[name] = state[name]
    shared.user_config = config
    file = Path(shared.args.model_dir) / "config-user.yaml"
    file.write_text(yaml.dump(config, sort_keys=False), encoding="utf-8")
    yield f"Settings of `{model}` saved to `{file}`."


def update_gpu_layers_and_vram(loader, model, gpu_layers, ctx_size, cache_type):
    if loader != "llama.cpp" or not str(model).endswith(".gguf") or gpu_layers < 0 or ctx_size == 0:
        return "VRAM: as needed"
    size = resolve_model_path(model).stat().st_size / 2**20
    return f"VRAM: about {size * (gpu_layers + 1) / 30 + ctx_size / 64:.0f} MiB"
