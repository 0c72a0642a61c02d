import os
from pathlib import Path

from modules import shared
from modules.logging_colors import logger


def gradio(*keys):
    """The widgets of these names."""
    if len(keys) == 1 and isinstance(keys[0], (list, tuple)):
        keys = keys[0]
    return [shared.gradio[key] for key in keys]


def check_model_loaded():
    if shared.model_name != "None" and shared.model is not None:
        return True, None
    message = "There is no model: choose one in the Model tab."
    logger.error(message)
    return False, message


def resolve_model_path(model_name_or_path):
    if model_name_or_path is None:
        raise FileNotFoundError("No model was named.")
    path = Path(model_name_or_path)
    return path if path.exists() else Path(shared.args.model_dir) / model_name_or_path


def get_available_models():
    """GGUF files at any depth, links followed, then the folders that hold none."""
    root = Path(shared.args.model_dir)
    files = []
    for folder, _, names in os.walk(root, followlinks=True):
        files += [str((Path(folder) / name).relative_to(root)) for name in names if name.lower().endswith(".gguf")]
    taken = {Path(file).parts[0] for file in files}
    folders = [item.name for item in root.iterdir() if item.is_dir() and item.name not in taken]
    return sorted(files, key=str.lower) + sorted(folders)


def get_available_extensions():
    """The user's own first; one of these hides the webui's of the same name."""
    own = sorted(script.parent.name for script in (shared.user_data_dir / "extensions").glob("*/script.py"))
    return own + sorted({script.parent.name for script in Path("extensions").glob("*/script.py")} - set(own))


def get_available_loras():
    return ["None", *sorted(item.name for item in Path(shared.args.lora_dir).glob("*") if item.suffix != ".txt")]
