"""An HTTP proxy on this machine with the faults of a network and of the gateways that stand before servers."""

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
Fault = Callable[["Line", str], bool]  # (line, path) -> whether the connection is cut after the server has answered


class Line:
    """A proxy in threads of its own, as a context; the attributes may be changed at any time.

    delay: seconds added to each request. per_second: most requests a second, others are answered with 429 and
    `Retry-After: retry_after`, as are all before that time; None: no limit. refuse_every: likewise each request whose
    number is a multiple. unavailable: until this time (`time.monotonic`) the answer is 503. without: a part of the
    paths that are always answered with 503; empty: none.
    cut: called after the server has answered; if true, the connection is closed without an answer.
    """

    def __init__(self, server: str, delay: float = 0.0, per_second: float | None = None, retry_after: int = 1) -> None:
        self.server = urlsplit(server)
        self.delay, self.per_second, self.retry_after = delay, per_second, retry_after
        self.refuse_every: int | None = None
        self.unavailable = 0.0
        self.without = ""
        self.cut: Fault = lambda line, path: False
        self.requests: Counter[str] = Counter()  # those that the server received, by the end of their path
        self.refused: Counter[int] = Counter()  # by status
        self.too_early = 0  # requests within `retry_after` seconds after a 429, in which none was expected
        self._recent: list[float] = []
        self._not_before = 0.0
        self._number = 0
        self._lock = threading.Lock()
        self._httpd = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self.uri = f"http://127.0.0.1:{self._httpd.server_port}"

    def __enter__(self) -> "Line":
        threading.Thread(target=self._httpd.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._httpd.shutdown()
        self._httpd.server_close()

    def refusal(self, path: str) -> int | None:
        """The status with which the next request, of this path, is refused; None: it is forwarded."""
        now = time.monotonic()
        with self._lock:
            self._recent = [at for at in self._recent if now - at < 1.0]
            self._number += 1
            is_turn = self.refuse_every is not None and self._number % self.refuse_every == 0
            if now < self.unavailable or (self.without and self.without in path):
                status = 503
            elif now < self._not_before:
                self.too_early += 1
                status = 429
            elif is_turn or (self.per_second is not None and len(self._recent) >= self.per_second):
                self._not_before = now + self.retry_after
                status = 429
            else:
                self._recent.append(now)
                return None
            self.refused[status] += 1
            return status

    def count(self, path: str) -> None:
        """Counts a request that is forwarded."""
        with self._lock:
            self.requests[urlsplit(path).path.removeprefix("/api/2.0/mlflow/").removeprefix("/api/")] += 1


def _handler_of(line: Line) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(line.delay)
            if status := line.refusal(self.path):
                return self._send(status, [("Retry-After", str(line.retry_after))], b"please wait")
            line.count(self.path)
            server = http.client.HTTPConnection(line.server.hostname or "", line.server.port, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            try:
                server.request(self.command, self.path, body, headers)
                answer = server.getresponse()
                content = answer.read()
            except OSError:
                return self._send(502, [], b"no server")
            finally:
                server.close()
            if line.cut(line, self.path):
                self.close_connection = True
                return None
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP]
            return self._send(answer.status, kept, content)

        def _send(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            with suppress(ConnectionError):  # the client has gone, as after its timeout
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _answer

        def log_message(self, format: str, *args: object) -> None:
            """No log."""

    return Handler
