from modules.logits import get_next_logits

from .completions import process_parameters


def _get_next_logits(body):
    state = process_parameters(body)
    return get_next_logits(body["prompt"], state, body["use_samplers"], "", top_logits=body["top_logits"], return_dict=True)
