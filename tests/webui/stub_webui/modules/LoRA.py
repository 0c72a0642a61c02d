from pathlib import Path

import modules.shared as shared


def add_lora_to_model(lora_names):
    """As peft does it: with a model made of PyTorch modules, and with nothing else."""
    if set(lora_names) == set(shared.lora_names):
        return
    from peft import PeftModel

    if set(shared.lora_names) - set(lora_names):
        shared.model = shared.model.unload()
    for name in lora_names:
        shared.model = PeftModel.from_pretrained(shared.model, Path(shared.args.lora_dir) / name, adapter_name=name)
    shared.lora_names = lora_names
