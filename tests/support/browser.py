"""Chromium without a window, spoken to over its debugging pipe: opens pages, moves the mouse, types, and collects errors.

Messages are JSON with a zero byte at their end, written to the browser's file descriptor 3 and read from its 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
PATIENCE_S = 180.0


class Browser:
    """A browser process. `profile` is its own folder."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-extensions", f"--user-data-dir={profile}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        shell = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
        command = ["bash", "-c", shell, "chromium", CHROMIUM, *options]
        self._process = subprocess.Popen(
            command, pass_fds=(read_commands, write_answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read_commands)
        os.close(write_answers)
        self._buffer, self._count, self._heard = b"", 0, -1
        self.events: list[dict[str, Any]] = []
        self._closed: list[Tab] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer. Events that arrive meanwhile are kept in `events`."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(PATIENCE_S)
            assert answer is not None, f"no answer to {method}"
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def listen(self, seconds: float) -> None:
        """Read the events that have arrived."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and (message := self._next(left)) is not None:
            self.events.append(message)

    def listen_once(self) -> None:
        """Listen for a moment, unless that was done since the last command."""
        if self._heard != self._count:
            self.listen(0.05)
            self._heard = self._count

    def _next(self, patience_s: float) -> dict[str, Any] | None:
        end = time.monotonic() + patience_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(end - time.monotonic(), 0))
            if not ready:
                return None
            read = os.read(self._answers, 1 << 20)
            assert read, "the browser ended"
            self._buffer += read
        message, self._buffer = self._buffer.split(b"\0", 1)
        event: dict[str, Any] = json.loads(message)
        return event

    def open(self, path: Path, *, width: int = 1400, height: int = 900, dark: bool = False) -> Tab:
        """A page from a file, on a screen of that size and in that theme. A closed tab is used again, which is faster."""
        tab = self._closed.pop() if self._closed else Tab(self)
        tab.load(path, width, height, dark)
        return tab

    def close(self) -> None:
        """End the process and wait for it."""
        try:
            self.call("Browser.close")
        except (AssertionError, OSError):
            self._process.kill()
        self._process.wait(timeout=PATIENCE_S)
        for descriptor in (self._commands, self._answers):
            os.close(descriptor)


class Tab:
    """One page."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def load(self, path: Path, width: int, height: int, dark: bool) -> None:
        """Open a file, on a screen of that size and in that theme."""
        self._size(width, height)
        self.theme(dark=dark)
        self.call("Page.navigate", url=path.resolve().as_uri())
        address = json.dumps(path.resolve().as_uri())
        self.wait_for(f"document.readyState === 'complete' && location.href === {address}")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def emulate(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Change the screen size and the theme without reloading the page, and wait until the charts are redrawn."""
        self._size(width, height)
        self.theme(dark=dark)
        self.wait_for(f"innerWidth === {width} && (document.documentElement.dataset.drawn || '{width}') === '{width}'")

    def _size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def theme(self, *, dark: bool, paper: bool = False) -> None:
        """Light or dark, on a screen or on paper."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature], media="print" if paper else "")

    def evaluate(self, expression: str) -> Any:
        """The value of some JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"never came true: {condition}"
            time.sleep(0.02)

    def point(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        self.point(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int, text: str = "") -> None:
        """One key, down and up."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """The whole page, or what is in view."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self, width_in: float = 8.27, height_in: float = 11.69) -> bytes:
        """Printed, on A4 or a page of that size."""
        answer = self.call("Page.printToPDF", printBackground=False, paperWidth=width_in, paperHeight=height_in)
        return base64.b64decode(answer["data"])

    def complaints(self) -> list[str]:
        """Errors on the console, exceptions, and everything the log calls an error."""
        problems = []
        for event in self._mine():
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                problems.append(str(parameters["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                problems.append(str(parameters["args"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                problems.append(str(parameters["entry"]))
        return problems

    def requests(self) -> list[str]:
        """Every address the page asked for."""
        return [event["params"]["request"]["url"] for event in self._mine() if event["method"] == "Network.requestWillBeSent"]

    def _mine(self) -> list[dict[str, Any]]:
        self._browser.listen_once()
        return [event for event in self._browser.events if event.get("sessionId") == self._session and "method" in event]

    def close(self) -> None:
        """Make the tab available for another page."""
        self._browser.events.clear()
        self._browser._closed.append(self)
