import gc

import torch
from modules import shared


def get_device():
    if hasattr(shared.model, "device"):
        return shared.model.device
    return torch.device("cuda") if torch.cuda.is_available() else None


def clear_torch_cache():
    gc.collect()
    if torch.cuda.is_available() and not shared.args.cpu:
        torch.cuda.empty_cache()
