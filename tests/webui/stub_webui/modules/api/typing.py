"""What requests may say. Anything else is dropped without a word."""

from modules import shared
from modules.presets import INTEGERS, default_preset_values
from pydantic import BaseModel, create_model


def _kind(name):
    found = type(default_preset_values[name])
    return float if found is int and name not in INTEGERS else found


_samplers = {
    name: (_kind(name), getattr(shared.args, name))
    for name in default_preset_values
    if name not in ("sampler_priority", "frequency_penalty", "presence_penalty", "temperature", "top_p")
}
_Samplers = create_model("_Samplers", **_samplers)


class GenerationOptions(_Samplers):
    preset: str | None = None
    prompt_lookup_num_tokens: int = 0
    max_tokens_second: int = 0
    auto_max_new_tokens: bool = False
    ban_eos_token: bool = False
    add_bos_token: bool = True
    skip_special_tokens: bool = True
    static_cache: bool = False
    truncation_length: int = 0
    seed: int = -1
    sampler_priority: list[str] | str | None = shared.args.sampler_priority
    custom_token_bans: str = ""
    negative_prompt: str = ""
    grammar_string: str = ""
    frequency_penalty: float | None = shared.args.frequency_penalty
    presence_penalty: float | None = shared.args.presence_penalty
    temperature: float | None = shared.args.temperature
    top_p: float | None = shared.args.top_p
    logit_bias: dict | None = None
    max_tokens: int | None = 512


class _Request(GenerationOptions):
    model: str | None = None
    n: int | None = 1
    stop: str | list[str] | None = None
    stream: bool | None = False


class CompletionRequest(_Request):
    prompt: str | list[str]
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None


class ChatCompletionRequest(_Request):
    messages: list[dict]
    max_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    instruction_template_str: str | None = None
    mode: str = "instruct"
    continue_: bool = False


class LogitsRequest(GenerationOptions):
    prompt: str
    use_samplers: bool = False
    top_logits: int | None = 50


class EncodeRequest(BaseModel):
    text: str


class DecodeRequest(BaseModel):
    tokens: list[int]


class LoadModelRequest(BaseModel):
    model_name: str
    args: dict | None = None
    instruction_template_str: str | None = None


class LoadLorasRequest(BaseModel):
    lora_names: list[str]


def to_dict(request):
    return dict(request.__dict__)
