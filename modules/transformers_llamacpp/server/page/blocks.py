"""The page as a whole: a header, four tabs, and the parameters beside the two in which something is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr

from ..host import ModelHost
from .chat_tab import ChatTab
from .completion_tab import CompletionTab
from .engine_tab import EngineTab
from .hub import Hub
from .model_tab import ModelTab
from .parameters import QUICK, Parameters
from .presets import Presets
from .sessions import Sessions
from .texts import badge_html

__all__ = ["FOLDER", "Page"]

FOLDER = Path(__file__).parent

SEEN_EVERY = 4.0
"""Seconds after which a page sees that somebody else has changed the model."""

HEADER = (
    '<button id="side-toggle" type="button" aria-expanded="false" aria-controls="side">Parameters</button>'
    '<button id="theme" type="button" title="Light or dark" aria-label="Light or dark">&#9680;</button>'
)


class Page:
    """Builds the Blocks of the page on a `ModelHost`. What belongs to a browser tab is in Gradio's state of its session."""

    def __init__(self, host: ModelHost, presets: Presets | None = None, hub: Hub | None = None) -> None:
        self.host = host
        sessions = Sessions(host)
        with gr.Blocks(title="transformers_llamacpp", analytics_enabled=False, fill_width=True) as self.blocks:
            self.known = gr.State("")
            with gr.Row(elem_id="header"):
                gr.HTML("<h1>transformers<span>_</span>llamacpp</h1>", elem_id="brand")
                self.badge = gr.HTML(badge_html(host), elem_id="badge")
                gr.HTML(HEADER, elem_id="links")
            with gr.Row(elem_id="main", equal_height=False):
                with gr.Tabs(elem_id="tabs", selected="chat" if host.name or host.loading else "model") as self.tabs:
                    with _tab("Chat", "chat"):
                        self.chat = ChatTab(host, sessions)
                    with _tab("Completion", "completion"):
                        self.completion = CompletionTab(host, sessions)
                    with _tab("Model", "model"):
                        self.model = ModelTab(host, hub or Hub())
                    with _tab("Engine", "engine"):
                        self.engine = EngineTab(host)
                with gr.Column(elem_id="side"):
                    gr.HTML('<button id="side-close" type="button" aria-label="Close the parameters">&#10005;</button>')
                    self.parameters = Parameters(host, presets or Presets())
            self.chat.tree()
            self.watch = gr.Timer(SEEN_EVERY)
            self._wire()

    def _wire(self) -> None:
        self.parameters.wire()
        self.chat.wire(self.parameters, self.engine)
        self.completion.wire(self.parameters, self.engine, self.chat, self.tabs)
        self.engine.wire(QUICK)
        changed = [self.known, self.badge, *self.parameters.of_model]
        self.model.wire(self._changed, changed)
        self.tabs.select(self._selected, None, self.engine.timer, **QUICK)
        self.chat.inspect.click(lambda: gr.Tabs(selected="engine"), None, self.tabs, **QUICK)
        self.watch.tick(self._look, [self.known], changed, **QUICK)
        self.blocks.load(self._opened, None, [*changed, *self.model.opening], **QUICK)
        self.blocks.unload(self.chat.stop)

    def _state(self) -> str:
        return f"{self.host.changes} {self.host.name} {self.host.loading}"

    def _changed(self) -> dict[Any, Any]:
        return {self.known: self._state(), self.badge: badge_html(self.host), **self.parameters.model_changed()}

    def _look(self, known: str) -> dict[Any, Any]:
        """Nothing, unless the model is another one than this tab knows."""
        return {self.known: gr.skip()} if known == self._state() else self._changed()

    def _opened(self) -> dict[Any, Any]:
        return {**self._changed(), **self.model.opened()}

    def _selected(self, event: gr.SelectData) -> Any:
        return gr.Timer(active=event.value == "Engine")


@contextmanager
def _tab(label: str, name: str) -> Iterator[None]:
    with gr.Tab(label, id=name, elem_id=f"tab-{name}"):
        yield
