"""One process, one port: the FastAPI application with the API under `/v1` and the page at `/`, and the uvicorn server that
runs it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from ipaddress import ip_address

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from ..errors import OptionError
from .api.mount import add_api
from .guard import Guard
from .host import ModelHost
from .limits import ServeOptions

__all__ = ["Server", "create_app", "is_loopback", "open_socket", "serve"]

LOOPBACK_NAMES = ["localhost", "127.0.0.1", "[::1]"]
PORTS_TO_TRY = 20


def create_app(host: ModelHost, options: ServeOptions | None = None) -> FastAPI:
    """The application around `host`. Unless `options.remote`, only requests for a loopback name are answered, which stops DNS
    rebinding."""
    options = options or ServeOptions()
    app = FastAPI(
        title="transformers_llamacpp", docs_url=None, redoc_url=None, openapi_url=None, lifespan=_lifespan,
        summary="GGUF models with the generate() toolbox of transformers, by the names of OpenAI and text-generation-webui.",
    )  # fmt: skip
    add_api(app, host, options)
    if options.page:
        from .page.mount import add_page  # Gradio takes a second to import, and an API needs none

        app = add_page(app, host, options.data_dir)
    app.add_middleware(Guard, options=options)
    if not options.remote:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK_NAMES)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=options.cors_origins, allow_methods=["*"], allow_headers=["*"], max_age=600
        )
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.api.shut_down()


def open_socket(address: str, port: int | None, default: int = 7860, *, has_key: bool = False) -> socket.socket:
    """A listening socket on `port`, or on the first free one from `default` on when it is `None`.

    Raises `OptionError` for an address that other machines can reach, unless `has_key`.
    """
    family, bind_to = _resolve(address)
    if not has_key and not is_loopback(address):
        raise OptionError(
            f"--host {address}: whoever reaches that address could use the server: give it a key with --api-key, or stay on "
            "127.0.0.1 and reach it through a tunnel: ssh -L 7860:127.0.0.1:7860 USER@THIS-MACHINE",
            "host",
        )
    tries = [port] if port is not None else list(range(default, default + PORTS_TO_TRY))
    for candidate in tries:
        sock = socket.socket(family, socket.SOCK_STREAM)
        if os.name != "nt":  # on Windows this option would let two servers share the port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((bind_to, candidate))
            sock.listen(128)
            return sock
        except (OSError, OverflowError) as error:
            sock.close()
            failure = getattr(error, "strerror", None) or error
    raise OptionError(f"port {tries[0]} is not free ({failure}); choose another one with --port", "port")


def is_loopback(address: str) -> bool:
    """Only this machine can reach it."""
    try:
        return ip_address("127.0.0.1" if address == "localhost" else address).is_loopback
    except ValueError:
        return False


def _resolve(address: str) -> tuple[socket.AddressFamily, str]:
    try:
        parsed = ip_address("127.0.0.1" if address == "localhost" else address)
        return (socket.AF_INET6 if parsed.version == 6 else socket.AF_INET), str(parsed)
    except ValueError:
        raise OptionError(
            f"--host {address}: an address of this machine is needed, such as 127.0.0.1, or 0.0.0.0 for all of them", "host"
        ) from None


class Server(uvicorn.Server):
    """`run(sockets=[sock])` serves until `should_exit`; `announce` gets the address once it answers."""

    def __init__(
        self, host: ModelHost, announce: Callable[[str], None], options: ServeOptions | None = None
    ) -> None:
        app = create_app(host, options)
        self.api = app.state.api
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
        self.announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or []:
            name, port = sock.getsockname()[:2]
            self.announce(f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}")


    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.api.end_all()  # otherwise streams are cut off in the middle, after a while
        await super().shutdown(sockets)


def serve(
    host: ModelHost, sock: socket.socket, announce: Callable[[str], None], options: ServeOptions | None = None
) -> None:
    """Runs until interrupted, then frees the model."""
    try:
        Server(host, announce, options).run(sockets=[sock])
    finally:
        host.unload()
