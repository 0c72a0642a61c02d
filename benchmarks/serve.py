"""Many users at once: streams that run side by side, against the bare decode of as many sequences, and which goals are met.

    python benchmarks/serve.py                                        # everything, which takes an hour
    python benchmarks/serve.py --models q4_0 --streams 8 --rounds 3   # a part of it
    python benchmarks/serve.py --quick                                # does it work?

Contenders: `bare` is a loop over `llama_decode` with one sequence for each stream, all of which begin together; `threads` is
`generate()` in a thread for each stream, `streamed` the same with a streamer, `locked` the same with a lock around the call;
`http` is this package's server with as many streaming clients; `llama-server` is llama-cpp-python's, whose default of cutting a
stream when another request comes is switched off. The last needs packages of its own, which may be in another environment:

    python -m venv llama-server && llama-server/bin/pip install "llama-cpp-python[server]"
    python benchmarks/serve.py --llama-server-python llama-server/bin/python

All write greedily, past end tokens, each stream after another prompt, which begins with another word. Tokens per second count
from the request to the last token, prompts included. Contenders take turns within a round, and a ratio is taken within each
round; those that write one text after the other take part in the first rounds only (--serial-rounds). "fresh": the model was
loaded, or its memory emptied, before every turn; "used": --requests short requests were served before, and nothing was emptied
since. The stall is what running streams feel of a long prompt: the longest wait for a token while it is evaluated, less the
usual one, in batches of that prompt (as long as one takes in the bare loop).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "modules"), str(ROOT / "tests")]

import models  # noqa: E402
from chat import WORDS  # noqa: E402
from clients import Stall, Streams  # noqa: E402
from figures import Cell, as_json, goals, show, show_goals  # noqa: E402
from servers import Prompt, Setup, sources  # noqa: E402
from transformers_llamacpp.bench.report import check_writable, write_json  # noqa: E402
from transformers_llamacpp.bench.table import Progress  # noqa: E402
from transformers_llamacpp.errors import LlamaCppError  # noqa: E402
from transformers_llamacpp.native.vocab import open_vocab  # noqa: E402

MODELS = {"f32": models.smollm2_f32, "q4_0": models.smollm2_q4_0}

CONTENDERS = {
    "bare": "bare", "threads": "ours", "streamed": "ours", "http": "http", "locked": "ours", "llama-server": "llama-server",
}  # fmt: skip
"""By name: the process that each lives in."""

SERIAL = ("locked", "llama-server")
FEEL = ("streamed", "http")
"""Whose streams are watched while a long prompt comes."""

N_BATCH = 512
Say = Callable[..., None]


class Texts:
    """Prompts from the word list: the same ones in every run, and no two of a run alike."""

    def __init__(self, file: Path) -> None:
        self.vocab = open_vocab(file)
        self.draw = random.Random(0)

    def prompt(self, tokens: int, *first: str) -> Prompt:
        """`tokens` or very few more, the words `first` before others."""
        words, ids = [*first], [0] * len(first)
        while len(ids) < tokens:
            words += self.draw.choices(WORDS.split(), k=max(1, (tokens - len(ids)) // 2))
            ids = self.vocab.tokenize(" ".join(words))
        return Prompt(" ".join(words), ids)

    def streams(self, n: int) -> list[Prompt]:
        """For streams that run at the same time: no two begin alike."""
        firsts = self.draw.sample(WORDS.split(), n)
        return [self.prompt(16, first) for first in firsts]

    def short(self, n: int) -> list[tuple[Prompt, int]]:
        return [(self.prompt(self.draw.randint(4, 40)), self.draw.randint(4, 12)) for _ in range(n)]


class Run:
    """One model: its processes, and what was measured."""

    def __init__(self, name: str, args: argparse.Namespace, say: Say) -> None:
        self.name, self.args, self.say = name, args, say
        self.file = MODELS[name]()
        self.texts = Texts(self.file)
        self.cells: dict[Cell, list[Streams]] = {}
        self.stalls: dict[tuple[str, str], list[tuple[Stall, float]]] = {}
        """By contender and phase: the stall, and the seconds of one batch."""
        self.left_out: dict[str, str] = {}
        self.processes: dict[str, Any] = {}

    def everything(self) -> None:
        args = self.args
        most = max(args.streams)
        n_ctx = args.long + args.tokens + 64
        n_cells = -(-(n_ctx + most * (args.tokens + 32)) // 256) * 256
        setup = Setup(self.file, n_ctx, n_cells, most, args.threads)
        makers = sources(setup, self.texts.vocab.n_tokens - 1, sorted(self.texts.vocab.eog_ids), args.llama_server_python)
        with ExitStack() as stack:
            for process in dict.fromkeys(CONTENDERS[one] for one in args.contenders):
                self.say(self.name, f"loading {process}")
                try:
                    self.processes[process] = makers[process]()
                except RuntimeError as problem:
                    self.left_out[process] = str(problem)
                    continue
                stack.callback(self.processes[process].close)
            self._phase("fresh", True)
            if args.requests:
                for process in ("ours", "http"):
                    if process in self.processes:
                        self.say(f"{self.name}, {process}: {args.requests} requests")
                        self.processes[process].serve(self.texts.short(args.requests), args.at_once)
                self._phase("used", False)

    def _phase(self, phase: str, fresh: bool) -> None:
        names = [name for name in self.args.contenders if CONTENDERS[name] in self.processes]
        for number in range(self.args.rounds):
            for streams in self.args.streams:
                prompts = self.texts.streams(streams)
                for name in _turned(names, number):
                    if name in SERIAL and (number >= self.args.serial_rounds or (name == "llama-server" and not fresh)):
                        continue
                    self.say(f"{self.name}, {phase}, round {number + 1}", f"{streams} streams, {name}")
                    done = self._one(name, prompts, fresh)
                    self.cells.setdefault(Cell(phase, streams, name), []).append(done)
        if "bare" in self.processes and self.args.long:
            for number in range(self.args.rounds):
                for name in _turned([name for name in names if name in FEEL], number):
                    self.say(f"{self.name}, {phase}, a long prompt, round {number + 1}", name)
                    self.stalls.setdefault((name, phase), []).append(self._stall(name, fresh))

    def _one(self, name: str, prompts: Sequence[Prompt], fresh: bool) -> Streams:
        process = self.processes[CONTENDERS[name]]
        if fresh:
            process.refresh()
        if name == "bare":
            return process.run(prompts, self.args.tokens)
        if CONTENDERS[name] == "ours":
            return process.run(name, prompts, self.args.tokens)
        return process.run(prompts, self.args.tokens)

    def _stall(self, name: str, fresh: bool) -> tuple[Stall, float]:
        process, long = self.processes[CONTENDERS[name]], self.texts.prompt(self.args.long)
        if fresh:
            process.refresh()
        prompts = self.texts.streams(self.args.stall_streams)
        felt = process.stall(prompts, long, self.args.tokens, min(16, self.args.tokens // 4))
        return felt, self.processes["bare"].batch_seconds(long, N_BATCH)


def _turned(names: Sequence[str], number: int) -> Iterator[str]:
    shift = number % max(1, len(names))
    yield from [*names[shift:], *names[:shift]]


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if (number := int(text)) < least:
            raise ValueError
        return number

    return count


def _listed(known: Sequence[str] | None) -> Callable[[str], list[Any]]:
    def listed(text: str) -> list[Any]:
        found = text.split(",")
        if known is None:
            return sorted({_count(1)(one) for one in found})
        if unknown := [one for one in found if one not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(known)}")
        return [one for one in known if one in found]

    return listed


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, kind, default, text in (
        ("--models", _listed(list(MODELS)), list(MODELS), f"some of {', '.join(MODELS)}"),
        ("--contenders", _listed(list(CONTENDERS)), list(CONTENDERS), f"some of {', '.join(CONTENDERS)}"),
        ("--streams", _listed(None), [1, 4, 8, 16], "how many run at once, with commas between (1,4,8,16)"),
        ("--tokens", _count(8), 128, "tokens of each stream (128)"),
        ("--rounds", _count(1), 5, "turns of each contender in each phase (5)"),
        ("--serial-rounds", _count(0), 1, "of those that write one text after the other (1)"),
        ("--requests", _count(0), 500, "requests served between the phases; 0: the fresh phase only (500)"),
        ("--at-once", _count(1), 8, "of these (8)"),
        ("--long", _count(0), 2000, "tokens of the long prompt that comes while streams run; 0: none (2000)"),
        ("--stall-streams", _count(1), 8, "streams that run then (8)"),
        ("--threads", _count(1), 2, "threads of every contender (2)"),
        ("--llama-server-python", str, sys.executable, "an interpreter that has llama_cpp.server's packages (this one)"),
        ("--json", Path, None, "a file for every round, and the goals"),
    ):  # fmt: skip
        found.add_argument(flag, type=kind, default=default, help=text)
    found.add_argument("--quick", action="store_true", help="2 and 4 streams of 32 tokens, 1 round, 40 requests, one model")
    return found


def main() -> None:
    args = parser().parse_args()
    if args.quick:
        args.models, args.streams, args.tokens, args.rounds, args.requests = args.models[-1:], [2, 4], 32, 1, 40
        args.stall_streams = 4
    if "bare" not in args.contenders:
        args.contenders = ["bare", *args.contenders]  # what all are measured in
    args.streams = sorted({*args.streams})
    if args.stall_streams > max(args.streams):
        args.stall_streams = max(args.streams)
    if args.json is not None:
        check_writable(args.json)
    everything = {}
    for name in args.models:
        with Progress() as say:
            run = Run(name, args, say)
            run.everything()
        show(run)
        met = list(goals(run))
        show_goals(name, met)
        everything[name] = as_json(run, met)
    if args.json is not None:
        write_json(args.json, everything)


if __name__ == "__main__":
    try:
        main()
    except (LlamaCppError, models.MissingModelError, RuntimeError) as error:
        sys.exit(f"serve.py: {error}")
