"""The likeliest next tokens of a prompt."""

from __future__ import annotations

import torch
from transformers import StoppingCriteriaList

from ...errors import GenerationCancelled
from ..host import ModelHost
from .errors import ApiError
from .job import Done, Job
from .plan import Plan
from .work import Part

__all__ = ["Logits"]


class Logits(Part):
    """A part of a job: one step of `generate()`. `found`: token, as the vocabulary spells it, to probability."""

    def __init__(self, host: ModelHost, job: Job, plan: Plan, top: int, sampled: bool) -> None:
        super().__init__(host, job, plan, 0, range(1))
        self._top, self._sampled = top, sampled
        self.found: dict[str, float] = {}

    def run(self) -> None:
        seen: list[torch.Tensor] = []
        ids = torch.tensor([self.prompt.ids])
        with self.host.use(self.job.stop, self.job.change) as model:
            options = self.plan.options if self._sampled else {"do_sample": False}
            try:
                output = model.generate(
                    ids, attention_mask=torch.ones_like(ids), **{**options, "max_new_tokens": 1},
                    logits_processor=self._processors(model, ids.shape[1]) if self._sampled else None,
                    stopping_criteria=StoppingCriteriaList(), observe_logits=lambda _, logits: seen.append(logits.clone()),
                    prompt_progress=lambda evaluated, total: not self.job.stop.is_set(),
                    return_dict_in_generate=True, output_scores=self._sampled, assistant_model=False,
                )  # fmt: skip
            except GenerationCancelled:
                self.job.check_model()
                raise ApiError(503, "the request was stopped", code="stopped") from None
            scores = output.scores[0][0] if self._sampled else seen[0][0]
            values, tokens = torch.topk(torch.softmax(scores.float(), dim=-1), min(self._top, len(scores)))
            names = model.tokenizer.convert_ids_to_tokens(tokens.tolist())
        pairs = zip(names, values.tolist(), strict=True)
        self.found = {name: value for name, value in pairs if value > 0 or not self._sampled}
        self.job.post(Done(0, ids.shape[1], output.stats, 0))
