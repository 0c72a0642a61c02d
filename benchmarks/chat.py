"""Long chats: what is evaluated again, and what it costs, against the bare low-level API and llama-cpp-python's own cache.

    python benchmarks/chat.py document              # one long document, many questions
    python benchmarks/chat.py chats                 # many chats taking turns
    python benchmarks/chat.py chats --chats 50 --room 8
    python benchmarks/chat.py dropped               # a chat that drops its oldest messages
    python benchmarks/chat.py streaming             # one endless answer (StreamingLLM)

`generate()` gets the whole history as ids in every call, and no cache. It is held against the best there can be (one
sequence for each chat, nothing but new tokens evaluated), against `Llama` with a `LlamaRAMCache`, and against evaluating
everything. Contenders take turns within one run, in a changing order, each in a process of its own, so that its peak memory
is its own; each goes on with its own answers. All write greedily and past end tokens. Ratios of one run can be compared with
other runs; seconds cannot. With OpenMP, threads that fall asleep between two contenders' turns cost the first tokens after
it: measure with OMP_WAIT_POLICY=active and GOMP_SPINCOUNT=300000.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from bare import tokenizer
from contenders import Cached, Ours, Remote, Single, Turn, common

WORDS = (
    "river stone lantern morning garden engine window silver market winter bridge letter island paper shadow mountain "
    "forest candle harbour teacher station kitchen doctor music yellow summer number table bread village captain story "
    "train north water glass street question animal machine picture theory library weather history planet doubt carry "
    "follow answer remember travel build open listen gather under between after before often quietly never almost"
)
OPEN, CLOSE, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n"


class Texts:
    """Prompts from the word list, in tokens of the model; the same ones in every run. The markup is ChatML, which a model
    without it reads as text."""

    def __init__(self, path: str) -> None:
        self.tokenize = tokenizer(path)
        self.draw = random.Random(0)
        self.open, self.close, self.end = self.tokenize(OPEN), self.tokenize(CLOSE), self.tokenize(END)

    def words(self, n: int) -> list[int]:
        """`n` tokens."""
        return self.tokenize(" ".join(self.draw.choices(WORDS.split(), k=n)))[:n]

    def system(self, n: int) -> list[int]:
        return self.tokenize("<|im_start|>system\n") + self.words(n) + self.end

    def message(self, n: int) -> list[int]:
        return self.open + self.words(n) + self.close


def launch(wanted: str, makers: dict[str, Callable[[], Remote]]) -> dict[str, Remote]:
    """The contenders that are wanted and can be had."""
    names = wanted.split(",") if wanted else [*makers]
    if unknown := set(names) - makers.keys():
        raise SystemExit(f"no contender {', '.join(sorted(unknown))}; there are {', '.join(makers)}")
    contenders = {}
    for name in names:
        remote = makers[name]()
        if remote.problem is None:
            contenders[name] = remote
        else:
            print(f"{name} is left out: {remote.problem}\n", flush=True)
    return contenders


def converse(
    contenders: dict[str, Remote], system: list[int], messages: list[list[list[int]]], end: list[int], n: int,
    window: int = 0, independent: bool = False,
) -> dict[str, list[list[Turn]]]:  # fmt: skip
    """`messages[turn][chat]`, all chats taking turns; the turns of each contender, for each round those of its chats.

    The contender "alone" has the first chat only. `window`: the oldest messages are dropped where the history would be
    longer. `independent`: every message comes right after `system`, as if there had been no other.
    """
    history: dict[str, list[list[list[int]]]] = {name: [[] for _ in messages[0]] for name in contenders}
    known: dict[str, dict[int, list[int]]] = {name: {} for name in contenders}
    turns: dict[str, list[list[Turn]]] = {name: [] for name in contenders}
    for number, wave in enumerate(messages):
        for name in contenders:
            turns[name].append([])
        for chat, message in enumerate(wave):
            shift = (number + chat) % len(contenders)
            for name in [*contenders][shift:] + [*contenders][:shift]:
                if name == "alone" and chat:
                    continue
                past = history[name][chat]
                while past and (independent or 0 < window < len(system) + sum(map(len, past)) + len(message)):
                    del past[0]
                ids = system + [token for exchange in past for token in exchange] + message
                turn = contenders[name].turn(chat, ids, n)
                turn.new = len(ids) - max((common(text, ids) for text in known[name].values()), default=0)
                turns[name][-1].append(turn)
                known[name][chat] = ids + turn.answer
                past.append(message + turn.answer + end)
        print(f"round {number + 1} of {len(messages)} done", file=sys.stderr, flush=True)
    return turns


def table(*columns: str) -> None:
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)


def row(*cells: Any) -> None:
    print("| " + " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |", flush=True)


def ratio_row(name: str, ours: list[float], theirs: list[float], goal: str) -> None:
    """Of the sums, and of the turns one by one: the latter does not feel a single disturbed turn."""
    each = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    row(name, f"**{sum(ours) / sum(theirs):.2f}**, median of turns {each:.2f}", goal)


def document(args: argparse.Namespace) -> None:
    texts = Texts(args.file)
    text = texts.open + texts.words(args.document)
    questions = [[texts.words(texts.draw.randint(10, 40)) + texts.close] for _ in range(args.questions)]
    contenders = launch(args.contenders, {
        "ours": lambda: Remote(Ours, args.file, args.threads, n_ctx=args.n_ctx),
        "bare": lambda: Remote(Single, args.file, args.threads, args.n_ctx),
        "cache": lambda: Remote(Cached, args.file, args.threads, args.n_ctx, args.cache_mib << 20),
    })  # fmt: skip
    waves = converse(contenders, text, questions, texts.end, args.answer, independent=True)
    turns = {name: [wave[0] for wave in waves[name]] for name in contenders}
    own = [len(question[0]) for question in questions[1:]]
    table("contender", "s to first token: first question", "later ones, median", "worst", "evaluated beyond own", "peak MB")
    for name, (first, *later) in turns.items():
        seconds = [turn.first_seconds for turn in later]
        beyond = max(turn.evaluated - tokens for turn, tokens in zip(later, own, strict=True))
        row(name, first.first_seconds, statistics.median(seconds), max(seconds), beyond, contenders[name].peak() // 10**6)
    print(f"\n{len(text)} tokens of document, {args.questions} questions of {min(own)} to {max(own)} tokens\n")
    if {"ours", "bare"} <= turns.keys():
        ours, bare = ([turn.first_seconds for turn in turns[name]] for name in ("ours", "bare"))
        evaluated = max(turn.evaluated - tokens for turn, tokens in zip(turns["ours"][1:], own, strict=True))
        table("", "measured", "goal")
        ratio_row("first question, seconds to first token: ours / bare", ours[:1], bare[:1], "–")
        ratio_row("later questions, seconds to first token: ours / bare", ours[1:], bare[1:], "≤ 1.1")
        row("a later question: evaluated beyond its own tokens, worst", f"**{evaluated}**", "≤ 1")


def chats(args: argparse.Namespace) -> None:
    texts = Texts(args.file)
    system = texts.system(args.system)
    messages = [[texts.message(args.message) for _ in range(args.chats)] for _ in range(args.turns)]
    length = len(system) + args.turns * (len(messages[0][0]) + args.answer + len(texts.end))
    options: dict[str, Any] = {"n_ctx": args.n_ctx}
    if args.room:
        options["n_cells"] = args.room * length
    if args.host_cache_bytes is not None:
        options["host_cache_bytes"] = args.host_cache_bytes
    if args.state_dir:
        options["state_dir"] = args.state_dir
    bare = (args.file, args.threads, args.n_ctx, args.chats, system + texts.open)
    contenders = launch(args.contenders, {
        "ours": lambda: Remote(Ours, args.file, args.threads, **options),
        "bare": lambda: Remote(Single, *bare),
        "unified": lambda: Remote(Single, args.file, args.threads, length, *bare[3:], unified=True),
        "cache": lambda: Remote(Cached, args.file, args.threads, args.n_ctx, args.cache_mib << 20),
        "everything": lambda: Remote(Single, args.file, args.threads, args.n_ctx, keep=False),
        "alone": lambda: Remote(Ours, args.file, args.threads, n_ctx=args.n_ctx),
    })  # fmt: skip
    waves = converse(contenders, system, messages, texts.end, args.answer)
    turns = {name: [turn for wave in waves[name] for turn in wave] for name in contenders}
    table("contender", "seconds in all", "to first token, median", "evaluated", "evaluated beyond new, worst", "peak MB")
    for name, all_turns in turns.items():
        first = statistics.median(turn.first_seconds for turn in all_turns)
        beyond = max(turn.evaluated - turn.new for turn in all_turns)
        evaluated = sum(turn.evaluated for turn in all_turns)
        peak = contenders[name].peak() // 10**6
        row(name, sum(turn.seconds for turn in all_turns), first, evaluated, beyond, peak)
    print(f"\n{args.chats} chats of {length} tokens at their end. bare: a buffer for each; unified: one for all; alone: ours,")
    print(f"the first chat only. ours has {options.get('n_cells', args.n_ctx)} cells, and torch in its memory\n")
    if "ours" not in turns:
        return
    table("", "measured", "goal")
    rivals = {name: sum(turn.seconds for turn in turns[name]) for name in ("bare", "unified") if name in turns}
    if rivals:
        rival = min(rivals, key=lambda name: rivals[name])
        ours, theirs = ([turn.seconds for turn in turns[name]] for name in ("ours", rival))
        ratio_row(f"seconds in all: ours / one sequence per chat ({rival})", ours, theirs, "≤ 1.1")
    worst = max(turn.evaluated - turn.new for turn in turns["ours"])
    row("evaluated beyond the new tokens, worst turn", f"**{worst}**", "≤ 1")
    if "alone" in turns:
        many = [statistics.median(turn.step for turn in wave) for wave in waves["ours"]]
        ratio_row("seconds per token: ours / ours with one chat alone", many, [turn.step for turn in turns["alone"]], "≤ 1.1")


def dropped(args: argparse.Namespace) -> None:
    texts = Texts(args.file)
    system = texts.system(args.system)
    messages = [[texts.message(args.message)] for _ in range(args.turns)]
    options = {"n_ctx": args.n_ctx}
    contenders = launch(args.contenders, {
        "chunks": lambda: Remote(Ours, args.file, args.threads, reuse_min_chunk=args.min_chunk, **options),
        "ours": lambda: Remote(Ours, args.file, args.threads, **options),
        "everything": lambda: Remote(Single, args.file, args.threads, args.n_ctx, keep=False),
    })  # fmt: skip
    waves = converse(contenders, system, messages, texts.end, args.answer, window=args.window)
    exchange = len(messages[0][0]) + args.answer + len(texts.end)
    new = len(messages[0][0]) + len(texts.end) + 1  # with the last token of the answer before, which nobody evaluated
    full = (args.window - len(system) - len(messages[0][0])) // exchange + 1  # the first round that drops something
    if full >= args.turns:
        raise SystemExit("the history never exceeds the window: more turns, or a smaller window")
    print(f"a message brings {new} new tokens; from turn {full + 1} on the oldest {exchange} tokens of the chat are dropped\n")
    table("contender", "evaluated beyond new, median", "worst", "s to first token, median", "worst", "peak MB")
    for name in contenders:
        late = [wave[0] for wave in waves[name][full:]]
        beyond, seconds = [turn.evaluated - new for turn in late], [turn.first_seconds for turn in late]
        peak = contenders[name].peak() // 10**6
        row(name, f"{statistics.median(beyond):g}", max(beyond), statistics.median(seconds), max(seconds), peak)


def streaming(args: argparse.Namespace) -> None:
    texts = Texts(args.file)
    sink = {"n_sink": args.sink} if args.sink else {}
    ours = Ours(args.file, args.threads, n_ctx=args.n_ctx, **sink)
    ours.turn(0, texts.message(args.message), args.tokens)
    times = ours.times[1:]
    half = args.width // 2
    if len(times) < args.early + half or args.early < half:
        raise SystemExit(f"{len(times)} tokens have no window of {args.width} around token {args.early}")
    table("tokens", "tokens/s, median token", "tokens/s, the whole window", "slowest token, s")
    medians = []
    for stop in (args.early + half, len(times)):
        window = times[max(stop - 2 * half - 1, 0) : stop]
        steps = [later - earlier for earlier, later in pairwise(window)]
        medians.append(statistics.median(steps))
        whole = len(steps) / sum(steps)
        row(f"{stop - len(steps)} … {stop}", f"{1 / medians[-1]:.1f}", f"{whole:.1f}", max(steps))
    print()
    table("", "measured", "goal")
    row(f"speed, tokens up to {len(times)} / around {args.early}", f"**{medians[0] / medians[1]:.2f}**", "≥ 0.9")


def f32_file() -> str:
    """The file the tests make."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    import models

    return str(models.smollm2_f32())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="scenario", required=True)

    def scenario(run: Callable[[argparse.Namespace], None], help: str, names: str, **sizes: tuple[int | None, str]) -> Any:
        command = commands.add_parser(run.__name__, help=help, description=help)
        command.set_defaults(run=run)
        command.add_argument("file", nargs="?", help="a GGUF; by default SmolLM2-135M-Instruct in F32, as the tests make it")
        command.add_argument("--threads", type=int, default=2, help="threads of each contender (2)")
        if names:
            command.add_argument("--contenders", default="", help=f"some of them, with commas between: {names} (all)")
        for name, (default, text) in sizes.items():
            shown = text if default is None else f"{text} ({default})"
            command.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=shown)
        return command

    answer = (16, "tokens of an answer")
    message = (30, "words' tokens in a message; its markup comes on top")
    system = (100, "words' tokens in the system prompt")
    cache_mib = (768, "capacity of the LlamaRAMCache. It counts the states only: with the logits kept beside them it takes "
                      "up to ten times as much memory. For a hit it must hold two states of every chat")  # fmt: skip
    scenario(
        document, "one document, questions that do not know of each other", "ours,bare,cache",
        document=(4000, "tokens of the document"), questions=(10, "questions"), answer=answer,
        n_ctx=(8192, "context length"), cache_mib=cache_mib,
    )  # fmt: skip
    many = scenario(
        chats, "many chats with one system prompt, taking turns", "ours,bare,unified,cache,everything,alone",
        chats=(20, "chats"), turns=(10, "turns of each chat"), system=system, message=message, answer=answer,
        n_ctx=(2048, "context length"), cache_mib=cache_mib,
        room=(0, "ours has KV cells for so many chats at their end; 0: its default, n_ctx cells"),
        host_cache_bytes=(None, "ours: host memory for sequences out of the buffer; by default the package's"),
    )  # fmt: skip
    many.add_argument("--state-dir", help="ours: folder where sequences may be kept")
    scenario(
        dropped, "one chat whose oldest messages are dropped", "chunks,ours,everything",
        turns=(40, "turns"), window=(1000, "most tokens of a prompt"), min_chunk=(32, "reuse_min_chunk of the first contender"),
        system=system, message=message, answer=answer, n_ctx=(2048, "context length"),
    )  # fmt: skip
    scenario(
        streaming, "one endless answer in a context that slides", "",
        tokens=(20000, "tokens to generate"), n_ctx=(1024, "context length"), sink=(4, "n_sink; 0: no sliding"),
        early=(1000, "the token that later speed is compared with"), width=(1000, "tokens in a window"), message=message,
    )  # fmt: skip
    args = parser.parse_args()
    args.file = args.file or f32_file()
    args.run(args)


if __name__ == "__main__":
    main()
