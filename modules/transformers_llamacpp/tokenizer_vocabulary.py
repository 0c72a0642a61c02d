"""The lower part of `LlamaCppTokenizer`: ids, tokens and text of a fixed vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, decoders
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import to_py_obj

from .errors import UnsupportedFeatureError
from .native.vocab import HIDDEN, MATCHED_WHOLE, NativeVocab, VocabType, open_vocab

__all__ = ["VocabularyTokenizer"]


class VocabularyTokenizer(PreTrainedTokenizerBase):
    """Ids to tokens, tokens to ids, ids to text, and which tokens are special. See `LlamaCppTokenizer`."""

    def _take_vocabulary(self, vocab: NativeVocab) -> dict[str, int]:
        """Set up what the methods below need. Gives the ids of the tokens that have a name in transformers."""
        self._vocab = vocab
        self._reopen_lock = threading.Lock()
        self._all_ids: dict[str, int] | None = None
        self._hidden_ids: tuple[int, ...] | None = None
        named = {
            "bos_token": vocab.bos_id,
            "eos_token": vocab.eos_id,
            "unk_token": vocab.unk_id,
            "sep_token": vocab.sep_id,
            "pad_token": vocab.pad_id if vocab.pad_id is not None else vocab.eos_id,
            "cls_token": vocab.cls_id,
            "mask_token": vocab.mask_id,
        }
        found = {name: token for name, token in named.items() if token is not None}
        self._named_ids = {vocab.text(token): token for token in found.values()}
        return found

    @property
    def vocab(self) -> NativeVocab:
        """The native vocabulary; opened again from its file when the model it came from was closed."""
        if self._vocab.closed and self._vocab.path is not None:
            with self._reopen_lock:
                if self._vocab.closed:
                    self._vocab = open_vocab(self._vocab.path)
        return self._vocab

    # ---- the vocabulary -----------------------------------------------------------------------------------------

    @property
    def is_fast(self) -> bool:
        """False: there is no `tokenizers` object behind this. Offsets work all the same."""
        return False

    @property
    def backend_tokenizer(self) -> Any:
        """Only what transformers 5.24 asks of it: `decoder` says how tokens spell bytes, so that `stop_strings` are
        found where a character is spread over several tokens."""
        if self.vocab.spells_bytes:
            return SimpleNamespace(decoder=decoders.ByteLevel())
        return SimpleNamespace(decoder=decoders.ByteFallback()) if self.vocab.type is VocabType.SPM else None

    @property
    def vocab_size(self) -> int:
        """Number of ids, which is the width of the model's logits."""
        return self.vocab.n_tokens

    def __len__(self) -> int:
        return self.vocab.n_tokens

    def __bool__(self) -> bool:
        return True

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, a new dictionary. Where a GGUF spells two tokens alike it has only one of them."""
        return dict(self._ids_by_token())

    def _ids_by_token(self) -> dict[str, int]:
        ids = self._all_ids
        if ids is None:
            ids = {text: token for token, text in enumerate(self.vocab.texts())}
            ids.update(self._named_ids)
            self._all_ids = ids
        return ids

    def _convert_token_to_id(self, token: str) -> int | None:
        known = self._named_ids.get(token)
        if known is None:
            known = self._ids_by_token().get(token)
        if known is None and token:  # plain text (" the") for the token the vocabulary spells otherwise ("Ġthe")
            known = self._ids_by_token().get(self.vocab.spelling(token))
        return known if known is not None else self._named_ids.get(str(self._special_tokens_map.get("unk_token")))

    _convert_token_to_id_with_added_voc = _convert_token_to_id

    def _convert_id_to_token(self, index: int) -> str:
        return self.vocab.text(int(index))

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> str | list[str]:
        """The vocabulary's own spelling of each id ("Ġhello", "▁hello", "<0x0A>"): a `str` for every id."""
        ids = to_py_obj(ids)
        if isinstance(ids, int):
            return self.vocab.text(ids)
        skipped = self._skipped() if skip_special_tokens else None
        return [self.vocab.text(int(token)) for token in ids if skipped is None or not skipped(int(token))]

    # ---- special tokens -----------------------------------------------------------------------------------------

    def _hidden(self) -> tuple[int, ...]:
        if self._hidden_ids is None:
            self._hidden_ids = tuple(token for token, attr in enumerate(self.vocab.attrs()) if attr & HIDDEN)
        return self._hidden_ids

    def _marked(self) -> set[int]:
        """Ids of the tokens that were named special on this object."""
        named = [*self._special_tokens_map.values(), *self._extra_special_tokens]
        ids = (self._convert_token_to_id(str(token)) for token in named if token is not None)
        return {token for token in ids if token is not None}

    def _skipped(self) -> Any:
        """Whether `skip_special_tokens` skips an id. Asks for the ids at hand only: a scan of 262,144 takes 0.1 s."""
        vocab, marked = self.vocab, self._marked()
        return lambda token: token in marked or bool(vocab.attr(token) & HIDDEN)

    @property
    def extra_special_tokens(self) -> list[str]:
        """Every special token that has no name (`bos_token`, ...): the GGUF's and those set on this object."""
        named = {str(token) for token in self._special_tokens_map.values() if token is not None}
        tokens = [*(self.vocab.text(token) for token in self._hidden()), *map(str, self._extra_special_tokens)]
        return [token for token in dict.fromkeys(tokens) if token not in named]

    @property
    def extra_special_tokens_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.extra_special_tokens)

    @property
    def additional_special_tokens(self) -> list[str]:
        """The name `extra_special_tokens` had before transformers 5."""
        return self.extra_special_tokens

    @additional_special_tokens.setter
    def additional_special_tokens(self, value: Sequence[str | AddedToken] | None) -> None:
        setattr(self, "extra_special_tokens", value)  # noqa: B010 - transformers' __setattr__ stores it

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        return self.extra_special_tokens_ids

    @property
    def all_special_tokens(self) -> list[str]:
        named = [str(token) for token in self._special_tokens_map.values() if token is not None]
        return list(dict.fromkeys([*named, *self.extra_special_tokens]))

    @property
    def all_special_ids(self) -> list[int]:
        return list(dict.fromkeys(self.convert_tokens_to_ids(self.all_special_tokens)))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Id -> token for the tokens that are matched whole before the text is cut."""
        attrs = self.vocab.attrs()
        return {
            token: AddedToken(self.vocab.text(token), special=bool(attr & HIDDEN), normalized=False)
            for token, attr in enumerate(attrs)
            if attr & MATCHED_WHOLE
        }

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        return {self.vocab.text(token): token for token, attr in enumerate(self.vocab.attrs()) if attr & MATCHED_WHOLE}

    def get_added_vocab(self) -> dict[str, int]:
        return self.added_tokens_encoder

    def _add_tokens(self, new_tokens: Iterable[str | AddedToken], special_tokens: bool = False) -> int:
        """Mark tokens that exist as special. The answer is 0: none can be new."""
        new = [str(token) for token in new_tokens if str(token) not in self._ids_by_token()]
        if new:
            raise UnsupportedFeatureError(
                f"{new} are not among the {len(self)} tokens of the GGUF, and the model has no embedding for a new "
                "one. Use a token it has (convert_ids_to_tokens shows them), or convert the model with these tokens.",
                feature="add_tokens",
            )
        if special_tokens:
            marked = self._marked()
            self._extra_special_tokens.extend(t for t in new_tokens if self._ids_by_token()[str(t)] not in marked)
        return 0

    # ---- decoding -----------------------------------------------------------------------------------------------

    def batch_decode(self, sequences: Any, *args: Any, **kwargs: Any) -> list[str]:
        """As in transformers 5.24 on every release: an empty batch gives an empty list."""
        return super().batch_decode(sequences, *args, **kwargs) if len(sequences) else []

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **unknown: Any,
    ) -> str:
        if unknown:
            raise TypeError(f"{type(self).__name__}.decode takes no argument {', '.join(sorted(unknown))}")
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        skipped = self._skipped() if skip_special_tokens else None
        text = self._join(token for token in ids if skipped is None or not skipped(token))
        tidy = clean_up_tokenization_spaces
        if tidy is None:
            tidy = self.clean_up_tokenization_spaces
        return self.clean_up_tokenization(text) if tidy else text

    def _join(self, tokens: Iterable[int | bytes]) -> str:
        vocab = self.vocab
        prefix = vocab.adds_space_prefix
        pieces: list[bytes] = []
        drop_space = prefix
        for token in tokens:
            if isinstance(token, bytes):
                pieces.append(token)
                drop_space = False
                continue
            piece, whole = vocab.piece(token), vocab.attr(token) & MATCHED_WHOLE
            if drop_space and not whole and piece.startswith(b" "):
                piece = piece[1:]
            drop_space = prefix and bool(whole)
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of tokens as `convert_ids_to_tokens` spells them; strings that are no tokens stay as they are."""
        ids = self._ids_by_token()
        return self._join(ids.get(token, token.encode("utf-8", "replace")) for token in tokens)
