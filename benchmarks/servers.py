"""Who takes part in `serve.py`, each in a process of its own: the same streams to all of them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from clients import Clients, Stall, Streams, stall
from contenders import Clock, Remote
from transformers_llamacpp.bench.process import Process

MODULES = Path(__file__).resolve().parent.parent / "modules"

NEEDED = 'pip install "llama-cpp-python[server]"'


@dataclass(frozen=True)
class Setup:
    file: Path
    n_ctx: int
    n_cells: int
    streams: int
    """Most at once."""
    threads: int


@dataclass(frozen=True)
class Prompt:
    text: str
    ids: list[int]


class Bare:
    """The low-level decode of `n` sequences, which all begin together."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._begin()

    def _begin(self) -> None:
        setup = self.setup
        self.process = Process("bare", setup.file, setup.n_ctx, setup.n_cells, setup.streams, setup.threads)

    def refresh(self) -> None:
        """Load the model again, as a server does: weights that have just been read are slower for a while."""
        self.close()
        self._begin()
        self.process.run("greedy", [[5, 6, 7]], 2)

    def run(self, prompts: Sequence[Prompt], tokens: int) -> Streams:
        run = self.process.run("greedy", [prompt.ids for prompt in prompts], tokens)
        return Streams(run.seconds, run.new_tokens, [[run.first_seconds, run.seconds] for _ in prompts])

    def batch_seconds(self, prompt: Prompt, n_batch: int) -> float:
        """One batch of a long prompt, on the average."""
        return self.process.run("greedy", [prompt.ids], 2).first_seconds / (len(prompt.ids) / n_batch)

    def close(self) -> None:
        self.process.close()


class Threads:
    """`generate()` in as many threads as there are streams. `mode`: "threads", "streamed" (with a streamer), or "locked" (with
    a streamer, and a lock around the call). Lives in the other process."""

    def __init__(self, file: str, n_ctx: int, n_cells: int, threads: int) -> None:
        from transformers_llamacpp import LlamaCppConfig, LlamaCppForCausalLM

        config = LlamaCppConfig(n_ctx=n_ctx, n_cells=n_cells, n_threads=threads, n_threads_batch=threads)
        self.model: Any = LlamaCppForCausalLM.from_pretrained(file, quantization_config=config)
        self.run("threads", [[5, 6, 7]], 2)

    def turn(self, command: str, *args: Any) -> Any:
        return getattr(self, command)(*args)

    def run(self, mode: str, prompts: Sequence[Sequence[int]], tokens: int) -> Streams:
        lock: Any = threading.Lock() if mode == "locked" else nullcontext()
        began, calls = time.perf_counter(), [_Call(self.model, ids, tokens, mode != "threads", lock) for ids in prompts]
        ends = [call.join() - began for call in calls]
        times = [[at - began for at in call.clock.times[1:]] for call in calls] if mode != "threads" else []
        return Streams(max(ends), len(calls) * tokens, times)

    def stall(self, prompts: Sequence[Sequence[int]], long: Sequence[int], tokens: int, after: int) -> Stall:
        calls = [_Call(self.model, ids, tokens, True, nullcontext()) for ids in prompts]
        while any(len(call.clock.times) <= after for call in calls):
            time.sleep(0.001)
        came = time.perf_counter()
        late = _Call(self.model, long, 2, True, nullcontext())
        for call in [late, *calls]:
            call.join()
        return stall([call.clock.times[1:] for call in calls], came, late.clock.times[1], 0)

    def serve(self, prompts: Sequence[tuple[Sequence[int], int]], at_once: int) -> None:
        waiting, lock = iter(prompts), threading.Lock()

        def one() -> None:
            while True:
                with lock:
                    found = next(waiting, None)
                if found is None:
                    return
                _Call(self.model, found[0], found[1], True, nullcontext()).join()

        several = [threading.Thread(target=one) for _ in range(at_once)]
        for thread in several:
            thread.start()
        for thread in several:
            thread.join()

    def forget(self) -> None:
        self.model.forget()


class _Call(threading.Thread):
    """One `generate()`, which runs at once. Greedy, and past end tokens."""

    def __init__(self, model: Any, ids: Sequence[int], tokens: int, streamed: bool, lock: Any) -> None:
        super().__init__()
        self.model, self.ids, self.tokens, self.lock, self.clock = model, ids, tokens, lock, Clock()
        self.arguments = {"streamer": self.clock} if streamed else {}
        self.problem: BaseException | None = None
        self.end = 0.0
        self.start()

    def run(self) -> None:
        import torch

        try:
            ids = torch.tensor([list(self.ids)])
            with self.lock:
                output = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.tokens, do_sample=False, eos_token_id=None,
                    **self.arguments,
                )  # fmt: skip
            self.end = time.perf_counter()
            assert output.shape[1] == ids.shape[1] + self.tokens
        except BaseException as problem:
            self.problem = problem

    def join(self, timeout: float | None = None) -> float:  # type: ignore[override]
        """When it had its last token."""
        super().join(timeout)
        if self.problem is not None:
            raise self.problem
        return self.end


class Ours:
    """`Threads` from here."""

    def __init__(self, setup: Setup) -> None:
        self.remote = Remote(Threads, str(setup.file), setup.n_ctx, setup.n_cells, setup.threads)
        if self.remote.problem is not None:
            raise RuntimeError(self.remote.problem)

    def run(self, mode: str, prompts: Sequence[Prompt], tokens: int) -> Streams:
        return self._ask("run", mode, [prompt.ids for prompt in prompts], tokens)

    def stall(self, prompts: Sequence[Prompt], long: Prompt, tokens: int, after: int) -> Stall:
        return self._ask("stall", [prompt.ids for prompt in prompts], long.ids, tokens, after)

    def serve(self, prompts: Sequence[tuple[Prompt, int]], at_once: int) -> None:
        self._ask("serve", [(prompt.ids, tokens) for prompt, tokens in prompts], at_once)

    def refresh(self) -> None:
        self._ask("forget")

    def _ask(self, *request: Any) -> Any:
        answer = self.remote.ask(request)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        settle(self.remote.process.pid or 0)
        return answer

    def close(self) -> None:
        self.remote.process.kill()
        self.remote.process.join()


class Http:
    """A server in a process of its own, and its clients in this one."""

    def __init__(self, command: list[str], ready: str, port: int | None, extra: dict[str, Any], exact: bool) -> None:
        """`ready`: the line that it writes when it answers, whose first group is the port where `port` is `None`."""
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, text=True)
        try:
            found = self._wait_for(ready)
            self.clients = Clients(port or int(found[1]), extra, exact)
        except BaseException:
            self.close()
            raise

    def _wait_for(self, ready: str) -> re.Match[str]:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            self.log.seek(0)
            text = self.log.read()
            if found := re.search(ready, text):
                return found
            if self.process.poll() is not None:
                raise RuntimeError(f"{' '.join(self.process.args)} ended: {text.strip()[-500:]}")  # type: ignore[arg-type]
            time.sleep(0.05)
        raise RuntimeError(f"{' '.join(self.process.args)} does not answer")  # type: ignore[arg-type]

    def run(self, prompts: Sequence[Prompt], tokens: int) -> Streams:
        return self._settled(self.clients.run([prompt.text for prompt in prompts], tokens))

    def stall(self, prompts: Sequence[Prompt], long: Prompt, tokens: int, after: int) -> Stall:
        return self._settled(self.clients.stall([prompt.text for prompt in prompts], long.text, tokens, after))

    def serve(self, prompts: Sequence[tuple[Prompt, int]], at_once: int) -> None:
        self._settled(self.clients.serve([(prompt.text, tokens) for prompt, tokens in prompts], at_once))

    def refresh(self) -> None:
        """Nothing to forget."""

    def _settled(self, done: Any) -> Any:
        settle(self.process.pid)
        return done

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


class OurServer(Http):
    def __init__(self, setup: Setup, never: int) -> None:
        """`never`: a token that no text has, which stands in for the end tokens."""
        command = [
            sys.executable, "-c", f"import sys; sys.path.insert(0, {str(MODULES)!r}); "
            "from transformers_llamacpp.cli import main; sys.exit(main())",
            "serve", "--model", str(setup.file), "--no-page", "--port", "0", "--parallel", str(setup.streams + 1),
            "--n-ctx", str(setup.n_ctx), "--n-cells", str(setup.n_cells), "--n-threads", str(setup.threads),
            "--n-threads-batch", str(setup.threads),
        ]  # fmt: skip
        extra = {"stream_options": {"include_usage": True}, "eos_token_id": [never]}
        super().__init__(command, r"Ready: .*:(\d+)/v1", None, extra, exact=True)
        self.name = setup.file.name

    def refresh(self) -> None:
        self.clients.post("/v1/internal/model/load", {"model_name": self.name})
        self.clients.run(["Hello"], 2)
        settle(self.process.pid)


class LlamaServer(Http):
    """`llama_cpp.server`, told not to cut a stream when another request comes."""

    def __init__(self, setup: Setup, python: str, ends: Sequence[int]) -> None:
        asked = subprocess.run([python, "-c", "import llama_cpp.server.app"], capture_output=True, text=True)
        if asked.returncode:
            why = asked.stderr.strip().rsplit("\n", 1)[-1]
            raise RuntimeError(f"{why}; it needs {NEEDED} in the environment of --llama-server-python")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            python, "-m", "llama_cpp.server", "--model", str(setup.file), "--host", "127.0.0.1", "--port", str(port),
            "--n_ctx", str(setup.n_ctx), "--n_threads", str(setup.threads), "--n_threads_batch", str(setup.threads),
            "--interrupt_requests", "False", "--verbose", "False",
        ]  # fmt: skip
        extra = {"logit_bias": {str(end): -100 for end in ends}}
        super().__init__(command, r"Uvicorn running on", port, extra, exact=False)


def settle(pid: int, patience: float = 5.0) -> None:
    """Wait until a process has rested for a while, so that it does not disturb who comes next: threads of OpenMP go on
    spinning, and copies that are made ahead begin a moment after the last call."""
    process, until, rested = psutil.Process(pid), time.monotonic() + patience, 0
    while rested < 6 and time.monotonic() < until:
        before = sum(process.cpu_times()[:2])
        time.sleep(0.05)
        rested = rested + 1 if sum(process.cpu_times()[:2]) - before < 0.02 else 0


def sources(setup: Setup, never: int, ends: Sequence[int], python: str) -> dict[str, Callable[[], Any]]:
    """How each process is made, by name."""
    return {
        "bare": lambda: Bare(setup),
        "ours": lambda: Ours(setup),
        "http": lambda: OurServer(setup, never),
        "llama-server": lambda: LlamaServer(setup, python, ends),
    }

