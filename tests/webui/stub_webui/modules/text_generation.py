import ast
import copy
import random
import time

import modules.shared as shared
import numpy as np
from modules import models
from modules.callbacks import Iteratorize
from modules.extensions import apply_extensions
from modules.logging_colors import logger
from modules.utils import check_model_loaded

GENERATE_NAMES = [
    "temperature", "dynatemp_low", "dynatemp_high", "dynatemp_exponent", "smoothing_factor", "smoothing_curve", "min_p",
    "top_p", "top_k", "typical_p", "xtc_threshold", "xtc_probability", "tfs", "top_a", "top_n_sigma", "adaptive_target",
    "adaptive_decay", "dry_multiplier", "dry_allowed_length", "dry_base", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "repetition_penalty_range", "penalty_alpha",
    "guidance_scale", "mirostat_mode", "mirostat_tau", "mirostat_eta", "max_new_tokens", "do_sample",
    "dynamic_temperature", "temperature_last", "dry_sequence_breakers",
]


def generate_reply(*args, **kwargs):
    """One at a time, by a lock that is given back as soon as the caller wants no more, wherever the model is then."""
    models.load_model_if_idle_unloaded()
    state = args[1] if len(args) > 1 else kwargs["state"]
    several = shared.args.parallel > 1 and type(shared.model).__name__ == "LlamaServer" and state.get("stop_event") is not None
    if not several:
        shared.generation_lock.acquire()
    with models._generation_count_lock:
        models.active_generation_count += 1
    try:
        yield from _generate_reply(*args, **kwargs)
    finally:
        with models._generation_count_lock:
            models.active_generation_count -= 1
        models.last_generation_time = time.time()
        if not several:
            shared.generation_lock.release()


def _as_list(strings):
    return ast.literal_eval(f"[{strings}]") if isinstance(strings, str) else strings or []


def _generate_reply(question, state, stopping_strings=None, is_chat=False, escape_html=False, for_ui=False):
    generate = apply_extensions("custom_generate_reply")
    if generate is None:
        if not check_model_loaded()[0]:
            yield ""
            return
        own = type(shared.model).__name__ in ("LlamaServer", "Exllamav3Model", "TensorRTLLMModel")
        generate = generate_reply_custom if own else generate_reply_HF
    original_question = question
    if not is_chat:
        state = apply_extensions("state", state)
        question = apply_extensions("input", question, state)
    stops = [*_as_list(stopping_strings), *_as_list(state["custom_stopping_strings"])]
    shared.stop_everything = False
    shown = state["stream"]
    if stops and not shown:  # a stop string can only be seen in a stream
        kept = {name: state.pop(name) for name in ("stop_event", "logits_processor") if name in state}
        state = {**copy.deepcopy(state), **kept, "stream": True}
    reply = ""
    for reply in generate(question, original_question, state, stopping_strings, is_chat=is_chat):
        reply, found = apply_stopping_strings(reply, stops)
        if shown:
            if state["max_tokens_second"] > 0:
                time.sleep(1 / state["max_tokens_second"])
            yield reply
        stopped = state.get("stop_event") is not None and state["stop_event"].is_set()
        if found or shared.stop_everything or stopped:
            break
    yield reply if is_chat else apply_extensions("output", reply, state)


def apply_stopping_strings(reply, stops):
    for stop in stops:
        if stop in reply:
            return reply[: reply.index(stop)], True
    for stop in stops:  # the beginning of one is not shown either
        for length in range(len(stop) - 1, 0, -1):
            if reply.endswith(stop[:length]):
                return reply[:-length], False
    return reply, False


def _loaded_tokenizer():
    if shared.tokenizer is None:
        models.load_model_if_idle_unloaded()
    if shared.tokenizer is None:
        raise ValueError("There is no tokenizer")
    return shared.tokenizer


def encode(prompt, add_special_tokens=True, add_bos_token=True, truncation_length=None):
    tokenizer = _loaded_tokenizer()
    if type(shared.model).__name__ == "LlamaServer":
        ids = np.array(tokenizer.encode(str(prompt), add_bos_token=add_bos_token)).reshape(1, -1)
        return ids if truncation_length is None else ids[:, -truncation_length:]
    import torch
    from modules.torch_utils import get_device

    ids = tokenizer.encode(str(prompt), return_tensors="pt", add_special_tokens=add_special_tokens)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None:
        if add_bos_token and (ids.shape[1] == 0 or ids[0][0] != bos):
            ids = torch.cat((torch.tensor([[bos]]), ids), 1)
        while ids.shape[1] > 1 and ids[0][0] == bos and ids[0][1] == bos:
            ids = ids[:, 1:]
    if truncation_length is not None:
        ids = ids[:, -truncation_length:]
    device = get_device()
    return ids.to(device) if device and not shared.args.cpu else ids


def decode(output_ids, skip_special_tokens=True):
    return _loaded_tokenizer().decode(output_ids, skip_special_tokens=skip_special_tokens)


def get_encoded_length(prompt):
    return len(encode(prompt)[0])


def get_max_prompt_length(state):
    return state["truncation_length"] - state["max_new_tokens"]


def set_manual_seed(seed):
    seed = int(seed) if int(seed) != -1 else random.randint(1, 2**31)
    if shared.args.loader != "llama.cpp":
        import torch

        torch.manual_seed(seed)
    return seed


def stop_everything_event():
    shared.stop_everything = True


def get_reply_from_output_ids(output_ids, state=None, starting_from=0):
    reply = decode(output_ids[starting_from:], state["skip_special_tokens"] if state else True)
    if len(output_ids) > starting_from and hasattr(shared.tokenizer, "convert_ids_to_tokens"):
        first = shared.tokenizer.convert_ids_to_tokens(int(output_ids[starting_from]))
        if isinstance(first, str) and first.startswith("▁") and not reply.startswith(" "):
            reply = " " + reply
    return reply


def _bans(state):
    eos = [shared.tokenizer.eos_token_id] if state["ban_eos_token"] else []
    return eos + [int(word) for word in (state["custom_token_bans"] or "").split(",") if word.strip()]


def _generate_params(question, state):
    import transformers
    from modules.transformers_loader import _StopEverythingStoppingCriteria

    params = {name: state[name] for name in GENERATE_NAMES if name in state}
    params |= {name: state[name] * 1e-4 for name in ("epsilon_cutoff", "eta_cutoff") if state[name] > 0}
    if state["prompt_lookup_num_tokens"] > 0:
        params["prompt_lookup_num_tokens"] = state["prompt_lookup_num_tokens"]
    if _bans(state):
        params["suppress_tokens"] = _bans(state)
    if state["static_cache"]:
        params["cache_implementation"] = "static"
    order = state["sampler_priority"]
    order = order if isinstance(order, list) else [word.strip() for word in (order or "").replace("\n", ",").split(",")]
    if any(order):
        params["sampler_priority"] = [word for word in order if word]
    if state["negative_prompt"] != "":
        params["negative_prompt_ids"] = encode(state["negative_prompt"])
    params["use_cache"] = not shared.args.no_cache

    ids = encode(question, add_bos_token=state["add_bos_token"], truncation_length=get_max_prompt_length(state))
    if state["auto_max_new_tokens"]:
        params["max_new_tokens"] = state["truncation_length"] - ids.shape[-1]
    question, ids, embeds = apply_extensions("tokenizer", state, question, ids, None)
    params["inputs"] = ids
    if embeds is not None:
        params["inputs_embeds"] = embeds
    eos = shared.tokenizer.eos_token_id
    params["eos_token_id"] = [] if eos is None else [eos]
    params["stopping_criteria"] = transformers.StoppingCriteriaList([_StopEverythingStoppingCriteria()])
    params["logits_processor"] = _processors(state, ids)
    return params


def _processors(state, ids):
    from modules.grammar.grammar_utils import initialize_grammar
    from modules.grammar.logits_process import GrammarConstrainedLogitsProcessor
    from transformers import LogitsProcessorList

    given = state.get("logits_processor", LogitsProcessorList())
    processors = given if isinstance(given, LogitsProcessorList) else LogitsProcessorList([given])
    if state["grammar_string"].strip():
        processors.append(GrammarConstrainedLogitsProcessor(initialize_grammar(state["grammar_string"])))
    apply_extensions("logits_processor", processors, ids)
    return processors


def generate_reply_HF(question, original_question, state, stopping_strings=None, is_chat=False):
    import torch

    if shared.args.loader == "Transformers":
        from modules.torch_utils import clear_torch_cache

        clear_torch_cache()
    seed = set_manual_seed(state["seed"])
    params = _generate_params(question, state)
    prompt = len(params["inputs"][0])
    output, started = params["inputs"][0], time.time()
    try:
        if not is_chat and not shared.is_seq2seq:
            yield ""
        if not state["stream"]:
            with torch.no_grad():
                output = shared.model.generate(**params)[0]
            yield get_reply_from_output_ids(output, state, starting_from=prompt)
            return
        with Iteratorize(_generate_with_callback, [], params) as outputs:
            reply, shown = "", prompt
            for output in outputs:
                if output[-1] in params["eos_token_id"]:
                    break
                piece = get_reply_from_output_ids(output, state, starting_from=shown)
                if chr(0xFFFD) in piece:
                    continue
                reply += piece
                shown = len(output)
                yield reply
    except Exception:
        logger.exception("Nothing could be generated")
    finally:
        seconds = time.time() - started
        logger.info(f"{len(output) - prompt} tokens in {seconds:.2f} s, prompt {prompt}, seed {seed}")
        return  # noqa: B012  # whatever happened, the caller sees an answer


def _generate_with_callback(callback=None, **kwargs):
    import torch
    from modules.transformers_loader import Stream

    kwargs["stopping_criteria"].append(Stream(callback_func=callback))
    with torch.no_grad():
        shared.model.generate(**kwargs)


def generate_reply_custom(question, original_question, state, stopping_strings=None, is_chat=False):
    """Of models that bring their own sampling."""
    try:
        if not is_chat:
            yield ""
        if state["stream"]:
            yield from shared.model.generate_with_streaming(question, state)
        else:
            yield shared.model.generate(question, state)
    except Exception:
        logger.exception("Nothing could be generated")
