"""An extension that looks around and writes down what it sees, in ``user_data/probe.jsonl``.

Without ``--model`` it also puts a model of its own into the webui: one character a token, and a prompt that says what to do.
"""

import json
import threading
import time

import torch
from modules import shared

params = {"is_tab": True, "display_name": "probe", "given": "by the script"}
calls = 0
inside = 0
lock = threading.Lock()


def note(event, **what):
    with lock, (shared.user_data_dir / "probe.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, **what}, default=lambda value: type(value).__name__) + "\n")


class ProbeTokenizer:
    eos_token_id = 3
    bos_token_id = None

    def encode(self, text, return_tensors=None, add_special_tokens=True):
        ids = [ord(letter) for letter in text]
        return torch.tensor([ids], dtype=torch.long) if return_tensors == "pt" else ids

    def decode(self, ids, skip_special_tokens=True, **kwargs):
        return "".join(chr(int(one)) for one in ids if int(one) != self.eos_token_id)

    def convert_ids_to_tokens(self, token):
        return chr(token)


class ProbeModel:
    device = torch.device("cpu")
    dtype = torch.float32

    def generate(self, inputs, stopping_criteria=(), **kwargs):
        global inside, calls
        with lock:
            inside, calls = inside + 1, calls + 1
            number = calls
        prompt = "".join(chr(int(one)) for one in inputs[0])
        note("generate", inside=inside, prompt=prompt, gpu_layers=shared.args.gpu_layers, **kwargs)
        try:
            if "FAIL" in prompt:
                raise RuntimeError("told to fail")
            ids = inputs
            time.sleep(0.2)  # as if the prompt were read: words that come at once take the place of the question on the page
            for letter in f"answer {number}" if "SLOW" not in prompt else "abcdefghij" * 10:
                if "REJECT" in prompt:  # as assisted decoding does: candidates that are not taken
                    stopping_criteria(torch.cat([ids, torch.tensor([[ord("#")]])], 1), None)
                ids = torch.cat([ids, torch.tensor([[ord(letter)]])], 1)
                time.sleep(0.01 if "SLOW" not in prompt else 0.2 if letter in "abc" else 1)
                if torch.as_tensor(stopping_criteria(ids, None)).any():
                    break
            return ids
        finally:
            with lock:
                inside -= 1

    def unload(self):
        note("unload")


note("executed", loader=shared.args.loader, asked=shared.original_args.loader, model=shared.model_name)


def setup():
    note("setup", given=params["given"], provided=shared.provided_arguments)
    if shared.args.model is None and shared.model is None:
        shared.model, shared.tokenizer, shared.model_name = ProbeModel(), ProbeTokenizer(), "probe"
        shared.args.loader = "Transformers"


def ui():
    import gradio as gr

    gr.Markdown("The probe is here.")
