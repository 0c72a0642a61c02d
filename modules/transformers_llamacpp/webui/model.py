"""The model as the webui calls it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..config import LlamaCppConfig
from ..errors import GenerationCancelled, InvalidInputError, LlamaCppError
from ..files import resolve_gguf
from ..modeling import LlamaCppForCausalLM
from ..request import GenerateStats
from .arguments import plan_call
from .call import Feed, NobodyListens, WebuiCall, current_call, split_criteria, take_call
from .settings import Settings

__all__ = ["WebuiModel"]

logger = logging.getLogger(__name__)


class WebuiModel(LlamaCppForCausalLM):
    """`generate()` with the webui's arguments, the panel's settings and the webui's way of streaming.

    Made by `open()`. Beside what every model has: `last_prompt_token_count`, which the webui's API reports.
    """

    settings: Settings
    last_prompt_token_count: int = 0
    _find_draft: Callable[[str], tuple[Path, dict[str, Any]]]
    _drafts: dict[str, LlamaCppForCausalLM]
    _draft_lock: threading.Lock

    @classmethod
    def open(
        cls,
        path: Path,
        options: dict[str, Any],
        settings: Settings,
        find_draft: Callable[[str], tuple[Path, dict[str, Any]]],
    ) -> WebuiModel:
        """Load `path`. `find_draft(name)` gives a draft model's file and options. Raises `LlamaCppError`."""
        model: Any = cls._load(resolve_gguf(path), LlamaCppConfig(**options))
        model.settings = settings
        model._find_draft = find_draft
        model._drafts = {}
        model._draft_lock = threading.Lock()
        return model

    def unload(self) -> None:
        """Free all native memory, also while a generation runs: that one ends with a `ClosedError`."""
        self.close()
        with self._draft_lock:
            drafts, assistant = dict(self._drafts), self.assistant_model
            self._drafts.clear()
            self.assistant_model = None
        for draft in [*drafts.values(), assistant]:
            if draft is not None:
                draft.close()

    def use_draft(self, name: str, draft_max: int | None = None) -> None:
        """The assistant hook: `name` drafts from now on. Raises `LlamaCppError`; the hook is as before then."""
        draft = self.draft(name)
        if draft_max:
            draft.generation_config.num_assistant_tokens = draft_max
        self.assistant_model = draft

    def draft(self, name: str) -> Any:
        """The draft model called `name`, loaded when it is asked for the first time. Raises `LlamaCppError`."""
        with self._draft_lock:
            if name not in self._drafts:
                path, options = self._find_draft(name)
                for other in [key for key in self._drafts if self._drafts[key] is not self.assistant_model]:
                    del self._drafts[other]  # one at a time, beside that of the load; freed when no answer uses it any more
                self._drafts[name] = LlamaCppForCausalLM.from_pretrained(path, quantization_config=LlamaCppConfig(**options))
            return self._drafts[name]

    # -- the webui's calls ---------------------------------------------------------------------------------------

    def generate(self, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See `LlamaCppForCausalLM.generate`. The arguments are the webui's; what the panel sets is added
        (`arguments.py`), a stopping criterion that streams becomes a streamer, and all end tokens of the model count."""
        call = take_call(kwargs)
        token = current_call.set(call)
        call.began = True
        try:
            if call.stopped() and isinstance(inputs, torch.Tensor):
                return inputs
            return self._generate(call, inputs, generation_config, args, kwargs)
        except LlamaCppError as error:
            call.error = error
            if not call.is_told or not isinstance(inputs, torch.Tensor):
                raise
            return inputs  # who made the call tells the error; the webui would fill its log with where it came from
        except BaseException as error:
            call.error = error
            raise
        finally:
            current_call.reset(token)
            call.end()

    def _generate(self, call: WebuiCall, inputs: Any, generation_config: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if args or generation_config is not None:  # not the webui
            return super().generate(inputs, generation_config, *args, **kwargs)
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        plan = plan_call(kwargs, self.settings.call())
        arguments = plan.arguments
        length = self.last_prompt_token_count = ids.shape[-1] if isinstance(ids, torch.Tensor) else 0
        if isinstance(ids, torch.Tensor) and not length:
            raise InvalidInputError("the prompt is empty: there is nothing to go on from")
        call.ways = plan.ways
        if not plan.use_assistant:
            arguments["assistant_model"] = False
        elif plan.draft_model:
            draft = self.draft(plan.draft_model)
            arguments |= {"assistant_model": draft, "tokenizer": self.tokenizer, "assistant_tokenizer": draft.tokenizer}
        if plan.negative_prompt:
            arguments["negative_prompt_ids"] = self._negative_ids(plan.negative_prompt)
        hidden = self._all_ends(arguments)
        callbacks, criteria = split_criteria(arguments.get("stopping_criteria"))
        criteria.append(NobodyListens(call))
        arguments["stopping_criteria"] = criteria
        arguments["prompt_progress"] = self._watch(criteria, ids)
        feed = Feed(callbacks, hidden)
        if callbacks and plan.streams:
            arguments["streamer"] = call.feed = feed
        try:
            output = super().generate(inputs, **arguments)
        except GenerationCancelled:
            return ids
        if callbacks and not plan.streams:
            feed.show(_without_ends(output[0], length, arguments["eos_token_id"] or []))
        return output

    def _negative_ids(self, text: str) -> torch.Tensor:
        """As the webui makes them of a negative prompt of its own: always with BOS, where there is one."""
        ids = self.tokenizer(text, return_tensors="pt").input_ids
        bos = self.tokenizer.bos_token_id
        if bos is None or (ids.shape[1] and int(ids[0, 0]) == bos):
            return ids
        return torch.cat([torch.tensor([[bos]]), ids], dim=1)

    def _all_ends(self, arguments: dict[str, Any]) -> frozenset[int]:
        """A GGUF may have several end tokens, and the webui passes one. Returns those it does not know; where it bans its
        own, it means all."""
        known = arguments.get("eos_token_id") or []
        known = [known] if isinstance(known, int) else list(known)
        every = self.generation_config.eos_token_id or []
        arguments["eos_token_id"] = list(dict.fromkeys([*known, *every])) or None
        banned = arguments.get("suppress_tokens") or []
        if known and set(known) <= set(banned):
            arguments["suppress_tokens"] = list(dict.fromkeys([*banned, *every]))
        return frozenset(every) - frozenset(known)

    def _watch(self, criteria: Any, ids: Any) -> Callable[[int, int], bool]:
        """For `prompt_progress`: the call's stopping criteria, which look at no text, are asked during a long prompt, too."""

        def going_on(_evaluated: int, _total: int) -> bool:
            return not any(bool(torch.as_tensor(one(ids, None)).any()) for one in criteria)

        return going_on

    def _called(self, stats: GenerateStats) -> None:
        call = current_call.get()
        super()._called(stats if call is None else call.finish(stats))

    def get_prompt_logits(self, input_ids: Any) -> torch.Tensor:
        """float32 `(1, length, vocab_size)` for `input_ids` `(1, length)`, for `echo` with `logprobs`."""
        ids = torch.as_tensor(input_ids, dtype=torch.int64)
        return self(input_ids=ids, use_cache=False).logits


def _without_ends(text: torch.Tensor, start: int, ends: list[int]) -> torch.Tensor:
    length = text.shape[0]
    while length > start and int(text[length - 1]) in ends:
        length -= 1
    return text[:length]
