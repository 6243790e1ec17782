"""Headless Chromium over its DevTools pipe: no driver and no package is needed."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time

QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)


def find():
    """The program, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class Chromium:
    """One browser with one tab; ``events`` keeps what it told without being asked."""

    def __init__(self, program, profile, deadline=120):
        self.events = []
        self._last, self._unread = 0, b""
        self._deadline = time.monotonic() + deadline
        browser_reads, self._to = os.pipe()
        self._from, browser_writes = os.pipe()
        # The browser wants its pipe at 3 and 4; the shell moves it there without touching this process.
        wiring = f'exec "$@" 3<&{browser_reads} 4>&{browser_writes}'
        self._process = subprocess.Popen(
            ["bash", "-c", wiring, "bash", program, *QUIET, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(browser_reads, browser_writes),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(browser_reads)
        os.close(browser_writes)
        os.set_blocking(self._from, False)
        self._session = None
        target = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method, **params):
        """Ask, and return the answer."""
        self._last += 1
        question = {"id": self._last, "method": method, "params": params}
        if self._session:
            question["sessionId"] = self._session
        os.write(self._to, json.dumps(question).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _read(self):
        while b"\0" not in self._unread:
            assert time.monotonic() < self._deadline, "Chromium did not answer in time"
            try:
                more = os.read(self._from, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
                continue
            assert more, "Chromium ended"
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def show(self, address, width, scheme, height=900):
        """Load a page at a width, light or dark, and wait until it is there."""
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self("Page.navigate", url=address)
        while self.ask("document.readyState") != "complete" or self.ask("location.href") != address:
            time.sleep(0.02)

    def ask(self, expression):
        """The value of a JavaScript expression."""
        return self("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path):
        """The whole page, as PNG."""
        data = self("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def requests(self):
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def close(self):
        """End the browser and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
