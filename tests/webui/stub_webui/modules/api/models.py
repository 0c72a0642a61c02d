from modules import loaders, shared
from modules.LoRA import add_lora_to_model
from modules.models import load_model, unload_model
from modules.models_settings import get_model_metadata, update_model_parameters
from modules.utils import get_available_loras, get_available_models


def get_current_model_info():
    return {"model_name": shared.model_name, "lora_names": shared.lora_names, "loader": shared.args.loader}


def list_models():
    return {"model_names": get_available_models()}


def _load_model(data):
    """Everything back to the command line first, the loader too; then only what the request names."""
    unload_model()
    metadata = get_model_metadata(data["model_name"])
    names = set(loaders.list_model_elements())
    for name in names:
        if hasattr(shared.args, name) and hasattr(shared.original_args, name):
            setattr(shared.args, name, getattr(shared.original_args, name))
    update_model_parameters(metadata)
    for name, value in (data.get("args") or {}).items():
        if name in names - {"extra_flags"} and hasattr(shared.args, name):
            setattr(shared.args, name, value)
    shared.model, shared.tokenizer = load_model(data["model_name"])
    if data.get("instruction_template_str") is not None:
        shared.settings["instruction_template_str"] = data["instruction_template_str"]


def list_loras():
    return {"lora_names": get_available_loras()[1:]}


def load_loras(lora_names):
    add_lora_to_model(lora_names)
