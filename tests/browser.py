"""Chromium without a window, which tests tell what to open and ask what it shows."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

OFF = ["gpu", "quic", "background-networking", "component-update", "sync"]
FLAGS = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{one}" for one in OFF)]
SIZE = "--window-size=1600,1200"
SCREENSHOTS = "TOKENDROP_SCREENSHOTS"
"""The variable of a folder where pictures of pages are kept; without it they are in the test's own folder."""


def find_chromium() -> str:
    """The browser's command; the test is skipped where there is none."""
    if (found := shutil.which("chromium")) is None:
        pytest.skip("no chromium here")
    return found


class NavigatedError(Exception):
    """The page went to another one while it was asked."""


class Page:
    """A page of a browser, driven by the Chrome DevTools protocol."""

    def __init__(self, process: subprocess.Popen[bytes], commands: int, answers: int, pictures: Path) -> None:
        self.complaints: list[str] = []
        """Errors that the console has shown."""
        self._process, self._commands, self._answers, self._pictures = process, commands, answers, pictures
        self._buffer, self._number, self._session = b"", 0, {}
        target = self.tell("Target.createTarget", url="about:blank")
        attached = self.tell("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.tell(f"{domain}.enable")

    def open(self, address: str) -> None:
        """Go to another page; `wait` for what it shows."""
        self.tell("Page.navigate", url="about:blank")  # also where the two differ in their fragment alone
        self.tell("Page.navigate", url=address)

    def ask(self, expression: str) -> Any:
        """What a JavaScript expression is in the page."""
        answer = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def _ask_anywhere(self, expression: str) -> Any:
        """As `ask`; None where the page goes to another one meanwhile."""
        try:
            return self.ask(expression)
        except NavigatedError:
            return None

    @property
    def text(self) -> str:
        """All that the page shows in words."""
        return self.ask("document.body ? document.body.innerText : ''")

    def wait(self, expression: str, timeout_s: float = 120.0) -> Any:
        """What a JavaScript expression is as soon as it holds."""
        deadline = time.monotonic() + timeout_s
        while not (value := self._ask_anywhere(expression)):
            if time.monotonic() > deadline:
                self.picture("not-within-time")
                raise TimeoutError(f"{expression} does not hold after {timeout_s} s in:\n{self.text}")
            time.sleep(0.1)
        return value

    def wait_for(self, *words: str, timeout_s: float = 120.0) -> None:
        """Until the page shows all these words."""
        for word in words:
            self.wait(f"document.body !== null && document.body.innerText.includes({json.dumps(word)})", timeout_s)

    def click(self, selector: str, words: str = "") -> None:
        """Click the first element of a CSS selector that shows these words, as soon as there is one."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        found += f".find(one => one.innerText.includes({json.dumps(words)}))" if words else "[0]"
        self.wait(f"{found} !== undefined")
        self.ask(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.ask(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({found}.getBoundingClientRect())"
        )
        where = dict(zip("xy", box, strict=True))
        self.tell("Input.dispatchMouseEvent", type="mouseMoved", **where)
        for kind in ("mousePressed", "mouseReleased"):
            self.tell("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    def type(self, selector: str, text: str) -> None:
        """Write into the field of a CSS selector, and press Enter."""
        self.wait(f"document.querySelector({json.dumps(selector)}) !== null")
        self.ask(f"document.querySelector({json.dumps(selector)}).focus()")
        self.tell("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.tell("Input.dispatchKeyEvent", type=kind, key="Enter", windowsVirtualKeyCode=13, text="\r")

    def picture(self, name: str) -> None:
        """Keep what the page looks like, as a PNG."""
        picture = self.tell("Page.captureScreenshot")["data"]
        (self._pictures / f"{name}.png").write_bytes(base64.b64decode(picture))

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command of the protocol, and wait for its answer."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (message := self._read()).get("id") != self._number:
            self._note(message)
        if "navigated" in (error := message.get("error", {}).get("message", "")):
            raise NavigatedError(error)
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._answers], [], [], 60)[0], "chromium says nothing for 60 s"
            more = os.read(self._answers, 1 << 16)
            assert more, f"chromium has ended: {self._process.poll()}"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif message.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif message.get("method") == "Runtime.consoleAPICalled" and told["type"] == "error":
            self.complaints.append(" ".join(str(one.get("value", one.get("description"))) for one in told["args"]))


@contextmanager
def browser(chromium: str, folder: Path) -> Iterator[Page]:
    """A page of a browser of its own, which keeps its profile in `folder`, while the block runs."""
    pictures = Path(os.environ.get(SCREENSHOTS) or folder)
    pictures.mkdir(parents=True, exist_ok=True)
    (its_commands, commands), (answers, its_answers) = os.pipe(), os.pipe()
    through = f'exec "$@" 3<&{its_commands} 4>&{its_answers}'  # the numbers that the protocol wants
    command = [chromium, *FLAGS, SIZE, "--remote-debugging-pipe", f"--user-data-dir={folder}/profile"]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", through, "chromium", *command], pass_fds=(its_commands, its_answers), stderr=log
        )
    os.close(its_commands)
    os.close(its_answers)
    try:
        yield Page(process, commands, answers, pictures)
    finally:
        os.close(commands)  # it ends with its pipe
        os.close(answers)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
