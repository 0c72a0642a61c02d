from modules import shared
from modules.models import load_model, unload_model
from modules.models_settings import get_model_metadata, update_model_parameters
from modules.text_generation import encode


def calculate_perplexity(models, input_dataset, stride, _max_length):
    import torch

    if shared.args.loader == "llama.cpp":
        raise ValueError("not with llama.cpp")
    text = (shared.user_data_dir / "training" / "datasets" / f"{input_dataset}.txt").read_text(encoding="utf-8")
    for model in models:
        if model != "current model":
            update_model_parameters(get_model_metadata(model))
            unload_model()
            shared.model, shared.tokenizer = load_model(model)
        ids = encode(text, add_special_tokens=False)
        length = _max_length or getattr(shared.model.config, "max_position_embeddings", 2048)
        losses, before = [], 0
        for begin in range(0, ids.shape[1], stride):
            end = min(begin + length, ids.shape[1])
            window = ids[:, begin:end]
            labels = window.clone()
            labels[:, : -(end - before)] = -100
            with torch.no_grad():
                losses.append(shared.model(input_ids=window, labels=labels).loss)
            before = end
            yield f"{end} of {ids.shape[1]} tokens"
            if end == ids.shape[1]:
                break
        yield f"The perplexity for `{shared.model_name}` is: {float(torch.exp(torch.stack(losses).mean()))}"
