"""`LlamaCppTokenizer`: a transformers tokenizer whose every id comes from llama.cpp."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .chat_template import broken_templates, template_from_metadata
from .errors import TokenizerError
from .files import HUB_ARGUMENTS, resolve_gguf
from .native.vocab import NativeVocab, VocabType, open_vocab
from .tokenizer_encoding import EncodingTokenizer
from .tokenizer_files import CONFIG_FILE, VOCAB_FILE, copy_vocabulary, read_config, rewrite_config

__all__ = ["LlamaCppGPT2Tokenizer", "LlamaCppTokenizer"]

_SAVED = (
    *("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces", "model_max_length"),
    *("padding_side", "split_special_tokens", "truncation_side"),
)
_SETTINGS = {
    *PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES,
    *("add_bos_token", "add_eos_token", "additional_special_tokens", "extra_special_tokens"),
    *("chat_control_tokens", "chat_template", "clean_up_tokenization_spaces", "model_input_names"),
    *("model_max_length", "name_or_path", "padding_side", "processor_class", "response_schema"),
    *("response_template", "split_special_tokens", "truncation_side", "verbose"),
}
"""Keyword arguments of the constructor."""


def _is_setting(key: str, value: Any) -> bool:
    """A model may have special tokens with names of its own (`image_token`), as in transformers."""
    return key in _SETTINGS or (key.endswith("_token") and isinstance(value, (str, AddedToken)))


class LlamaCppTokenizer(EncodingTokenizer):
    """The tokenizer of a GGUF, made from the GGUF alone. Token ids are those of `llama_tokenize` for every string.

    Get one with `from_pretrained(path)`, or as `model.tokenizer` from a loaded model.

    What is decided here, where llama.cpp and transformers differ or are silent:

    - *Special tokens* are the ones llama.cpp hides from text: control and unknown tokens, and what `bos_token` and its
      like name. Written out in a text they are taken as the tokens; `split_special_tokens=True` takes them as letters.
    - *BOS is never doubled.* `add_special_tokens=True` puts BOS first where the GGUF says so, unless the text itself
      begins with BOS written out, as texts rendered by a chat template do (llama.cpp would add a second one and warn).
      `apply_chat_template(tokenize=True)` adds nothing to what the template writes, as in transformers.
    - `decode` joins the tokens' bytes. A space that the vocabulary puts before words (SentencePiece) is taken away at
      the start and after special tokens, where tokenizing put it, so that `decode(encode(text)) == text`. Bytes that
      are not (yet) a character are U+FFFD. The tidying of spaces that `llama_detokenize` does is left to
      `clean_up_tokenization_spaces=True`: it changes text that was streamed before.
    - *Lone surrogates* in a text count as U+FFFD.
    - *Padding* is on the left, with the GGUF's padding token, else EOS.
    - The vocabulary is fixed: the model has no embedding for a new token, so adding one is an error.

    Instances may be used by several threads, pickled and deep-copied (copies share the native vocabulary; a pickle
    holds the path of the GGUF and reads it again). A tokenizer of a model that was closed opens its vocabulary again.
    """

    vocab_files_names = {"vocab_file": VOCAB_FILE}  # noqa: RUF012 - transformers reads it from the class
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    padding_side = "left"

    def __init__(
        self,
        vocab: NativeVocab,
        metadata: Mapping[str, str] | None = None,
        *,
        add_bos_token: bool | None = None,
        add_eos_token: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """`metadata` is `vocab.metadata()` unless given. Keyword arguments are those of every transformers tokenizer
        (`bos_token`, `pad_token`, `chat_template`, `padding_side`, `model_max_length`, ...) and win over the GGUF."""
        unknown = sorted(key for key, value in kwargs.items() if not _is_setting(key, value))
        if unknown:
            raise TypeError(f"{type(self).__name__} takes no argument {', '.join(unknown)}, but {sorted(_SETTINGS)}")
        if vocab.type in (VocabType.NONE, VocabType.OTHER):
            raise TokenizerError(f"{vocab.path or 'this model'} carries no vocabulary (type {vocab.type.name})")
        metadata = vocab.metadata() if metadata is None else metadata
        for name, token in self._take_vocabulary(vocab).items():
            kwargs.setdefault(name, vocab.text(token))
        self.add_bos_token = vocab.add_bos if add_bos_token is None else bool(add_bos_token)
        self.add_eos_token = vocab.add_eos if add_eos_token is None else bool(add_eos_token)
        length = metadata.get(f"{metadata.get('general.architecture')}.context_length", "")
        if length.isdigit():
            kwargs.setdefault("model_max_length", int(length))
        if "chat_template" not in kwargs:
            kwargs["chat_template"] = template_from_metadata(metadata)
        super().__init__(**kwargs)
        self._broken_templates = broken_templates(self.chat_template, self.name_or_path or "this GGUF")

    # ---- making one ---------------------------------------------------------------------------------------------

    @classmethod
    def from_vocab(
        cls, vocab: NativeVocab, metadata: Mapping[str, str] | None = None, name_or_path: str = "", **kwargs: Any
    ) -> LlamaCppTokenizer:
        """A tokenizer over the vocabulary of a model that is loaded already; no file is read. `name_or_path`, where it
        is the GGUF file, lets the tokenizer be saved, pickled and used after the model was closed."""
        if vocab.path is None and name_or_path and Path(name_or_path).is_file():
            vocab.path = Path(name_or_path)
        if cls is LlamaCppTokenizer and vocab.type is VocabType.BPE and vocab.spells_bytes:
            cls = LlamaCppGPT2Tokenizer
        return cls(vocab, metadata, name_or_path=str(name_or_path), **kwargs)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        gguf_file: str | None = None,
        *,
        trust_remote_code: bool | None = None,
        use_fast: bool | None = None,
        **kwargs: Any,
    ) -> LlamaCppTokenizer:
        """Read the vocabulary, and no weights, of a GGUF.

        Args:
            pretrained_model_name_or_path: a `.gguf` file, a folder with one, any shard of a split model, a hub
                repository id, or a folder written by `save_pretrained`.
            gguf_file: which of several files in the folder or repository.
            trust_remote_code, use_fast: accepted because callers pass them to every tokenizer; there is no remote code
                here, and only one implementation.
            kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, `subfolder` and `proxies`
                for the hub, everything else as for the constructor.

        Raises:
            ModelLoadError: the file is missing, is no GGUF, or has a vocabulary that llama.cpp does not know.
        """
        hub = {key: kwargs.pop(key) for key in HUB_ARGUMENTS if key in kwargs}
        name = os.fspath(pretrained_model_name_or_path)
        saved = Path(name).expanduser() / VOCAB_FILE
        if gguf_file is None and saved.is_file():
            path = saved
        else:
            path = resolve_gguf(name, gguf_file, **hub)
        config = read_config(path.parent) if path.name == VOCAB_FILE else {}
        settings = {key: value for key, value in config.items() if _is_setting(key, value)}
        settings = {**cls.convert_added_tokens(settings, save=False), "name_or_path": name, **kwargs}
        return cls.from_vocab(open_vocab(path), **settings)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write `tokenizer.gguf`: the key-value section of the GGUF, without tensors.

        Raises:
            TokenizerError: the GGUF this tokenizer was made from is not there any more, or was not a file.
        """
        if self.vocab.path is None:
            raise TokenizerError("this tokenizer's GGUF has no path; make it with from_pretrained(path) to save it")
        target = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}{VOCAB_FILE}"
        copy_vocabulary(self.vocab.path, target)
        return (str(target),)

    def _save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        file_names: tuple[str, ...],
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
    ) -> tuple[str, ...]:
        """The last step of `save_pretrained`. `legacy_format` chooses between two formats of which neither is ours."""
        config = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}{CONFIG_FILE}"
        # transformers saves what was passed at first; what was set on the object since counts as well.
        add: dict[str, Any] = {name: getattr(self, name) for name in _SAVED}
        if self._extra_special_tokens:
            add["extra_special_tokens"] = [str(token) for token in self._extra_special_tokens]
        # The GGUF says these better than a copy of up to thousands of entries.
        rewrite_config(config, drop={"added_tokens_decoder", "extra_special_tokens", "backend"}, add=add)
        return file_names + self.save_vocabulary(str(save_directory), filename_prefix)

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_all_ids": None}
        del state["_reopen_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__dict__["_reopen_lock"] = threading.Lock()

    # ---- chat ---------------------------------------------------------------------------------------------------

    def get_chat_template(self, chat_template: str | None = None, tools: list[dict[str, Any]] | None = None) -> str:
        """The template `apply_chat_template` will use.

        Raises:
            TokenizerError: the GGUF has none, or one that does not compile.
        """
        origin = self.name_or_path or "this GGUF"
        if chat_template is None and self.chat_template is None:
            raise TokenizerError(
                f"{origin} has no chat template. Pass apply_chat_template(..., chat_template=JINJA_TEXT), set "
                "tokenizer.chat_template, or give the model plain text."
            )
        chosen: str = super().get_chat_template(chat_template, tools)
        if chosen in self._broken_templates:
            raise TokenizerError(
                f"the chat template of {origin} does not compile ({self._broken_templates[chosen]}). Pass "
                "apply_chat_template(..., chat_template=JINJA_TEXT) or set tokenizer.chat_template."
            )
        return chosen

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(name_or_path={self.name_or_path!r}, type={self.vocab.type.name}, "
            f"vocab_size={len(self)}, special_tokens={self.special_tokens_map}, padding_side={self.padding_side!r})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> LlamaCppTokenizer:
        twin = type(self).__new__(type(self))
        twin.__setstate__({key: copy.deepcopy(value, memo) for key, value in self.__getstate__().items()})
        return twin


class LlamaCppGPT2Tokenizer(LlamaCppTokenizer):
    """The same for byte-level vocabularies ("Ġhello"), under a name that says so.

    text-generation-webui's grammar sampler (`modules/grammar`) and `transformers_cfg` look for "gpt2" or "llama" in the
    name of the class to know how tokens are spelled; with "llama" alone they would take "Ġ" for a letter.
    `from_pretrained` and `from_vocab` of `LlamaCppTokenizer` choose this class by themselves.
    """
