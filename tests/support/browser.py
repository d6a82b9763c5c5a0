"""A real browser without a window: Debian's chromium, told what to do over two pipes (DevTools protocol)."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = "chromium"
TIMEOUT_S = 120.0


class NoBrowserError(Exception):
    """There is no browser here, and none can be installed."""


def install() -> str:
    """The path of chromium, from Debian's package if need be.

    Raises:
        NoBrowserError: this is no Debian, we are not root, or the package cannot be installed.
    """
    with open(Path(tempfile.gettempdir()) / f"batchinfer-apt-{os.getuid()}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes wait here, also those that install Slurm
        found = shutil.which(PACKAGE)
        if found is not None:
            return found
        if os.getuid() != 0 or not Path("/etc/debian_version").exists() or shutil.which("apt-get") is None:
            raise NoBrowserError("chromium is missing, and only root on Debian can install it")
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", PACKAGE]
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for update_first in (False, True):
            if update_first:
                subprocess.run(["apt-get", "update", "-q"], check=False, capture_output=True, timeout=300)
            done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=600)
            found = shutil.which(PACKAGE)
            if done.returncode == 0 and found is not None:
                return found
        raise NoBrowserError(f"apt-get cannot install chromium: {done.stderr.strip().splitlines()[-1:]}")


class Browser:
    """One browser with one tab; a context manager."""

    def __init__(self) -> None:
        program = install()
        self._profile = tempfile.TemporaryDirectory(prefix="batchinfer-chromium-", ignore_cleanup_errors=True)
        self._number = 0
        self._unread = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        here_in, there_out = os.pipe()
        there_in, here_out = os.pipe()
        self._in, self._out = here_in, here_out
        # the browser reads commands from descriptor 3 and answers on 4
        script = f'exec 3<&{there_in} 4>&{there_out}; exec "$@"'
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        options += ["--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *options, "about:blank"],
            pass_fds=(there_in, there_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there_in)
        os.close(there_out)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Open a page and wait until all of it is there; `events` has what happened since."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=url)
        self._read_until(lambda message: message.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def requested(self) -> list[str]:
        """Addresses that the page asked for."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        """Return the console's messages and errors of scripts."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._read_until(lambda found: found.get("id") == self._number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _read_until(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            while b"\0" in self._unread:
                raw, _, self._unread = self._unread.partition(b"\0")
                message = json.loads(raw)
                if "method" in message:
                    self.events.append(message)
                if is_it(message):
                    return message
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
