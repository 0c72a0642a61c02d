"""Loading and unloading. No lock is taken here, whoever is generating."""

import sys
import threading
import time

import modules.shared as shared
from modules.logging_colors import logger
from modules.models_settings import get_model_metadata
from modules.utils import resolve_model_path

last_generation_time = time.time()
active_generation_count = 0
_generation_count_lock = threading.Lock()


def load_model_if_idle_unloaded():
    global last_generation_time
    if shared.args.idle_timeout > 0 and shared.model is None and shared.model_name not in (None, "None"):
        shared.model, shared.tokenizer = load_model(shared.model_name)
        last_generation_time = time.time()


def load_model(model_name, loader=None):
    started = time.time()
    logger.info(f"Loading {model_name}")
    shared.is_seq2seq = False
    shared.model_name = model_name
    load_func_map = {"llama.cpp": llama_cpp_server_loader, "Transformers": transformers_loader}

    metadata = get_model_metadata(model_name)
    loader = loader or shared.args.loader or metadata["loader"]
    if loader is None:
        logger.error("There is no such model.")
        raise ValueError
    if loader != "llama.cpp" and "modules.sampler_hijack" not in sys.modules:
        from modules import sampler_hijack

        sampler_hijack.hijack_samplers()
    shared.args.loader = loader
    if loader != "llama.cpp" and shared.args.ctx_size == 0:
        shared.args.ctx_size = 8192

    output = load_func_map[loader](model_name)
    model, tokenizer = output if isinstance(output, tuple) else (output, None)
    if model is None:
        return None, None
    if tokenizer is None:
        from modules.transformers_loader import load_tokenizer

        tokenizer = load_tokenizer(model_name)

    shared.settings.update({name: value for name, value in metadata.items() if name in shared.settings})
    if loader == "llama.cpp":
        shared.settings["truncation_length"] = shared.args.ctx_size or model.n_ctx
    shared.is_multimodal = loader == "llama.cpp" and model.is_multimodal()
    logger.info(f"{model_name}: loaded by {loader} in {time.time() - started:.1f} s")
    return model, tokenizer


def llama_cpp_server_loader(model_name):
    from modules.llama_cpp_server import LlamaServer

    path = resolve_model_path(model_name)
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if not files:
        logger.error(f"There is no .gguf in {path}")
        return None, None
    try:
        model = LlamaServer(files[0])
    except Exception as error:
        logger.error(f"llama.cpp cannot load it: {error}")
        return None, None
    return model, model


def transformers_loader(model_name):
    from modules.transformers_loader import load_model_HF

    return load_model_HF(model_name)


def unload_model(keep_model_name=False):
    if shared.model is None:
        return
    kind = type(shared.model).__name__
    if kind in ("Exllamav3Model", "Exllamav3HF", "TensorRTLLMModel"):  # nobody else is asked to free anything
        shared.model.unload()
    elif kind == "LlamaServer":
        shared.model.stop()
    shared.model = shared.tokenizer = None
    shared.lora_names = []
    shared.model_dirty_from_training = False
    if kind != "LlamaServer":
        from modules.torch_utils import clear_torch_cache

        clear_torch_cache()
    if not keep_model_name:
        shared.model_name = "None"


def reload_model():
    unload_model()
    shared.model, shared.tokenizer = load_model(shared.model_name)


def unload_model_if_idle():
    while True:
        with shared.generation_lock:
            idle = time.time() - last_generation_time > shared.args.idle_timeout * 60
            if idle and active_generation_count == 0 and shared.model is not None:
                logger.info("Nobody used the model: unloading it")
                unload_model(keep_model_name=True)
        time.sleep(60)
