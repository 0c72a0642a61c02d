"""A hub on this machine: what `huggingface_hub` asks for to list a repository and to fetch a file of it, and no more."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0" * 40
PIECE = 1 << 16


@contextmanager
def running(repos: dict[str, dict[str, bytes]], pause: float = 0.0) -> Iterator[str]:
    """The address of a hub that has `repos`: name -> file -> its bytes. `pause`: seconds after each 64 KiB."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = self.path.split("?")[0]
            if path.startswith("/api/models/"):
                repo = "/".join(path.removeprefix("/api/models/").split("/")[:2])
                files = repos.get(repo)
                if files is None:
                    self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
                    return
                siblings = [{"rfilename": name, "size": len(data), "blobId": "0"} for name, data in files.items()]
                self._send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode(), {}, body)
                return
            repo, _, name = path.strip("/").partition("/resolve/")
            data = repos.get(repo, {}).get(name.partition("/")[2])
            if data is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
                return
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            self._send(206 if start else 200, data[start:], headers, body)

        def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for at in range(0, len(data) if body else 0, PIECE):
                    self.wfile.write(data[at : at + PIECE])
                    time.sleep(pause)
            except OSError:  # the client has had enough
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
