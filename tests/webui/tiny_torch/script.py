"""After the probe: a model of transformers with random weights takes its place, one character a token."""

import torch
from modules import sampler_hijack, shared
from transformers import LlamaConfig, LlamaForCausalLM
from user_ext_probe import ProbeTokenizer, note


class TinyLlamaTokenizer(ProbeTokenizer):  # the grammar looks for "llama" in the name
    def get_vocab(self):
        return {chr(token): token for token in range(128)}

    def batch_decode(self, rows, **kwargs):
        return [self.decode(row) for row in rows]


class TinyModel(LlamaForCausalLM):
    def get_prompt_logits(self, ids):
        note("get_prompt_logits", length=ids.shape[-1])
        return self(input_ids=ids).logits


def setup():
    sampler_hijack.hijack_samplers()
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=3, pad_token_id=3, initializer_range=0.5)
    shared.model, shared.tokenizer = TinyModel(config).eval(), TinyLlamaTokenizer()
    shared.model_name, shared.args.loader = "tiny", "Transformers"
