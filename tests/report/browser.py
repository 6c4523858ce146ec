"""A headless Chromium spoken to over a pipe (DevTools protocol), for looking at the page as a reader does."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    """Path of a Chromium on this machine, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """One tab. Every console message and exception since it was opened is in `messages`, every request in `requests`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._held, self._n = to_browser, from_browser, b"", 0
        self._session: str | None = None
        self.messages: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            piece = os.read(self._from, 1 << 16)
            if not piece:
                raise RuntimeError("the browser went away")
            self._held += piece
        line, _, self._held = self._held.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(f"{params['type']}: {json.dumps(params['args'])}")
        elif method == "Log.entryAdded":
            self.messages.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._n += 1
        message: dict[str, Any] = {"id": self._n, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._n:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.go(path.resolve().as_uri())

    def go(self, url: str) -> None:
        """Load an address and wait until it is loaded: what is asked next is asked of the new page."""
        loader = self.send("Page.navigate", url=url).get("loaderId")
        assert loader is not None, url
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, top: int = 0, height: int = 0) -> None:
        """The page from `top` over `height` pixels; the whole page by default."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": top, "width": size["width"], "height": height or size["height"], "scale": 1}
        answer = self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def browser(chromium: str) -> Iterator[Page]:
    """Start a browser with an empty profile and yield one tab; the browser ends with the block."""
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:

        def place_pipes() -> None:
            ends = os.dup(command_read), os.dup(answer_write)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        process = subprocess.Popen(
            [chromium, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=place_pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        try:
            yield Page(command_write, answer_read)
        finally:
            process.terminate()
            process.wait(timeout=30)
            os.close(command_write)
            os.close(answer_read)
