"""A headless Chromium that a test drives through a pair of pipes: no driver, no port, no network but the page's own."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--disable-extensions", "--no-default-browser-check", "--window-size=1400,1000", "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """One page of a browser of its own; messages of the DevTools protocol are JSON, a NUL after each."""

    def __init__(self, address, profile):
        from_us, to_browser = os.pipe()
        from_browser, to_us = os.pipe()

        def take_places():  # the browser reads its orders from 3 and answers on 4
            reading, writing = os.dup(from_us), os.dup(to_us)
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self._browser = subprocess.Popen(
            [CHROMIUM, *QUIET, f"--user-data-dir={profile}"],
            preexec_fn=take_places,
            close_fds=False,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._orders, self._answers = os.fdopen(to_browser, "wb", 0), os.fdopen(from_browser, "rb")
        self._number, self._session = 0, None
        target = self.ask("Target.createTarget", url=address)["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def ask(self, method, **parameters):
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        self._orders.write(json.dumps(asked).encode() + b"\0")
        while True:
            answer = json.loads(self._next())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def text(self):
        """The whole document, as it is now."""
        found = self.ask("Runtime.evaluate", expression="document.documentElement.outerHTML")
        return found["result"].get("value", "")

    def wait_for(self, there, timeout_s):
        """The document, once `there` says yes to it."""
        ends = time.monotonic() + timeout_s
        while not there(text := self.text()):
            assert time.monotonic() < ends, f"the page never showed it: {text[-3000:]}"
            time.sleep(0.5)
        return text

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._browser.pid, 9)
        self._browser.wait()
        self._orders.close()
        self._answers.close()

    def _next(self):
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser is gone"
            message += byte
        return message
