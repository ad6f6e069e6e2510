"""Headless Chromium, controlled over its debugging pipe: what a page logs, requests, and looks like."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LAUNCHER = """
import os, sys
source, sink = (os.dup(int(number)) for number in sys.argv[1:3])
for found, number in ((source, 3), (sink, 4)):
    os.dup2(found, number)
    os.set_inheritable(number, True)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Puts the pipe where the browser expects it: it reads from 3 and writes to 4."""
TIMEOUT = 120.0
"""Seconds to wait for one answer, enough for a busy machine."""


class Page:
    """A page of a headless browser.

    Args:
        read: the file descriptor for messages from the browser.
        write: the file descriptor for messages to it.
    """

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._buffer, self._count = read, write, b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method and wait for its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            added = os.read(self._read, 1 << 16)
            assert added, "the browser has exited"
            self._buffer += added
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, path: Path, *, width: int = 1280, scheme: str = "light", media: str = "") -> None:
        """Load a file in a window of the given width and color scheme, for screen or print."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", media=media, features=[feature])
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()

    def evaluate(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def errors(self) -> list[str]:
        """Everything that the page wrote to the console."""
        self.evaluate("1")  # earlier log messages arrive before this result
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """All addresses that the page requested."""
        self.evaluate("1")
        found = [event["params"]["request"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [request["url"] for request in found]

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Page]:
    """A separate browser without network access, closed at the end of the context.

    Args:
        profile: the directory for its files.
    """
    to_browser, our_output = os.pipe()
    our_input, from_browser = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    assert CHROMIUM is not None
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(to_browser), str(from_browser), CHROMIUM, *options, "about:blank"],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(our_input, our_output)
    finally:
        os.close(our_output)  # this makes the browser exit
        os.close(our_input)
        try:
            process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
