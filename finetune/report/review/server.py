"""The page of a review, served to this machine only.

Model text is untrusted: it travels as JSON and is put on the page as text, never as markup; the content security policy
allows the page's own script and nothing else. The address carries a token, requests under another host name are refused
(a web page elsewhere cannot reach in by name), and nothing is loaded from a network.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from finetune.errors import UserError
from finetune.report.review.sample import ReviewItem
from finetune.report.review.verdicts import VerdictFile
from finetune.report.untrusted import visible

_LONGEST_BODY = 65_536
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


class ReviewServer(ThreadingHTTPServer):
    """Serves one review on 127.0.0.1; `url` holds the token. Port 0 takes any free port."""

    daemon_threads = True

    def __init__(self, items: Sequence[ReviewItem], verdicts: VerdictFile, *, port: int = 0) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used: {error.strerror}", fix="choose another with --port"
            ) from None
        self.items, self.verdicts = list(items), verdicts
        self.token = secrets.token_urlsafe(24)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.host}/?token={self.token}"

    def state(self) -> dict[str, Any]:
        """What the page shows: the items with left and right answer, and the decisions so far. Arms are not named."""
        saved = self.verdicts.read()
        return {
            "items": [
                {
                    "suite": visible(item.suite),
                    "item": visible(item.item),
                    "question": visible(item.question),
                    "reference": visible(item.reference),
                    "left": visible(item.answers[item.sides[0]]),
                    "right": visible(item.answers[item.sides[1]]),
                    "decided": _decision(item, saved.get((item.suite, item.item))),
                }
                for item in self.items
            ]
        }


def _decision(item: ReviewItem, saved: dict[str, Any] | None) -> dict[str, str] | None:
    """A saved decision as keys of this draw; None when there is none or the sides stood otherwise then."""
    if saved is None or saved["sides"] != list(item.sides):
        return None
    return {"key": saved["key"], "note": saved["note"]}


class _Handler(BaseHTTPRequestHandler):
    server: ReviewServer
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
        if urlsplit(self.path).path != "/verdict" or not 0 <= length <= _LONGEST_BODY:
            self._answer(400, b"not understood", "text/plain")
            return
        try:
            given = json.loads(self.rfile.read(length))
            number = given["number"]
            if type(number) is not int or not 0 <= number < len(self.server.items):
                raise ValueError
            self.server.verdicts.add(self.server.items[number], str(given["key"]), str(given.get("note", "")))
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
        page = (
            resources.files("finetune.report").joinpath("templates/review.html").read_text(encoding="utf-8")
        )
        self._answer(
            200,
            page.replace("{nonce}", nonce).encode(),
            "text/html; charset=utf-8",
            _POLICY.format(nonce=nonce),
        )

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
