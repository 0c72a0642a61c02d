"""llama.cpp's vocabulary: text to token ids and back, and what each token is.

llama.cpp answers a bad token id, a model without a vocabulary or a byte that the vocabulary cannot spell with an abort
or an uncaught C++ exception, which ends the Python process. Everything is therefore checked before it is passed on, and
every number that comes back is read before it is used.
"""

from __future__ import annotations

import ctypes
import enum
import os
import re
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError, TokenizerError
from .library import init_backend, llama_cpp, recent_errors
from .vocab_handle import VocabHandle, read_metadata
from .vocab_limits import GPT2_LETTERS, SAFE_RUN, longest_run, missing_from_rwkv, missing_from_spm, with_stack

__all__ = ["NativeVocab", "TokenAttr", "VocabType", "open_vocab", "read_metadata"]

_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED = "▁".encode()
_INT32_MAX = 2**31 - 1
_OVERFLOW = -(2**31)
_BLOCK = 256
"""Properties of tokens are read this many at a time: entering llama.cpp under the guard costs more than reading."""


class VocabType(enum.IntEnum):
    """`llama_vocab_type`: which algorithm cuts the text."""

    NONE = 0
    SPM = 1
    BPE = 2
    WPM = 3
    UGM = 4
    RWKV = 5
    PLAMO2 = 6
    OTHER = -1
    """A type this package does not know (newer than the binding it was written for)."""


class TokenAttr(enum.IntFlag):
    """`llama_token_attr`."""

    UNKNOWN = 1
    UNUSED = 2
    NORMAL = 4
    CONTROL = 8
    USER_DEFINED = 16
    BYTE = 32


HIDDEN = int(TokenAttr.UNKNOWN | TokenAttr.CONTROL)
"""Tokens llama.cpp leaves out of text unless asked for them: what `skip_special_tokens` skips."""
MATCHED_WHOLE = int(TokenAttr.UNKNOWN | TokenAttr.CONTROL | TokenAttr.USER_DEFINED)
"""Tokens cut out of the text before the vocabulary's algorithm runs; the first two with `parse_special` only."""

_DEFAULT_UNKNOWN = {VocabType.SPM: 0, VocabType.WPM: 100, VocabType.UGM: 2, VocabType.PLAMO2: 0}


class NativeVocab(VocabHandle):
    """The vocabulary of one loaded model. Safe to use from several threads; `llama_tokenize` runs without the GIL.

    Args:
        model_pointer: the raw `llama_model_p`. It must stay loaded until `close()` was called.
        owner: kept alive as long as this object is (whatever frees the model when it goes away).
        path: the GGUF file, for copies of it and for messages.
        on_close: called once at the end of `close()`.

    Raises:
        ModelLoadError: the pointer is NULL or the model carries no vocabulary object.
    """

    def __init__(
        self,
        model_pointer: Any,
        owner: object | None = None,
        path: str | os.PathLike[str] | None = None,
        on_close: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(model_pointer, owner, path, on_close)
        pointer = self._pointer
        self.n_tokens = int(llama_cpp.llama_vocab_n_tokens(pointer))
        """Number of token ids: valid ids are `0 <= id < n_tokens`."""
        number = int(llama_cpp.llama_vocab_type(pointer))
        self.type = VocabType(number) if number in VocabType._value2member_map_ else VocabType.OTHER
        self._pieces: list[bytes | None] = [None] * self.n_tokens
        self._texts: list[str | None] = [None] * self.n_tokens
        self._attrs: list[int] = [-1] * self.n_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            raise TokenizerError("a vocabulary without a file cannot be pickled: give NativeVocab(..., path=FILE)")
        return (_reopen, (str(self.path.absolute()), self.n_tokens))

    # ---- text to ids --------------------------------------------------------------------------------------------

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`, as `llama_tokenize` gives them.

        Args:
            text: any `str`, also empty and with NUL. A lone surrogate (not a character: UTF-8 has no bytes for it)
                counts as U+FFFD, one for one, so that character positions stay what they were.
            add_special: add BOS, EOS, CLS, SEP where the model's vocabulary says so.
            parse_special: take control tokens written out in `text` as the tokens, not as their letters.

        Raises:
            TokenizerError: the model has no vocabulary, or it has no token for a byte of `text`, or the text is
                longer than llama.cpp can count (2**31 - 1 bytes) or match (a million letters without a space).
        """
        data = _SURROGATE.sub("\ufffd", text).encode("utf-8")
        if len(data) > _INT32_MAX - 16:
            raise TokenizerError(
                f"{len(data)} bytes of text in one call; llama.cpp counts to {_INT32_MAX}. Cut the text in pieces."
            )
        self._check_can_tokenize(data, add_special)
        run = longest_run(text) if self.type is VocabType.BPE else 0
        if run <= SAFE_RUN:
            ids = self._tokenize(data, add_special, parse_special)
        else:
            ids = with_stack(run, lambda: self._tokenize(data, add_special, parse_special))
        if ids and (min(ids) < 0 or max(ids) >= self.n_tokens):
            raise TokenizerError(
                f"this vocabulary has no token for a part of the text, and no unknown token{self._of()}: "
                "convert the model again with a complete vocabulary"
            )
        return ids

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        size = len(data) + 8
        with self._use() as pointer:
            for _attempt in range(2):
                buffer = (ctypes.c_int32 * size)()
                count = int(
                    llama_cpp.llama_tokenize(pointer, data, len(data), buffer, size, add_special, parse_special)
                )
                if count >= 0 or count == _OVERFLOW:
                    break
                size = -count
        if count < 0 or count > size:
            raise TokenizerError(f"llama_tokenize answered {count} for {len(data)} bytes; cut the text in pieces")
        return list(buffer[:count])

    def _check_can_tokenize(self, data: bytes, add_special: bool) -> None:
        if self.type in (VocabType.NONE, VocabType.OTHER):
            raise TokenizerError(f"this model carries no usable vocabulary{self._of()} (type {self.type.name})")
        if self.type is VocabType.WPM and add_special and (self.bos_id is None or self.sep_id is None):
            raise TokenizerError("a BERT vocabulary without CLS or SEP; pass add_special_tokens=False")
        missing = self._unspellable
        if missing is None:
            return
        bad = missing(data)
        if bad:
            raise TokenizerError(
                f"this vocabulary has no token for the bytes {bad!r} of the text{self._of()}, and llama.cpp would "
                "end the process on them; leave them out, or convert the model again with its byte tokens"
            )

    @cached_property
    def _unspellable(self) -> Callable[[bytes], bytes] | None:
        """For vocabularies that lack some of the 256 byte tokens: gives the first part of a text that llama.cpp
        would abort (SPM, `byte_to_token`) or loop forever on (RWKV). `None` for complete vocabularies."""
        if self.type not in (VocabType.SPM, VocabType.RWKV):
            return None
        if self.type is VocabType.SPM:
            return missing_from_spm(map(self.text, range(self.n_tokens)))
        return missing_from_rwkv(map(self.piece, range(self.n_tokens)))

    # ---- ids to text --------------------------------------------------------------------------------------------

    def piece(self, token: int) -> bytes:
        """The bytes `token` stands for, special tokens spelled out: `token_to_piece(token, special=True)`. Tokens
        that llama.cpp gives no text (unused ones) are spelled as the vocabulary writes them."""
        self._check_id(token)
        known = self._pieces[token]
        if known is None:
            self._read_pieces(token - token % _BLOCK)
            known = self._pieces[token]
        return known or b""

    def _read_pieces(self, first: int) -> None:
        size = 256
        buffer = ctypes.create_string_buffer(size)
        get_text = llama_cpp.llama_vocab_get_text
        with self._use() as pointer:
            for token in range(first, min(first + _BLOCK, self.n_tokens)):
                count = int(llama_cpp.llama_token_to_piece(pointer, token, buffer, size, 0, True))
                if _OVERFLOW < count < 0:
                    size = -count
                    buffer = ctypes.create_string_buffer(size)
                    count = int(llama_cpp.llama_token_to_piece(pointer, token, buffer, size, 0, True))
                if not 0 <= count <= size:
                    raise TokenizerError(f"llama_token_to_piece answered {count} for token {token}")
                raw = bytes(buffer.raw[:count])
                self._pieces[token] = raw or (get_text(pointer, token) or b"").replace(_ESCAPED, b" ")

    def token_to_piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of `token`; control and unknown tokens are `b""` unless `special`. May be part of a character."""
        if not special and self.attr(token) & HIDDEN:
            return b""
        return self.piece(token)

    def detokenize(self, tokens: Sequence[int], remove_special: bool = False, unparse_special: bool = False) -> bytes:
        """`llama_detokenize` as it is: some vocabularies tidy up spaces here, so it need not give the text that was
        tokenized. `LlamaCppTokenizer.decode` joins the pieces instead."""
        for token in tokens:
            self._check_id(token)
        if not tokens or self.type in (VocabType.NONE, VocabType.OTHER):
            return b""
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        size = 8 * len(tokens) + 16
        with self._use() as pointer:
            for _attempt in range(2):
                buffer = ctypes.create_string_buffer(size)
                count = int(
                    llama_cpp.llama_detokenize(pointer, ids, len(tokens), buffer, size, remove_special, unparse_special)
                )
                if count >= 0 or count == _OVERFLOW:
                    break
                size = -count
        if count < 0 or count > size:
            raise TokenizerError(f"llama_detokenize answered {count} for {len(tokens)} tokens")
        return buffer.raw[:count]

    def text(self, token: int) -> str:
        """How the vocabulary writes `token` ("Ġhello", "▁hello", "<0x0A>"): a `str` for every id. Bytes that are not
        UTF-8 are written `\\xNN`."""
        self._check_id(token)
        known = self._texts[token]
        if known is None:
            self._read_texts(token - token % _BLOCK, _BLOCK)
            known = self._texts[token]
        return known or ""

    def texts(self) -> list[str]:
        """`text` of every id, in order. About 0.2 s for 262,144 tokens, at the first call only."""
        if self.type in (VocabType.NONE, VocabType.OTHER):
            return []
        if None in self._texts:
            self._read_texts(0, self.n_tokens)
        return [text or "" for text in self._texts]

    def _read_texts(self, first: int, count: int) -> None:
        get = llama_cpp.llama_vocab_get_text
        with self._use() as pointer:
            for token in range(first, min(first + count, self.n_tokens)):
                self._texts[token] = (get(pointer, token) or b"").decode("utf-8", "backslashreplace")

    # ---- what a token is ----------------------------------------------------------------------------------------

    def attr(self, token: int) -> int:
        """`TokenAttr` bits of `token`."""
        self._check_id(token)
        if self._attrs[token] < 0:
            self._read_attrs(token - token % _BLOCK, _BLOCK)
        return self._attrs[token]

    def attrs(self) -> list[int]:
        """`attr` of every id, in order. About 0.1 s for 262,144 tokens, at the first call only."""
        if self.type in (VocabType.NONE, VocabType.OTHER):
            return []
        if -1 in self._attrs:
            self._read_attrs(0, self.n_tokens)
        return list(self._attrs)

    def _read_attrs(self, first: int, count: int) -> None:
        get = llama_cpp.llama_vocab_get_attr
        with self._use() as pointer:
            for token in range(first, min(first + count, self.n_tokens)):
                self._attrs[token] = int(get(pointer, token))

    def is_eog(self, token: int) -> bool:
        """Whether llama.cpp ends generation at `token` (EOS, EOT, EOM, ...)."""
        self._check_id(token)
        with self._use() as pointer:
            return bool(llama_cpp.llama_vocab_is_eog(pointer, token))

    @cached_property
    def eog_ids(self) -> tuple[int, ...]:
        """Every token that ends generation, ascending. About 0.1 s for 262,144 tokens, once."""
        is_eog = llama_cpp.llama_vocab_is_eog
        with self._use() as pointer:
            return tuple(token for token in range(self.n_tokens) if is_eog(pointer, token))

    def _special(self, function: Callable[[Any], int]) -> int | None:
        with self._use() as pointer:
            token = int(function(pointer))
        return token if 0 <= token < self.n_tokens else None

    @cached_property
    def bos_id(self) -> int | None:
        """Beginning of the text; `None` where the vocabulary has none, as with all of these."""
        return self._special(llama_cpp.llama_vocab_bos)

    @cached_property
    def eos_id(self) -> int | None:
        return self._special(llama_cpp.llama_vocab_eos)

    @cached_property
    def eot_id(self) -> int | None:
        return self._special(llama_cpp.llama_vocab_eot)

    @cached_property
    def sep_id(self) -> int | None:
        return self._special(llama_cpp.llama_vocab_sep)

    @cached_property
    def pad_id(self) -> int | None:
        return self._special(llama_cpp.llama_vocab_pad)

    @cached_property
    def mask_id(self) -> int | None:
        return self._special(llama_cpp.llama_vocab_mask)

    @cached_property
    def cls_id(self) -> int | None:
        """llama.cpp calls it BOS; only BERT-like vocabularies have one."""
        return self.bos_id if self.type is VocabType.WPM else None

    @cached_property
    def unk_id(self) -> int | None:
        """From the GGUF's `tokenizer.ggml.unknown_token_id`, else llama.cpp's default for the type (its C interface
        has no function for it)."""
        written = self.metadata_value("tokenizer.ggml.unknown_token_id")
        token = int(written) if written and written.isdigit() else _DEFAULT_UNKNOWN.get(self.type, -1)
        return token if 0 <= token < self.n_tokens else None

    @cached_property
    def add_bos(self) -> bool:
        """Whether `tokenize(..., add_special=True)` puts BOS (CLS) first."""
        with self._use() as pointer:
            return bool(llama_cpp.llama_vocab_get_add_bos(pointer)) or self.type is VocabType.WPM

    @cached_property
    def add_eos(self) -> bool:
        with self._use() as pointer:
            return bool(llama_cpp.llama_vocab_get_add_eos(pointer))

    @cached_property
    def affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids that `add_special` puts before and after a text: `tokenize(t, True) == [*before, *tokenize(t, False),
        *after]` for every text `t`."""
        around = self.tokenize("", add_special=True, parse_special=False)
        cut = 1 if around and self.add_bos and around[0] == self.bos_id else 0
        return tuple(around[:cut]), tuple(around[cut:])

    @cached_property
    def adds_space_prefix(self) -> bool:
        """Whether a space is put before the first word, and after every special token, before the text is cut."""
        if self.type not in (VocabType.SPM, VocabType.UGM, VocabType.WPM):
            return False
        return self.piece(ids[0]).startswith(b" ") if (ids := self.tokenize("a", False, False)) else False

    @cached_property
    def spells_bytes(self) -> bool:
        """Whether normal tokens are spelled byte by byte in GPT-2's letters ("Ġhello" for " hello")."""
        if self.type is not VocabType.BPE:
            return False
        ids = self.tokenize(" ", False, False)
        return bool(ids) and self.text(ids[0]).startswith("Ġ")

    def spelling(self, text: str) -> str:
        """`text` as a normal token would be spelled: "Ġhello" or "▁hello" for " hello"."""
        if not self.spells_bytes:
            return text.replace(" ", "▁")
        return "".join(GPT2_LETTERS[byte] for byte in text.encode("utf-8", "replace"))

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.n_tokens:
            raise TokenizerError(f"token id {token} is outside the vocabulary: 0 <= id < {self.n_tokens}")
        if self.type in (VocabType.NONE, VocabType.OTHER):
            raise TokenizerError(f"this model carries no usable vocabulary{self._of()} (type {self.type.name})")


class _VocabOnlyModel:
    """A model loaded for its vocabulary: freed by `close()`, or when the last reference goes."""

    def __init__(self, path: Path) -> None:
        init_backend()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        with recent_errors() as lines:
            pointer = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            reason = f": {lines[0].strip()}" if lines else ""
            raise ModelLoadError(f"llama.cpp cannot read a vocabulary from {path}{reason}", str(path))
        self.pointer = pointer
        self.close = weakref.finalize(self, llama_cpp.llama_model_free, pointer)


def open_vocab(path: str | os.PathLike[str]) -> NativeVocab:
    """Load the vocabulary of a GGUF file and no weights (0.1 s for 49,152 tokens, 0.5 s for 262,144).

    `close()` frees it, as does the last reference going away.

    Raises:
        ModelLoadError: no such file, not a GGUF, or a vocabulary that llama.cpp does not know; the message carries
            llama.cpp's own.
    """
    file = Path(path)
    if not file.is_file():
        raise ModelLoadError(f"no GGUF file at {file}", str(file))
    model = _VocabOnlyModel(file)
    return NativeVocab(model.pointer, owner=model, path=file, on_close=model.close)


def _reopen(path: str, n_tokens: int) -> NativeVocab:
    """Unpickle: read the vocabulary from the file again, and make sure it is still the same file."""
    vocab = open_vocab(path)
    if vocab.n_tokens != n_tokens:
        raise TokenizerError(f"{path} has {vocab.n_tokens} tokens now, and had {n_tokens} when this was pickled")
    return vocab
