from modules import models, shared
from modules.logging_colors import logger
from modules.text_generation import generate_reply
from modules.utils import check_model_loaded


def get_next_logits(*args, **kwargs):
    models.load_model_if_idle_unloaded()
    locked = not args[2]  # with samplers, generate_reply takes the lock
    if locked:
        shared.generation_lock.acquire()
    try:
        return _get_next_logits(*args, **kwargs)
    except Exception:
        logger.exception("No logits")
        return None
    finally:
        if locked:
            shared.generation_lock.release()


def _get_next_logits(prompt, state, use_samplers, previous, top_logits=25, return_dict=False):
    loaded, message = check_model_loaded()
    if not loaded:
        return message, previous
    import torch
    from modules import sampler_hijack
    from modules.torch_utils import get_device

    if use_samplers:
        state.update(max_new_tokens=1, auto_max_new_tokens=False)
        state.setdefault("stream", True)
        for _ in generate_reply(prompt, state):
            pass
        scores = sampler_hijack.global_scores[-1]
    else:
        ids = shared.tokenizer.encode(prompt, return_tensors="pt")
        device = get_device()
        scores = shared.model(input_ids=ids.to(device) if device else ids)["logits"][-1][-1]
    values, ids = torch.topk(torch.softmax(scores.detach(), dim=-1, dtype=torch.float), k=top_logits)
    tokens = [shared.tokenizer.convert_ids_to_tokens(int(token)) for token in ids]
    found = dict(zip(tokens, values.tolist(), strict=True))
    return found if return_dict else ("\n".join(f"{value:.5f}  {token!r}" for token, value in found.items()), previous)
