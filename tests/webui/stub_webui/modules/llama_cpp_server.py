"""Stands for the webui's own llama.cpp, which is a process behind HTTP: loads nothing and always says the same."""

import time

from modules import shared
from modules.logging_colors import logger
from modules.utils import resolve_model_path

ANSWER = "This is the stub's own llama.cpp."


class LlamaServer:
    def __init__(self, model_path):
        draft = shared.args.model_draft
        if draft not in (None, "None", "") and not resolve_model_path(draft).exists():
            raise RuntimeError(f"no draft model {draft}")
        self.model_path = str(model_path)
        self.n_ctx = shared.args.ctx_size or 8192
        self.last_prompt_token_count = 0
        logger.info(f"llama.cpp starts with {model_path}")

    def encode(self, text, add_bos_token=False, **kwargs):
        return list(text.encode())

    def decode(self, token_ids, **kwargs):
        return bytes(int(token) for token in token_ids).decode(errors="replace")

    def generate_with_streaming(self, prompt, state):
        self.last_prompt_token_count = len(prompt)
        text = ""
        for word in ANSWER.split(" "):
            text += (" " if text else "") + word
            yield text
            time.sleep(0.01)

    def generate(self, prompt, state):
        return list(self.generate_with_streaming(prompt, state))[-1]

    def is_multimodal(self):
        return False

    def stop(self):
        logger.info("llama.cpp stops")
