"""What llama.cpp's tokenizers cannot take: texts that would end the process instead of giving an error."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable

from ..errors import TokenizerError

__all__ = ["GPT2_LETTERS", "SAFE_RUN", "longest_run", "missing_from_rwkv", "missing_from_spm", "with_stack"]

SAFE_RUN = 2000
"""Characters without a break that need no stack of their own.

llama.cpp cuts text for BPE with `std::regex`, which recurses once for each character it matches: 320 bytes of stack
each (x86-64, GCC). 26,000 letters, spaces or Chinese characters in a row overflow the usual 8 MiB and end the process;
it happened with `deepseek-llm`, `deepseek-v3`, `tekken`, `falcon` and `gpt-4o`."""
_STACK_PER_CHARACTER = 1024
_MOST_STACK = 2**30
_RUNS = re.compile(r"\s+|\S+")
_stack_lock = threading.Lock()

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
GPT2_LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {b: chr(256 + n) for n, b in enumerate(_OTHERS)}
"""How byte-level vocabularies spell the 256 bytes (GPT-2's `bytes_to_unicode`)."""


def longest_run(text: str) -> int:
    """The most characters in a row that are all spaces, or all something else: no expression matches more."""
    return max(map(len, _RUNS.findall(text)), default=0)


def with_stack(run: int, call: Callable[[], list[int]]) -> list[int]:
    """`call()` in a thread whose stack takes a regular expression over `run` characters."""
    size = 2**24 + run * _STACK_PER_CHARACTER
    if size > _MOST_STACK:
        raise TokenizerError(
            f"{run} characters without a break between space and text: llama.cpp's regular expressions would need "
            f"about {size >> 20} MiB of stack, and {_MOST_STACK >> 20} is the limit. Cut the text in pieces."
        )
    answer: list[list[int]] = []
    problem: list[BaseException] = []

    def work() -> None:
        try:
            answer.append(call())
        except BaseException as error:  # raised again in the caller's thread
            problem.append(error)

    thread = threading.Thread(target=work, name="llamacpp-tokenize", daemon=True)
    with _stack_lock:
        before = threading.stack_size(size)
        try:
            thread.start()
        except RuntimeError as error:
            raise TokenizerError(f"no thread with a stack of {size >> 20} MiB for a run of {run} characters") from error
        finally:
            threading.stack_size(before)
    thread.join()
    if problem:
        raise problem[0]
    return answer[0]


Missing = Callable[[bytes], bytes]
"""Gives the first part of a UTF-8 text that a vocabulary has no tokens for, or `b""`."""


def missing_from_spm(texts: Iterable[str]) -> Missing | None:
    """For a SentencePiece vocabulary of these token `texts` that lacks byte tokens; `None` if it has all 256.
    llama.cpp ends the process on a character that is neither a token nor can be spelled in bytes (`byte_to_token`)."""
    found: set[int] = set()
    characters: set[str] = set()
    for text in texts:
        match = re.fullmatch("<0x([0-9A-F]{2})>", text)
        if match:
            found.add(int(match[1], 16))
            if len(found) == 256:
                return None
        elif len(text) == 1:
            characters.add(text)

    def missing(data: bytes) -> bytes:
        every: set[str] = {*data.decode("utf-8").replace(" ", "▁"), "▁"}
        for character in every:
            spelled: bytes = character.encode("utf-8")
            if character not in characters and not found.issuperset(spelled):
                return spelled
        return b""

    return missing


def missing_from_rwkv(pieces: Iterable[bytes]) -> Missing | None:
    """The same for an RWKV vocabulary of these `pieces`: on a byte that begins longer tokens and is none itself,
    llama.cpp's longest match starts over for ever."""
    found: set[int] = set()
    for piece in pieces:
        if len(piece) == 1:
            found.add(piece[0])
            if len(found) == 256:
                return None
    return lambda data: next((bytes([byte]) for byte in data if byte not in found), b"")
