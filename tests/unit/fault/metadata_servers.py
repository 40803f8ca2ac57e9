"""Metadata servers on loopback that insist on what the real ones insist on, and can be told to misbehave."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from elastictrain.fault.clouds import AWS_TOKEN, AWS_TOKEN_HEADER, AWS_TOKEN_LIFE_HEADER


@dataclass
class FakeCloud:
    """What a server is told to say, and what it was asked."""

    items: dict[str, bytes] = field(default_factory=dict)
    """By path, with the question mark and what follows."""

    misbehave: str = ""
    """`error` (503), `garbage`, `silent`, `drip` or `cut`."""

    asked: list[tuple[str, str]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    """Those that are good; AWS only."""

    ended: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def verdict(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
        raise NotImplementedError

    def item(self, path: str) -> tuple[int, Mapping[str, str], bytes]:
        return (200, {}, self.items[path]) if path in self.items else (404, {}, b"<html>404 - Not Found</html>")


@dataclass
class FakeAws(FakeCloud):
    """Version 2 only: nothing without a token, and a token only for a PUT that comes from the instance itself."""

    def verdict(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
        if path == AWS_TOKEN:
            life = headers.get(AWS_TOKEN_LIFE_HEADER, "")
            if method != "PUT":
                return 405, {}, b""
            if "X-Forwarded-For" in headers:
                return 403, {}, b""
            if not life.isdigit() or not 1 <= int(life) <= 21600:
                return 400, {}, b""
            self.tokens.append(f"token-{len(self.asked)}==")
            return 200, {AWS_TOKEN_LIFE_HEADER: life}, self.tokens[-1].encode()
        if method != "GET":
            return 405, {}, b""
        if headers.get(AWS_TOKEN_HEADER) not in self.tokens:
            return 401, {}, b"<html>401 - Unauthorized</html>"
        return self.item(path)


@dataclass
class FakeGcp(FakeCloud):
    """Refuses who does not say that he knows whom he asks."""

    flavor: str = "Google"

    def verdict(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
        flavor = {"Metadata-Flavor": self.flavor} if self.flavor else {}
        if headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in headers:
            return 403, flavor, b"Missing Metadata-Flavor:Google header."
        status, _, body = self.item(path)
        return status, flavor, body


@dataclass
class FakeAzure(FakeCloud):
    """Wants a header, and a version of the interface."""

    def verdict(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
        if headers.get("Metadata", "").lower() != "true" or "X-Forwarded-For" in headers:
            return 400, {}, b'{"error": "Bad request. Required metadata header not specified"}'
        if "api-version=" not in path:
            return 400, {}, b'{"error": "Bad request. api-version was not specified in the request"}'
        return self.item(path)


@contextmanager
def serving(cloud: FakeCloud, *, address: tuple[str, int] = ("127.0.0.1", 0)) -> Iterator[FakeCloud]:
    """The cloud, at its `url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self) -> None:
            cloud.asked.append((self.command, self.path))
            # Who asked may have lost patience.
            with suppress(OSError):
                if not self._misbehave():
                    self._reply(*cloud.verdict(self.command, self.path, dict(self.headers.items())))

        def _reply(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _misbehave(self) -> bool:
            match cloud.misbehave:
                case "error":
                    self._reply(503, {}, b"try later")
                case "garbage":
                    self.wfile.write(b"\x00\xff no HTTP at all\r\n\r\n")
                case "silent":
                    cloud.ended.wait(5.0)
                case "drip":
                    # A body without a length, one byte at a time: no single read ever waits for long.
                    self.wfile.write(b"HTTP/1.0 200 OK\r\nMetadata-Flavor: Google\r\n\r\n")
                    while not cloud.ended.is_set():
                        self.wfile.write(b"T")
                        self.wfile.flush()
                        time.sleep(0.02)
                case "cut":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
                case _:
                    return False
            return True

    server = ThreadingHTTPServer(address, Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    cloud.url = f"http://{address[0]}:{server.server_address[1]}"
    try:
        yield cloud
    finally:
        cloud.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
