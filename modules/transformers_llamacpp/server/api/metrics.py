"""Numbers for Prometheus. None of them says what anybody wrote."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from .job import Done

__all__ = ["Metrics"]

PREFIX = "transformers_llamacpp_"


class Metrics:
    """In a registry of its own: a process may have several servers."""

    def __init__(self, host: Any, gate: Any) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(PREFIX + "requests", "Requests answered.", ["route", "status"], registry=registry)
        self.seconds = Histogram(
            PREFIX + "request_seconds", "From the request to the end of the answer.", ["route"], registry=registry,
            buckets=(0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300),
        )  # fmt: skip
        self.first_token = Histogram(
            PREFIX + "first_token_seconds", "From the request to its first text, waiting included.", registry=registry,
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60),
        )  # fmt: skip
        self.cancelled = Counter(PREFIX + "cancelled", "Requests whose client went away.", registry=registry)
        self._tokens = Counter(
            PREFIX + "tokens", "Tokens: of prompts (reused or evaluated), written, drafted, accepted.", ["kind"],
            registry=registry,
        )  # fmt: skip
        for kind in ("prompt_reused", "prompt_evaluated", "written", "drafted", "accepted"):
            self._tokens.labels(kind)
        self._decodes = Counter(PREFIX + "decodes", "Decodes that took part in answers.", registry=registry)
        for name, text, value in (
            ("running", "Texts being written now.", lambda: gate.running),
            ("waiting", "Texts that wait for their turn.", lambda: gate.waiting),
            ("model_loaded", "1 while a model is loaded.", lambda: int(host.model is not None)),
        ):
            Gauge(PREFIX + name, text, registry=registry).set_function(value)

    def count(self, done: Done) -> None:
        self._tokens.labels("written").inc(done.written)
        stats = done.stats
        if stats is None:
            return
        self._tokens.labels("prompt_reused").inc(stats.reused_tokens)
        self._tokens.labels("prompt_evaluated").inc(max(0, stats.prompt_tokens - stats.reused_tokens))
        self._tokens.labels("drafted").inc(stats.drafted_tokens)
        self._tokens.labels("accepted").inc(stats.accepted_tokens)
        self._decodes.inc(stats.decode_calls)

    def text(self) -> bytes:
        return generate_latest(self._registry)
