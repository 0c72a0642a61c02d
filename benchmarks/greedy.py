"""Greedy `generate()` against the bare low-level loop: speed, load time and memory, contenders alternated in one run.

    python benchmarks/greedy.py MODEL.gguf --rounds 5

Prints medians and ratios. Ratios of one run can be compared with other runs; seconds cannot.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def run(script: str, *args: str) -> dict[str, Any]:
    path = os.pathsep.join([str(HERE.parent / "modules"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / script), *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--n-ctx", default="1024")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--prompt", default="16")
    parser.add_argument("--tokens", default="256")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    common = [args.file, "--n-ctx", args.n_ctx, "--threads", args.threads, "--prompt", args.prompt, "--tokens", args.tokens]
    torch = run("ours.py", args.file, "--only-torch")["peak_bytes"]
    rounds = []
    for number in range(args.rounds):
        bare, ours = run("bare.py", *common), run("ours.py", *common)
        rounds.append((bare, ours))
        print(
            f"round {number + 1}: bare {bare['seconds']:.2f} s, generate() {ours['seconds']:.2f} s, "
            f"ratio {bare['seconds'] / ours['seconds']:.3f}",
            flush=True,
        )
    ratio = statistics.median(bare["seconds"] / ours["seconds"] for bare, ours in rounds)
    load = statistics.median(ours["load_seconds"] - bare["load_seconds"] for bare, ours in rounds)
    memory = statistics.median(ours["peak_bytes"] - bare["peak_bytes"] - torch for bare, ours in rounds)
    print(f"\nspeed, generate() / bare loop      {ratio:.3f}   (median of {args.rounds})")
    print(f"load time beyond the bare API      {load:+.2f} s")
    print(f"peak memory beyond bare + torch    {memory / 1e6:+.0f} MB")


if __name__ == "__main__":
    main()
