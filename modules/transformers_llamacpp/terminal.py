"""What the command line shows: a streamed completion, a chat, and what a GGUF says about itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from .errors import LlamaCppError
from .native import NativeModel, build
from .server.chat import Message, Progress, answer, complete, statistics

__all__ = ["Chat", "print_completion", "print_info"]

HELP = "/regenerate answers again, /clear forgets the conversation, /exit (or Ctrl-D) ends; Ctrl-C stops an answer."


class _Shown:
    """Streams an answer to stdout and keeps its last progress. Ctrl-C ends the call and is passed on."""

    def __init__(self) -> None:
        self.progress = Progress()

    def run(self, progresses: Generator[Progress]) -> None:
        with closing(progresses):
            try:
                for progress in progresses:
                    print(progress.text[len(self.progress.text) :], end="", flush=True)
                    self.progress = progress
            finally:
                print(flush=True)
        print(f"[{statistics(self.progress)}]", file=sys.stderr)


def print_completion(model: Any, prompt: str, settings: Mapping[str, Any]) -> None:
    """Continues `prompt`; the text goes to stdout, the statistics to stderr."""
    _Shown().run(complete(model, prompt, settings, threading.Event()))


class Chat:
    """A conversation in the terminal. The history is rendered anew each turn; what is in memory of it is reused."""

    def __init__(self, model: Any, settings: Mapping[str, Any], system: str | None = None) -> None:
        self.model = model
        self.settings = settings
        self.head: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = []

    def run(self) -> None:
        with suppress(ImportError):
            import readline  # noqa: F401  # line editing for input(), where the platform has it
        print(HELP, file=sys.stderr)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except (EOFError, KeyboardInterrupt):
                return
            if line.strip() == "/exit":
                return
            self.say(line)

    def say(self, line: str) -> None:
        """One line of the user: a command, or a message that gets an answer. Errors are told; the chat goes on."""
        command = line.strip()
        if command == "/clear":
            self.messages = []
        elif command == "/regenerate":
            if self.messages:
                self._answer(self.messages[:-1])
        elif command.startswith("/") and " " not in command:
            print(HELP, file=sys.stderr)
        elif command:
            self._answer([*self.messages, {"role": "user", "content": line}])

    def _answer(self, messages: list[Message]) -> None:
        """Answers `messages`. An answer that broke off stays as far as it came; a question without one is dropped."""
        shown = _Shown()
        try:
            shown.run(answer(self.model, [*self.head, *messages], self.settings, threading.Event()))
        except KeyboardInterrupt:
            print("[stopped]", file=sys.stderr)
        except LlamaCppError as error:
            print(f"[{error}]", file=sys.stderr)
        if shown.progress.text:
            self.messages = [*messages, {"role": "assistant", "content": shown.progress.text}]


def print_info(path: Path, everything: bool = False) -> None:
    """Reads metadata and vocabulary only, so a file of any size takes no time and no memory."""
    native = NativeModel(path, build({"vocab_only": True}))
    try:
        for name, value in _facts(native):
            print(f"{name:<16}{value}")
        if everything:
            print()
            for name, value in sorted(native.metadata.items()):
                print(f"{name} = {' '.join(value.split())[:200]}")
    finally:
        native.close()


def _facts(native: NativeModel) -> Iterator[tuple[str, object]]:
    metadata, vocab = native.metadata, native.vocab
    architecture = metadata.get("general.architecture", "unknown")
    yield "file", native.path
    yield "name", metadata.get("general.name", native.path.stem)
    yield "architecture", architecture + (" (recurrent state)" if native.has_state else "")
    yield "type", native.description
    yield "parameters", f"{native.n_params:,}"
    yield "size", f"{native.n_bytes / 2**20:,.1f} MiB"
    yield "trained context", f"{native.n_ctx_train:,} tokens"
    window = metadata.get(f"{architecture}.attention.sliding_window")
    if window:
        yield "sliding window", f"{window} tokens"
    yield "layers", f"{native.n_layer}, width {native.n_embd}, heads {native.n_head} ({native.n_head_kv} for keys)"
    yield "vocabulary", f"{vocab.n_tokens:,} tokens ({metadata.get('tokenizer.ggml.model', 'none')})"
    for name, token in (("start token", vocab.bos_id), ("pad token", vocab.pad_id)):
        if token is not None:
            yield name, f"{token} {vocab.text(token)}"
    yield "end tokens", ", ".join(f"{token} {vocab.text(token)}" for token in vocab.eog_ids) or "none"
    yield "chat template", "yes" if "tokenizer.chat_template" in metadata else "no"
