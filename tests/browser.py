"""A headless Chromium, driven by the DevTools protocol over a pipe, for tests of pages."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars")
SECONDS = 60.0  # that a page may take to draw
UNREADABLE = """(() => {
    const found = []
    for (const plot of document.querySelectorAll('.plot')) {
        const frame = plot.getBoundingClientRect(), title = plot.closest('figure').querySelector('h4').textContent
        const texts = [...plot.querySelectorAll('svg.main-svg text')]
            .map(one => [one.textContent, one.getBoundingClientRect()]).filter(([_, box]) => box.width && box.height)
        texts.forEach(([text, a], place) => {
            if (a.left < frame.left - 1 || a.right > frame.right + 1
                || a.top < frame.top - 1 || a.bottom > frame.bottom + 1)
                found.push(`${title}: ${text}: cut off`)
            for (const [other, b] of texts.slice(place + 1))
                if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
                    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
                    found.push(`${title}: ${text} and ${other} overlap`)
        })
    }
    return found
})()"""  # texts of the figures that are cut off, or overlap


class Browser:
    """One page of a new Chromium. A context manager."""

    def __init__(self, profile: Path) -> None:
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        command = [CHROMIUM, *OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]

        def pipes():  # the protocol reads from descriptor 3 and writes to 4
            first, second = os.dup(to_child), os.dup(from_child)
            os.dup2(first, 3)
            os.dup2(second, 4)
            os.set_inheritable(3, True)  # where they have these numbers already, nothing else does so
            os.set_inheritable(4, True)

        self._process = subprocess.Popen(
            command,
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._buffer, self._count, self._session, self.events = b"", 0, None, []
        target = next(one for one in self.send("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)

    def send(self, method: str, **params):
        """The answer to a command; events that come before it are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _receive(self):
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            assert part, "Chromium has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def run(self, script: str):
        """The value of an expression; of a promise, what it resolves to."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, path: Path, width: int = 1280, height: int = 900, draw: bool = True) -> None:
        """Loads a file. draw: waits until all its figures are drawn, rather than those in view."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.events.clear()
        self.send("Page.navigate", url=path.absolute().as_uri())
        self.wait("document.readyState === 'complete' && typeof Plotly === 'object'")
        if not draw:
            self.wait("document.querySelector('svg.main-svg')")
            return
        self.run("dispatchEvent(new Event('beforeprint'))")
        self.wait("[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('svg.main-svg'))")

    def visit(self, url: str) -> None:
        """Loads a page that draws itself, and waits until it has begun to."""
        self.send("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.body.innerText.length > 0")

    def click(self, text: str) -> None:
        """Clicks with the mouse on the link or button of this text, which must not be covered."""
        find = f"[...document.querySelectorAll('a, button')].find(one => one.innerText.trim() === {json.dumps(text)})"
        self.wait(f"!!{find}")
        place = f"""(() => {{
            const one = {find}
            one.scrollIntoView()
            const box = one.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2
            return [x, y, one.contains(document.elementFromPoint(x, y))]
        }})()"""
        self.wait(f"{place}[2]")
        x, y, _ = self.run(place)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def wait(self, condition: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + SECONDS
        while not self.run(condition):
            assert time.monotonic() < end, f"not within {SECONDS} s: {condition}"
            time.sleep(0.05)

    def unreadable(self) -> list[str]:
        """The texts in the figures of a report that are cut off, or overlap another one."""
        return self.run(UNREADABLE)

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and violations of the policy."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str([one.get("value") for one in params["args"]]))
        return found

    def requests(self) -> list[str]:
        """Addresses that were asked for, without those inside the page."""
        sent = [one["params"]["request"]["url"] for one in self.events if one["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith(("data:", "blob:"))]

    def pdf(self, path: Path) -> None:
        """Writes the page as it is printed on A4."""
        printed = self.send("Page.printToPDF", preferCSSPageSize=True, paperWidth=8.27, paperHeight=11.69)
        path.write_bytes(base64.b64decode(printed["data"]))
