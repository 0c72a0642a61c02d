"""What the routes take. Every field is optional unless it says otherwise, and `null` is the same as leaving it out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from .fields import config_definitions, help_of, resting_definitions

__all__ = [
    "ChatRequest", "CompletionRequest", "DecodeRequest", "EmbeddingsRequest", "EncodeRequest", "LoadRequest", "LogitsRequest",
]  # fmt: skip

Stop = str | Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=64)]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]


class Strict(BaseModel):
    """An unknown field, and a value of another type, is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), populate_by_name=True)


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="Send the token counts in a chunk of its own before [DONE].")
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is padded.")


class JsonSchema(Strict):
    name: str = Field(max_length=64, description="A name, as OpenAI wants one.")
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema", description="The JSON schema.")
    strict: bool | None = Field(None, description="Accepted: the schema always holds.")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Message(Strict):
    role: str = Field(description="system, developer, user or assistant.")
    content: str | list[dict[str, Any]] | None = Field(None, description="The text, or a list of parts of type text.")
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    annotations: list[Any] | None = None
    reasoning_content: str | None = Field(None, description="Accepted, and left out of the prompt.")


class Common(Strict):
    """What completions and chats share, beside the fields of `GenerationConfig`."""

    model: str | None = Field(None, description="The loaded model answers, whatever stands here; a model of the folder that is "
                              "not loaded is an error.")  # fmt: skip
    stream: bool | None = Field(None, description="Send the text as server-sent events while it is written.")
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, description="Texts to write for each prompt.")
    stop: Stop | None = Field(None, description=help_of("stop"))
    seed: int | None = Field(None, ge=-1, le=2**63 - 1, description=help_of("seed"))
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description=help_of("max_new_tokens"))
    presence_penalty: float | None = Field(None, ge=-2, le=2, description=help_of("presence_penalty"))
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description=help_of("frequency_penalty"))
    logit_bias: Annotated[dict[str, float], Field(max_length=4096)] | None = Field(
        None, description="Added to the scores of tokens, by their id: -100 bans one."
    )
    response_format: ResponseFormat | None = Field(None, description="Write JSON, and only what a schema allows.")
    user: str | None = Field(None, description="Accepted; nothing is done with it.")
    # -- of the webui
    negative_prompt: str | None = Field(None, description=help_of("negative_prompt"))
    assistant_model: str | bool | None = Field(
        None, description='A model of the folder that drafts; false or "off": none does, not even that of --draft.'
    )
    n_sink: int | None = Field(None, ge=0, description="The value the model was loaded with: it holds for all of its texts.")
    ban_eos_token: bool | None = Field(None, description="The text does not end by itself.")
    add_bos_token: bool | None = Field(None, description="Put the token that texts begin with in front (default true).")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text (default true).")
    custom_token_bans: str | None = Field(None, max_length=65536, description="Token ids, with commas between them.")
    repetition_penalty_range: int | None = Field(
        None, ge=0, description="Tokens at the end of the text that repetition_penalty looks at; 0: all."
    )
    sampler_priority: str | list[str] | None = Field(
        None, description="The webui's order of samplers. Temperature comes first here: where that makes a difference, an "
        "order with another one before it is an error."
    )  # fmt: skip
    temperature_last: bool | None = Field(None, description="Only false, where it makes a difference.")
    truncation_length: int | None = Field(
        None, ge=0, description="Cut the beginning of a prompt that leaves no room for max_tokens in this many; 0: never."
    )
    auto_max_new_tokens: bool | None = Field(None, description="Write until the context is full.")
    grammar_string: str | None = Field(None, max_length=1 << 18, description="A GBNF grammar that the text has to follow.")


class CompletionOnly(Strict):
    prompt: str | list[str] | TokenIds | list[TokenIds] = Field(description="Required. A text, token ids, or a list of them.")
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    best_of: int | None = Field(None, ge=1, description="Write this many texts and return the n likeliest.")
    logprobs: int | None = Field(None, ge=0, le=100, description="Log-probabilities of the tokens, and of this many likeliest.")
    suffix: str | None = Field(None, description="What follows the text: not supported.")


class ChatOnly(Strict):
    messages: list[Message] = Field(min_length=1, description="Required. The conversation.")
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Log-probabilities of the tokens.")
    top_logprobs: int | None = Field(None, ge=0, le=100, description="And of this many likeliest for each.")
    # -- OpenAI's, of which there is nothing here: what asks for nothing is accepted
    tools: list[Any] | None = Field(None, description="Not supported.")
    tool_choice: Any = Field(None, description="Not supported.")
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = Field(None, description="Not supported.")
    function_call: Any = Field(None, description="Not supported.")
    modalities: list[str] | None = Field(None, description="Only text.")
    audio: Any = Field(None, description="Not supported.")
    prediction: Any = Field(None, description="Not supported; prompt_lookup_num_tokens drafts from the prompt.")
    web_search_options: Any = Field(None, description="Not supported.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted; nothing is done with it.")
    store: bool | None = Field(None, description="Accepted; nothing is stored.")
    service_tier: str | None = Field(None, description="Accepted; there is one.")
    safety_identifier: str | None = Field(None, description="Accepted; nothing is done with it.")
    prompt_cache_key: str | None = Field(None, description="Accepted: prompts share what they begin with anyway.")
    prompt_cache_retention: str | None = Field(None, description="Accepted.")
    verbosity: str | None = Field(None, description="Given to the chat template.")
    # -- for the template
    reasoning_effort: str | None = Field(None, description="Given to the chat template.")
    enable_thinking: bool | None = Field(None, description="Given to the chat template.")
    preserve_thinking: bool | None = Field(None, description="Given to the chat template.")
    continue_: bool | None = Field(None, description="Go on with the last message instead of answering it.")
    instruction_template_str: str | None = Field(
        None, max_length=1 << 16, description="A chat template (Jinja) for this request, where the server allows it."
    )
    # -- the webui's characters and files
    mode: Literal["instruct", "chat", "chat-instruct"] | None = Field(None, description="Only instruct.")
    instruction_template: str | None = Field(None, description="Not supported: a file of the webui.")
    character: str | None = Field(None, description="Not supported: a file of the webui.")
    chat_template_str: str | None = Field(None, description="Not supported: of mode chat.")
    chat_instruct_command: str | None = Field(None, description="Read in mode chat-instruct only.")
    bot_name: str | None = Field(None, alias="name2", description="Read in mode chat only.")
    user_name: str | None = Field(None, alias="name1", description="Read in mode chat only.")
    user_bio: str | None = Field(None, description="Read in mode chat only.")
    context: str | None = Field(None, description="Read in mode chat only.")
    greeting: str | None = Field(None, description="Read in mode chat only.")


_definitions: dict[str, Any] = {
    name: field for name, field in (config_definitions() | resting_definitions()).items() if name not in Common.model_fields
}
Generation = create_model("Generation", __base__=Common, **_definitions)


class CompletionRequest(CompletionOnly, Generation):  # type: ignore[valid-type, misc]
    """`POST /v1/completions`"""


class ChatRequest(ChatOnly, Generation):  # type: ignore[valid-type, misc]
    """`POST /v1/chat/completions`"""


class EmbeddingsRequest(Strict):
    """`POST /v1/embeddings`"""

    input: str | Annotated[list[str], Field(min_length=1)] | TokenIds | list[TokenIds] = Field(description="Required.")
    model: str | None = Field(None, description="The loaded model answers.")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="float unless given.")
    dimensions: int | None = Field(None, ge=1, description="Only the model's own.")
    user: str | None = Field(None, description="Accepted; nothing is done with it.")


class EncodeRequest(Strict):
    text: str


class DecodeRequest(Strict):
    tokens: TokenIds


class LogitsRequest(Generation):  # type: ignore[valid-type, misc]
    """`POST /v1/internal/logits`"""

    prompt: str
    use_samplers: bool | None = Field(None, description="After all processors and samplers instead of as the model has them.")
    top_logits: int | None = Field(None, ge=1, le=2**20, description="So many of the likeliest tokens (50).")


class LoadRequest(Strict):
    """`POST /v1/internal/model/load`"""

    model_name: str = Field(description="A name of /v1/internal/model/list.")
    args: dict[str, Any] | None = Field(
        None, description="Options for loading, by the webui's names (ctx_size, gpu_layers, cache_type, ...) or this server's."
    )
    instruction_template: str | None = Field(None, description="Not supported: a file of the webui.")
    instruction_template_str: str | None = Field(None, description="Not supported.")
