"""One process, one port: the FastAPI application with the page at `/`, and the uvicorn server that runs it."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable

# Read when Gradio is imported: nothing is reported anywhere, and no conversation is kept in the browser's storage.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("GRADIO_RUN_HISTORY", "False")

import gradio as gr
import uvicorn
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from ..errors import OptionError
from .host import ModelHost
from .page import FOLDER, Page

__all__ = ["Server", "create_app", "open_socket", "serve"]

LOOPBACK_NAMES = ["localhost", "127.0.0.1", "[::1]"]
PORTS_TO_TRY = 20

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


def create_app(host: ModelHost) -> FastAPI:
    """The application around `host`. Only requests for a loopback name are answered, which stops DNS rebinding."""
    app = FastAPI(title="transformers_llamacpp", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK_NAMES)
    page = Page(host)
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


def open_socket(address: str, port: int | None, default: int = 7860) -> socket.socket:
    """A listening socket on `port`, or on the first free one from `default` on when it is `None`.

    Raises `OptionError` for an address other machines can reach: there is no access control yet.
    """
    family, bind_to = _loopback(address)
    tries = [port] if port is not None else list(range(default, default + PORTS_TO_TRY))
    for candidate in tries:
        sock = socket.socket(family, socket.SOCK_STREAM)
        if os.name != "nt":  # on Windows this option would let two servers share the port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((bind_to, candidate))
            sock.listen(128)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise OptionError(f"port {tries[0]} is not free ({failure.strerror}); choose another one with --port", "port")


def _loopback(address: str) -> tuple[socket.AddressFamily, str]:
    try:
        parsed = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
    except ValueError:
        parsed = None
    if parsed is None or not parsed.is_loopback:
        raise OptionError(
            f"--host {address}: only 127.0.0.1, ::1 and localhost, because the page has no access control yet. "
            "Reach it from another machine through a tunnel: ssh -L 7860:127.0.0.1:7860 USER@THIS-MACHINE",
            "host",
        )
    return (socket.AF_INET6 if parsed.version == 6 else socket.AF_INET), str(parsed)


class Server(uvicorn.Server):
    """`run(sockets=[sock])` serves the page until `should_exit`; `announce` gets the address once it answers."""

    def __init__(self, host: ModelHost, announce: Callable[[str], None]) -> None:
        super().__init__(
            uvicorn.Config(create_app(host), log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        )
        self.announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or []:
            name, port = sock.getsockname()[:2]
            self.announce(f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}")


def serve(host: ModelHost, sock: socket.socket, announce: Callable[[str], None]) -> None:
    """Runs until interrupted, then frees the model."""
    try:
        Server(host, announce).run(sockets=[sock])
    finally:
        host.unload()
