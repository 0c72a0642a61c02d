"""What logits processors cost for each token: transformers' own list against `decoding.warpers.Chain`.

    python benchmarks/warpers.py
    python benchmarks/warpers.py --vocabulary 49152 --rounds 200 --length 2000

Scores look like a language model's: most of the probability in a few hundred tokens, a long tail. `run` is what a loop pays
that samples from the tokens that are left, `call` gives a whole tensor as transformers does. Each figure is the median of its
rounds; the two take turns within a round. transformers uses `--threads` threads, ours always one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers.generation.logits_process as theirs
from transformers import LogitsProcessorList

from transformers_llamacpp.decoding.warpers import Chain

CHAINS: dict[str, Callable[[torch.Tensor], list[Any]]] = {
    "temperature": lambda ids: [theirs.TemperatureLogitsWarper(0.7)],
    "top-k 40": lambda ids: [theirs.TopKLogitsWarper(40)],
    "top-k 40, top-p 0.95": lambda ids: [theirs.TopKLogitsWarper(40), theirs.TopPLogitsWarper(0.95)],
    "temperature, top-k 40, top-p 0.95": lambda ids: [
        theirs.TemperatureLogitsWarper(0.7), theirs.TopKLogitsWarper(40), theirs.TopPLogitsWarper(0.95),
    ],
    "top-p 0.95": lambda ids: [theirs.TopPLogitsWarper(0.95)],
    "temperature, top-p 0.9": lambda ids: [theirs.TemperatureLogitsWarper(0.7), theirs.TopPLogitsWarper(0.9)],
    "min-p 0.05": lambda ids: [theirs.MinPLogitsWarper(0.05)],
    "repetition penalty, min-p 0.05": lambda ids: [
        theirs.RepetitionPenaltyLogitsProcessor(1.1), theirs.MinPLogitsWarper(0.05),
    ],
    "penalty, temperature, top-k, top-p, min-p": lambda ids: [
        theirs.RepetitionPenaltyLogitsProcessor(1.1), theirs.TemperatureLogitsWarper(0.8), theirs.TopKLogitsWarper(50),
        theirs.TopPLogitsWarper(0.95), theirs.MinPLogitsWarper(0.02),
    ],
    "no repeat 3-gram": lambda ids: [theirs.NoRepeatNGramLogitsProcessor(3)],
    "bad words (50)": lambda ids: [theirs.NoBadWordsLogitsProcessor([[i] if i % 2 else [i, i + 1] for i in range(100, 150)])],
    "min new tokens (over)": lambda ids: [theirs.MinNewTokensLengthLogitsProcessor(ids.shape[1] - 9, 8, 2)],
    "typical 0.9": lambda ids: [theirs.TypicalLogitsWarper(0.9)],
    "epsilon 3e-4": lambda ids: [theirs.EpsilonLogitsWarper(3e-4)],
    "eta 3e-4": lambda ids: [theirs.EtaLogitsWarper(3e-4)],
    "top-h 0.4": lambda ids: [theirs.TopHLogitsWarper(0.4)],
}  # fmt: skip


def scores(random: np.random.Generator, n_vocab: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A head whose probabilities fall with the square of their rank, more or less, and 2% of the probability in all others."""
    scores = random.normal(0, 2.2, n_vocab)
    head = random.choice(n_vocab, 2000, replace=False)
    scores += np.log(0.02 / np.exp(scores).sum())
    scores[head] = random.normal(0, 0.7, 2000) - random.uniform(1.2, 2) * np.log(np.arange(1, 2001))
    return scores.astype(np.float32)


def measure(make: Callable[[torch.Tensor], list[Any]], ids: torch.Tensor, n_vocab: int, rounds: int) -> list[float]:
    """Median microseconds of transformers' list, `Chain.run` and `Chain.__call__`."""
    processors = make(ids)
    reference, chain = LogitsProcessorList(processors), Chain(processors)
    random = np.random.default_rng(0)
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        logits = scores(random, n_vocab)
        tensor = torch.from_numpy(logits.copy())[None]
        ways = (
            lambda tensor=tensor: reference(ids, tensor),
            lambda logits=logits: chain.run(ids, logits[None]),
            lambda tensor=tensor: chain(ids, tensor),
        )
        for taken, way in zip(times, ways, strict=True):
            started = time.perf_counter()
            way()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken) * 1e6 for taken in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49152, 262144], help="sizes (default: %(default)s)")
    parser.add_argument("--length", type=int, default=500, help="tokens of the text so far (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="torch's (default: %(default)s)")
    parser.add_argument("--chain", default="", help="only the chains whose name has this in it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'chain':42s} {'vocabulary':>10s} {'transformers':>13s} {'run':>9s} {'call':>9s}   microseconds")
    for n_vocab in args.vocabulary:
        ids = torch.from_numpy(np.random.default_rng(1).integers(0, n_vocab, (1, args.length)))
        for name, make in CHAINS.items():
            if args.chain in name:
                reference, run, call = measure(make, ids, n_vocab, args.rounds)
                print(f"{name:42s} {n_vocab:10d} {reference:13.0f} {run:9.0f} {call:9.0f}", flush=True)


if __name__ == "__main__":
    main()
