"""A page that is served to this machine only and saves what its reader decides.

What rows and models wrote is untrusted: it travels as JSON and is put on the page as text, never as markup; the content
security policy allows the page's own script and nothing else. The address carries a token, requests under another host
name are refused (a web page elsewhere cannot reach in by name), and nothing is loaded from a network.
"""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from finetune.errors import UserError

POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class LocalPage(ThreadingHTTPServer):
    """Serves one template on 127.0.0.1; `url` holds the token. Port 0 takes any free port.

    The page fetches /state and posts what is decided to `saves_at`.
    """

    daemon_threads = True
    template: str
    saves_at: str
    longest_body_bytes = 65_536

    def __init__(self, *, port: int = 0) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used: {error.strerror}", fix="choose another with --port"
            ) from None
        self.token = secrets.token_urlsafe(24)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.host}/?token={self.token}"

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What the page shows, as JSON, with hidden characters spelled out."""

    @abstractmethod
    def save(self, given: Any) -> None:
        """Keep one decision of the page. Raises UserError, ValueError, KeyError or TypeError when it is none."""


def template_text(name: str) -> str:
    """A template of the report package, as it is."""
    return resources.files("finetune.report").joinpath(f"templates/{name}").read_text(encoding="utf-8")


class _Handler(BaseHTTPRequestHandler):
    server: LocalPage
    server_version = "finetune-review"
    sys_version = ""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not self._allowed():
            return
        if path == "/":
            self._page()
        elif path == "/state":
            self._answer(200, json.dumps(self.server.state()).encode(), "application/json")
        else:
            self._answer(404, b"not found", "text/plain")

    def do_POST(self) -> None:
        if not self._allowed():
            return
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            length = -1
        if (
            urlsplit(self.path).path != self.server.saves_at
            or not 0 <= length <= self.server.longest_body_bytes
        ):
            self._answer(400, b"not understood", "text/plain")
            return
        try:
            self.server.save(json.loads(self.rfile.read(length)))
        except (ValueError, KeyError, TypeError):
            self._answer(400, b"not understood", "text/plain")
        except UserError as error:
            self._answer(400, str(error).encode(), "text/plain")
        else:
            self._answer(200, b"{}", "application/json")

    def _allowed(self) -> bool:
        token = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
        if self.headers.get("Host") == self.server.host and secrets.compare_digest(
            token.encode(), self.server.token.encode()
        ):
            return True
        self._answer(403, b"open the address that the command printed", "text/plain")
        return False

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        page = template_text(self.server.template).replace("{nonce}", nonce)
        self._answer(200, page.encode(), "text/html; charset=utf-8", POLICY.format(nonce=nonce))

    def _answer(self, status: int, body: bytes, kind: str, policy: str = "default-src 'none'") -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", policy),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the terminal shows the progress, not requests."""
