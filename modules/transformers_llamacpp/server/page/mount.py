"""Puts the page on an application, at `/`."""

from __future__ import annotations

import os
from pathlib import Path

# Read when Gradio is imported: nothing is reported anywhere, and no conversation is kept in the browser's storage.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("GRADIO_RUN_HISTORY", "False")

import gradio as gr
from fastapi import FastAPI

from ..host import ModelHost
from .blocks import FOLDER, Page
from .hub import Hub
from .presets import Presets

__all__ = ["add_page"]

THEME = gr.themes.Base(
    primary_hue=gr.themes.colors.teal,
    neutral_hue=gr.themes.colors.slate,
    radius_size=gr.themes.sizes.radius_lg,
    # Fonts of the system: nothing is fetched from anywhere.
    font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
    font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
).set(
    body_background_fill="#f5f6f8",
    body_background_fill_dark="#0e1318",
    block_background_fill="#ffffff",
    block_background_fill_dark="#161c23",
    block_border_width="0px",
    block_shadow="none",
    input_background_fill="#f5f6f8",
    input_background_fill_dark="#0e1318",
    input_border_width="1px",
    button_primary_background_fill="#0f766e",
    button_primary_background_fill_dark="#14b8a6",
    button_primary_background_fill_hover="#115e59",
    button_primary_background_fill_hover_dark="#2dd4bf",
    button_primary_text_color="#ffffff",
    button_primary_text_color_dark="#06231f",
)


def add_page(app: FastAPI, host: ModelHost, data_dir: Path | None = None, hub: Hub | None = None) -> FastAPI:
    """Routes that `app` has already go before the page's. `data_dir`: where presets are kept, by default a folder of the
    user's (`presets.data_folder`)."""
    page = Page(host, Presets(data_dir and data_dir / "presets"), hub)
    app.state.page = page
    page.blocks.queue(default_concurrency_limit=None, api_open=False)
    return gr.mount_gradio_app(
        app,
        page.blocks,
        path="/",
        server_name="127.0.0.1",
        footer_links=[],
        show_error=True,
        ssr_mode=False,
        theme=THEME,
        # Not as `css=`: Gradio confines that to the inside of its container, and the page's height is set outside it.
        head=f"<style>{(FOLDER / 'page.css').read_text(encoding='utf-8')}</style>",
        js=(FOLDER / "page.js").read_text(encoding="utf-8"),
    )
