"""What the engine is doing: speed, prompt and tokens of the newest text of this browser tab; the KV cells of everybody."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import gradio as gr

from ..host import ModelHost
from .cells import look
from .pictures import cells_html, prompt_html, speed_svg, tiles_html, tokens_html
from .texts import prompt_of, tiles_of
from .writing import PageJob, Progress

__all__ = ["EngineTab"]

EVERY = 0.5
"""Seconds between two pictures of a text that is being written."""

REFRESH = 1.5
"""Seconds between two looks at the cells while nobody writes here."""


class EngineTab:
    """Built inside its tab; `shown()` makes the outputs `outputs` of a text."""

    def __init__(self, host: ModelHost) -> None:
        self.host = host
        with gr.Row(elem_classes="cards", equal_height=False):
            with gr.Column(elem_classes="card"):
                gr.HTML("<h2>The newest text of this tab</h2>")
                self.tiles = gr.HTML(tiles_html([]), elem_id="tiles")
                self.speed = gr.HTML(speed_svg([]), elem_id="speed")
                gr.HTML("<h3>Its prompt</h3>")
                self.prompt = gr.HTML(prompt_html(0, 0, ""), elem_id="prompt-bar")
            with gr.Column(elem_classes="card"):
                gr.HTML("<h2>KV cells of everybody's texts</h2>")
                self.cells = gr.HTML(cells_html(None), elem_id="cells")
        with gr.Column(elem_classes="card"):
            gr.HTML("<h2>Its tokens</h2>")
            self.tokens = gr.HTML(tokens_html([]), elem_id="tokens")
        with gr.Accordion("The same as a request to the API", open=False, elem_classes="card"):
            self.request = gr.Code(language="json", show_label=False, label="Request", elem_id="api-request", interactive=False)
        self.timer = gr.Timer(REFRESH, active=False)
        self.outputs = [self.tiles, self.speed, self.prompt, self.cells, self.tokens, self.request]

    def wire(self, quick: Mapping[str, Any]) -> None:
        self.timer.tick(self._cells, None, self.cells, **quick)

    def begun(self, route: str, fields: Mapping[str, Any]) -> dict[Any, Any]:
        """A text begins: what it is the answer to, as a client of the API would send it."""
        text = json.dumps(dict(fields), indent=2, ensure_ascii=False)
        return {self.request: f"POST {route}\n{text}", self.tokens: tokens_html([]), self.speed: speed_svg([])}

    def shown(self, progress: Progress, job: PageJob, last: list[float]) -> dict[Any, Any]:
        """`last`: when something was shown, which this function remembers there."""
        now = time.monotonic()
        if not progress.finish and last and now - last[0] < EVERY:
            return {}
        last[:] = [now]
        trace = job.trace
        found = {
            self.tiles: tiles_html(tiles_of(progress)),
            self.speed: speed_svg(list(trace.times) if trace else []),
            self.cells: cells_html(job.cells) if job.cells and not progress.finish else self._cells(),
        }
        if progress.finish:
            found |= {self.prompt: prompt_html(*prompt_of(progress)), self.tokens: tokens_html(trace.tokens if trace else [])}
        return found

    def _cells(self) -> Any:
        """What is in memory now; nothing new while the engine is busy."""
        model = self.host.model
        if model is None:
            return cells_html(None)
        found = look(model.engine)
        return gr.skip() if found is None else cells_html(found)
