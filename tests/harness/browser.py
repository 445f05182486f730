"""Chromium without a window, spoken to over a pipe (Chrome DevTools Protocol): no driver, no port, no download."""

import json
import os
import select
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.processes import end, start
from harness.waiting import PATIENCE_S

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--remote-debugging-pipe", "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def installed() -> str | None:
    """Return the path of a Chromium of this machine."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class PageError(AssertionError):
    """A script of a test failed in the page, or what it waits for did not come."""


class Tab:
    """One page. `log`: what its scripts threw, and what the browser refused (a violated policy, a failed request)."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser, self._session = browser, session
        self.log: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, self._session, **parameters)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window; `dark`: what its user prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaited. Raises PageError."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if details := answer.get("exceptionDetails"):
            raise PageError(f"{script}: {details.get('exception', {}).get('description', details)}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Wait until a JavaScript expression holds. Raises PageError with what the page shows."""
        until = time.monotonic() + PATIENCE_S
        while not (found := self.run(condition)):
            if time.monotonic() > until:
                text = self.run("document.body.innerText")
                raise PageError(f"never: {condition}\n{self.log}\n{text[:3000]}")
            self._browser.listen(0.05)
        return found

    def press(self, key: str, *, ctrl: bool = False) -> None:
        """Press a key of the keyboard, by its `KeyboardEvent.key`."""
        text = {"text": key} if len(key) == 1 and not ctrl else {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            code = {"Enter": 13, "Escape": 27}.get(key, 0)
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                modifiers=2 if ctrl else 0,
                windowsVirtualKeyCode=code,
                **more,
            )

    def type(self, text: str) -> None:
        """Type into the field that has the focus."""
        self.call("Input.insertText", text=text)

    def heard(self, message: dict[str, Any]) -> None:
        about = message["params"]
        if message["method"] == "Runtime.exceptionThrown":
            self.log.append(json.dumps(about["exceptionDetails"])[:2000])
        elif message["method"] == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.log.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")


class Browser:
    """A process of Chromium."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest, self._last = to_browser, from_browser, b"", 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._tabs: dict[str, Tab] = {}

    def tab(self) -> Tab:
        """Open a page of its own, without the cookies and the storage of the others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        made = self._tabs[session] = Tab(self, session)
        return made

    def call(self, method: str, session: str = "", **parameters: Any) -> Any:
        """Call one command and return its answer. Raises PageError."""
        self._last += 1
        number = self._last
        about = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(about).encode() + b"\0")
        until = time.monotonic() + PATIENCE_S
        while number not in self._answers:
            if time.monotonic() > until:
                raise PageError(f"no answer to {method}")
            self.listen(1.0)
        answer = self._answers.pop(number)
        if error := answer.get("error"):
            raise PageError(f"{method}: {error}")
        return answer["result"]

    def listen(self, seconds: float) -> None:
        """Take what the browser says within this time. Raises PageError where it has ended."""
        if not select.select([self._from], [], [], seconds)[0]:
            return
        if not (read := os.read(self._from, 1 << 20)):
            raise PageError("the browser has ended")
        *messages, self._rest = (self._rest + read).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif tab := self._tabs.get(message.get("sessionId", "")):
                tab.heard(message)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Run Chromium for the length of the block. `profile`: a folder for it alone."""
    command = installed()
    assert command, "there is no Chromium"
    down, up = os.pipe(), os.pipe()
    # Chromium reads commands from descriptor 3 and writes to 4, whatever numbers the pipes have here.
    shell = f'exec 3<&{down[0]} 4>&{up[1]}; exec "$0" "$@"'
    arguments = (*FLAGS, f"--user-data-dir={profile}", "about:blank")
    process = start("bash", "-c", shell, command, *arguments, pass_fds=(down[0], up[1]), stderr=-3)
    os.close(down[0])
    os.close(up[1])
    try:
        yield Browser(down[1], up[0])
    finally:
        end(process)
        os.close(down[1])
        os.close(up[0])
