"""What a request computes, in threads of its own: `generate()` for each prompt, its tokens handed on as text."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ...compat import cache_of
from ...errors import GenerationCancelled
from ...native.vocab import TokenAttr
from ...request import current_request
from ..host import ModelHost
from .grammar import Constraint
from .job import Done, Job, Written
from .plan import Plan
from .processors import LogitBias, RangePenalty, WrittenPenalty
from .prompts import Prompt
from .scores import Recorder, text_scores
from .writer import Piece, TokenScore, Writer

__all__ = ["Part", "parts_of"]


WHOLE = int(TokenAttr.UNKNOWN | TokenAttr.CONTROL | TokenAttr.USER_DEFINED)
"""Tokens after which a vocabulary puts a space before a word, as at the beginning of a text."""


class Part:
    """The choices `first_index + row` of one prompt that one `generate()` call writes."""

    def __init__(self, host: ModelHost, job: Job, plan: Plan, number: int, rows: range) -> None:
        self.host, self.job, self.plan, self.number, self.rows = host, job, plan, number, rows
        self.prompt: Prompt = plan.prompts[number]
        self.max_tokens = plan.max_tokens[number]
        self.first_index = number * plan.rows

    def run(self) -> None:
        """Posts `Written` and one `Done`, or raises."""
        with self.host.use(self.job.stop, self.job.change) as model:
            writers = [self._writer(model) for _ in self.rows]
            try:
                if self.plan.echo:
                    self._echo(model)
                stats = self._generate(model, writers) if self.max_tokens else None
            except GenerationCancelled:
                stats = None
        self.job.check_model()
        for row, writer in enumerate(writers):
            reason = "stop" if self.job.stopped and self.max_tokens else "length"
            if not writer.reason:
                self._post(row, writer.end(reason), writer.reason)
        self.job.post(Done(self.number, len(self.prompt.ids), stats, sum(writer.n_tokens for writer in writers)))

    # -- before and after ----------------------------------------------------------------------------------------

    def _writer(self, model: Any) -> Writer:
        vocab, tokenizer = model.native.vocab, model.tokenizer
        ends = self.plan.options.get("eos_token_id", model.generation_config.eos_token_id)
        hidden = tokenizer._skipped() if self.plan.skip_special else lambda token: False
        after_special = bool(vocab.attr(self.prompt.ids[-1]) & WHOLE)
        found = frozenset([ends] if isinstance(ends, int) else ends or [])
        drop_space = vocab.adds_space_prefix and after_special
        return Writer(vocab, self.plan.stops, found, hidden, drop_space, self.plan.logprobs is not None)

    def _echo(self, model: Any) -> None:
        """The prompt as the beginning of each choice; its first token follows nothing, and so has no probability."""
        ids, top = self.prompt.ids, self.plan.logprobs
        tokens: tuple[TokenScore, ...] = ()
        if top is not None:
            scores: list[Any] = [(None, []), *text_scores(model, ids, top, self.job.stop)]
            offset, found = 0, []
            for token, (logprob, alternatives) in zip(ids, scores, strict=True):
                data = model.native.vocab.piece(token)
                named = tuple((other, model.native.vocab.piece(other), value) for other, value in alternatives)
                found.append(TokenScore(token, data, offset, logprob, named))
                offset += len(data.decode("utf-8", "replace"))
            tokens = tuple(found)
        for row in range(len(self.rows)):
            self._post(row, Piece(self.prompt.text, tokens), "")

    def _post(self, row: int, piece: Piece, reason: str) -> None:
        if piece.text or piece.tokens or reason:
            self.job.post(Written(self.first_index + self.rows[row], piece, reason))

    # -- the call ------------------------------------------------------------------------------------------------

    def _generate(self, model: Any, writers: list[Writer]) -> Any:
        plan, n_rows, length = self.plan, len(self.rows), len(self.prompt.ids)
        texts = 1 if plan.beams else n_rows
        ids = torch.tensor([self.prompt.ids]).repeat(texts, 1)
        recorder = Recorder(plan.logprobs) if plan.logprobs is not None and not plan.beams else None
        arguments: dict[str, Any] = {
            **plan.options,
            "max_new_tokens": self.max_tokens,
            "logits_processor": self._processors(model, length),
            "stopping_criteria": StoppingCriteriaList([_Stopped(self.job.stop)] if plan.beams else []),
            "prompt_progress": lambda evaluated, total: not self.job.stop.is_set(),
            "return_dict_in_generate": True,
        }
        arguments.pop("max_length", None)
        if recorder is not None:
            arguments["observe_logits"] = recorder.observe
        if plan.options["do_sample"] and plan.seed is not None:
            arguments["seeds"] = plan.seeds(self.rows)
        if plan.beams:
            arguments["num_return_sequences"] = n_rows
            if plan.stops:
                arguments |= {"stop_strings": plan.stops, "tokenizer": model.tokenizer}
        sink = _Sink(self, writers, recorder, length)
        if not plan.beams:
            arguments["streamer"] = sink
        if plan.options.get("token_healing"):
            arguments["tokenizer"] = model.tokenizer
        if plan.options.get("guidance_scale") not in (None, 1) and plan.negative_prompt:
            arguments["negative_prompt_ids"] = torch.tensor([_negative(model, plan.negative_prompt)])
        self._assistant(model, arguments)
        self._watch(model, arguments)
        try:
            output = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        except _Over:
            return sink.request.stats(sum(writer.n_tokens for writer in writers))
        if (cache := cache_of(output)) is not None:
            cache.close()  # nobody goes on with it, and it might be held until Python collects its garbage
        if plan.beams and not self.job.stop.is_set():
            self._write_beams(model, writers, output.sequences[:, length:].tolist())
        return output.stats

    def _watch(self, model: Any, arguments: dict[str, Any]) -> None:
        """For who wants to see more of the call than its text: `arguments` are those of `generate()`, and may be changed."""

    def _assistant(self, model: Any, arguments: dict[str, Any]) -> None:
        named = self.plan.assistant
        if named is False:
            arguments["assistant_model"] = False
        elif named is not None:
            draft = self.host.draft(str(named))
            arguments |= {"assistant_model": draft, "tokenizer": model.tokenizer, "assistant_tokenizer": draft.tokenizer}

    def _processors(self, model: Any, length: int) -> list[Any]:
        plan = self.plan
        found: list[Any] = []
        if plan.range_penalty is not None:
            found.append(RangePenalty(*plan.range_penalty))
        if plan.presence or plan.frequency:
            found.append(WrittenPenalty(plan.presence, plan.frequency, length))
        if plan.bias:
            found.append(LogitBias(plan.bias))
        if plan.grammar is not None:
            found.append(Constraint(plan.grammar, model, length))
        return found

    def _write_beams(self, model: Any, writers: list[Writer], rows: list[list[int]]) -> None:
        top = self.plan.logprobs
        for row, (writer, tokens) in enumerate(zip(writers, rows, strict=True)):
            scores: Any = [(None, [])] * len(tokens)
            if top is not None:
                length = len(self.prompt.ids)
                scores = text_scores(model, [*self.prompt.ids, *tokens], top, self.job.stop, first=length)
            for token, (logprob, alternatives) in zip(tokens, scores, strict=True):
                self._post(row, writer.put(token, logprob, alternatives), writer.reason)
                if writer.reason:
                    break


def parts_of(host: ModelHost, job: Job, plan: Plan) -> list[Part]:
    """The calls of a request: one for each prompt, or one for each text where they are drafted."""
    found = []
    for number in range(len(plan.prompts)):
        rows = range(plan.rows)
        blocks = [range(row, row + 1) for row in rows] if plan.one_by_one else [rows]
        found += [Part(host, job, plan, number, block) for block in blocks]
    return found


class _Stopped(StoppingCriteria):
    """Ends beams, which are streamed to nobody."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self._stop.is_set(), dtype=torch.bool)


class _Over(Exception):
    """Ends a `generate()` from its streamer: a stopping criterion of code that it does not know costs more, in every step."""


class _Sink:
    """A streamer for several rows: transformers hands it the prompt, then one token for each row at a time (some loops: several
    tokens of one row). Raises `_Over` when all rows have ended by what `generate()` does not know, or nobody wants them."""

    never_waits = True  # so that whichever request decodes may call it, see `token_by_token`

    def __init__(self, part: Part, writers: list[Writer], recorder: Recorder | None, length: int) -> None:
        self._part, self._writers, self._recorder = part, writers, recorder
        self._stop = part.job.stop
        self._place = length
        self._prompt_seen = False
        self.request: Any = None
        """That of the call, once it runs."""

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen, self.request = True, current_request.get()
            return
        tokens = value.reshape(-1).tolist()
        rows = len(self._writers)
        for begin in range(0, len(tokens), rows):
            for row, token in enumerate(tokens[begin : begin + rows]):
                self._put(row, token)
            if self._recorder is not None:
                self._recorder.forget(self._place)
            self._place += 1
        if self._stop.is_set():
            raise _Over
        if all(writer.reason for writer in self._writers) and any(writer.cut for writer in self._writers):
            raise _Over

    def _put(self, row: int, token: int) -> None:
        writer = self._writers[row]
        if writer.reason:
            return
        scores = self._recorder.take(self._place, row, token) if self._recorder is not None else None
        piece = writer.put(token) if scores is None else writer.put(token, *scores)
        self._part._post(row, piece, writer.reason)

    def end(self) -> None:
        """What is left is written by who made the call, who knows why it ended."""


def _negative(model: Any, text: str) -> list[int]:
    """As the webui makes them of a negative prompt: always with the token that texts begin with, where there is one."""
    ids: list[int] = model.tokenizer.encode(text)
    bos = model.tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]
