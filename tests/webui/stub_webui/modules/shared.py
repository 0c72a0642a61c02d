"""What all modules share, and the command line: parsed when this is imported, before anything of an extension exists."""

import argparse
import copy
import shlex
import sys
from collections import OrderedDict
from pathlib import Path

import yaml
from modules.presets import INTEGERS, default_preset, default_preset_values

model = None
tokenizer = None
model_name = "None"
is_seq2seq = False
is_multimodal = False
model_dirty_from_training = False
lora_names = []
bos_token = "<s>"
eos_token = "</s>"

stop_everything = False
generation_lock = None
processing_message = "..."

gradio = {}
persistent_interface_state = {}
input_elements = []
need_restart = False

FLAGS = [
    "api", "auto-launch", "bf16", "cfg-cache", "cpu", "cpu-moe", "disk", "force-safetensors", "ik", "listen",
    "load-in-4bit", "load-in-8bit", "mlock", "multi-user", "no-cache", "no-kv-offload", "no-mmap", "no_use_fast",
    "nowebui", "numa", "portable", "public-api", "share", "streaming-llm", "trust-remote-code", "use_double_quant",
    "verbose",
]
TEXTS = [
    "device-draft", "extra-flags", "gpu-split", "listen-host", "lora-dir", "mmproj", "model", "model-dir", "model-draft",
    "settings", "tensor-split", "user-data-dir",
]
NUMBERS = {
    "batch-size": 1024,
    "cpu-memory": 0,
    "ctx-size-draft": 0,
    "draft-max": 4,
    "gpu-layers-draft": 256,
    "idle-timeout": 0,
    "listen-port": None,
    "api-port": 5000,
    "parallel": 1,
    "threads": 0,
    "threads-batch": 0,
    "ubatch-size": 1024,
}


def _parser():
    made = argparse.ArgumentParser(allow_abbrev=False)
    for name in FLAGS:
        made.add_argument(f"--{name}", action="store_true")
    for name in TEXTS:
        made.add_argument(f"--{name}")
    for name, default in NUMBERS.items():
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--gpu-layers", "--n-gpu-layers", type=int, default=-1)
    made.add_argument("--ctx-size", "--n_ctx", "--max_seq_len", type=int, default=0)
    made.add_argument("--cache-type", "--cache_type", default="fp16")
    made.add_argument("--split-mode", default="layer", choices=["layer", "row", "tensor", "none"])
    made.add_argument("--fit-target", default="512")
    made.add_argument("--spec-type", default="none")
    made.add_argument("--loader")  # no choices: an unknown name is no error, see fix_loader_name
    made.add_argument("--lora", nargs="+")
    made.add_argument("--extensions", nargs="+")
    made.set_defaults(user_data_dir="user_data")
    for name, default in (default_preset_values | {"top_p": 0.95}).items():
        option = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            made.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
        else:
            kind = str if isinstance(default, str) else int if name in INTEGERS else float
            made.add_argument(option, type=kind, default=default)
    return made


def _own_folder():
    """`--user-data-dir`, needed before the command line can be read, because CMD_FLAGS.txt lies in it."""
    for at, word in enumerate(sys.argv):
        if word == "--user-data-dir" and at + 1 < len(sys.argv):
            return Path(sys.argv[at + 1])
        if word.startswith("--user-data-dir="):
            return Path(word.partition("=")[2])
    return Path("user_data")


def _read_flags_file():
    file = user_data_dir / "CMD_FLAGS.txt"
    if file.exists():
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        flags = shlex.split(" ".join(line for line in lines if not line.startswith("#")))
        sys.argv[1:1] = flags


def _provided():
    """The options that were given by the user: the files of settings may not change these."""
    names = {text.lstrip("-").replace("-", "_"): action.dest for action in parser._actions for text in action.option_strings}
    words = (word.lstrip("-").replace("-", "_") for word in sys.argv[1:])
    return [names[word] for word in words if word in names]


LOADER_NAMES = {"llama.cpp": "llama.cpp", "llamacpp": "llama.cpp", "transformers": "Transformers", "hf": "Transformers"}


def fix_loader_name(name):
    """A loader nobody knows becomes None, silently, and the file decides."""
    return LOADER_NAMES.get(name.lower()) if name else name


def load_user_config():
    file = Path(args.model_dir) / "config-user.yaml"
    return (yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if file.exists() else {}


user_data_dir = _own_folder()
_read_flags_file()
parser = _parser()
args = parser.parse_args()
user_data_dir = Path(args.user_data_dir)
args.model_dir = args.model_dir or str(user_data_dir / "models")
args.lora_dir = args.lora_dir or str(user_data_dir / "loras")
original_args = copy.deepcopy(args)
args_defaults = parser.parse_args([])
provided_arguments = _provided()

settings = {
    **default_preset(),
    "mode": "instruct",
    "top_p": 0.95,
    "max_new_tokens": 512,
    "prompt_lookup_num_tokens": 0,
    "max_tokens_second": 0,
    "auto_max_new_tokens": True,
    "ban_eos_token": False,
    "add_bos_token": True,
    "skip_special_tokens": True,
    "stream": True,
    "static_cache": False,
    "truncation_length": 8192,
    "seed": -1,
    "custom_stopping_strings": "",
    "custom_token_bans": "",
    "negative_prompt": "",
    "grammar_string": "",
    "custom_system_message": "",
    "instruction_template_str": "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
    "default_extensions": [],
}
default_settings = copy.deepcopy(settings)
args.loader = fix_loader_name(args.loader)
user_config = OrderedDict(load_user_config())
