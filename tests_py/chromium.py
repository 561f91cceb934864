"""Headless Chromium over the DevTools protocol on two pipes: no driver and no package is needed."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """A context manager: one page of a browser of its own, with its profile in `folder`."""

    def __init__(self, program: str, folder: Path):
        self._command = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "about:blank",
        ]
        self._number, self._rest = 0, b""
        self.errors: list[str] = []  # what scripts threw, and what the page's own policy refused

    def __enter__(self) -> Page:
        (read_here, write_there), (read_there, write_here) = os.pipe(), os.pipe()
        self._read, self._write = read_here, write_here

        def place() -> None:  # the browser reads file descriptor 3 and writes 4
            first, second = os.dup(read_there), os.dup(write_there)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            self._command, preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read_there)
        os.close(write_there)
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = None
        self._session = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable", {})
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def _send(self, method: str, parameters: dict[str, Any]) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            while b"\0" not in self._rest:
                ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
                part = os.read(self._read, 1 << 16) if ready else b""
                assert part, f"chromium does not answer {method}"
                self._rest += part
            line, _, self._rest = self._rest.partition(b"\0")
            found = json.loads(line)
            if found.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(found["params"]["exceptionDetails"]))
            if found.get("method") == "Log.entryAdded" and found["params"]["entry"]["level"] == "error":
                self.errors.append(found["params"]["entry"]["text"])
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def open(self, url: str) -> None:
        self._send("Page.navigate", {"url": url})
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def value(self, script: str) -> Any:
        found = self._send("Runtime.evaluate", {"expression": script, "returnByValue": True, "userGesture": True})
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < deadline, f"{script} did not come true"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        self._send("Input.insertText", {"text": text})

    def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self._send("Input.dispatchKeyEvent", {"type": "keyDown", "text": "\r", **key})
        self._send("Input.dispatchKeyEvent", {"type": "keyUp", **key})
