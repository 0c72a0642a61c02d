"""`generate()` in one process, with the same answer as `bare.py`; `--only-torch` is the memory of the import alone."""

from __future__ import annotations

import argparse
import json
import time

from bare import peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--n-ctx", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=10, help="tokens in the prompt")
    parser.add_argument("--tokens", type=int, default=1, help="new tokens")
    parser.add_argument("--only-torch", action="store_true")
    args = parser.parse_args()
    import torch

    if args.only_torch:
        print(json.dumps({"peak_bytes": peak_bytes()}))
        return
    from transformers_llamacpp import LlamaCppConfig, LlamaCppForCausalLM

    started = time.perf_counter()
    options = LlamaCppConfig(n_ctx=args.n_ctx, n_threads=args.threads)
    model = LlamaCppForCausalLM.from_pretrained(args.file, quantization_config=options)
    load = time.perf_counter() - started
    ids = torch.arange(100, 100 + args.prompt)[None]
    started = time.perf_counter()
    model.generate(ids, max_new_tokens=args.tokens, eos_token_id=None, do_sample=False)
    seconds = time.perf_counter() - started
    print(json.dumps({"load_seconds": load, "seconds": seconds, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
