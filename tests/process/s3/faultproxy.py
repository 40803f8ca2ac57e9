"""An HTTP/1.1 proxy on loopback that breaks requests by a plan.

A plan is a function of what is asked, so a test that fails can be repeated. Signatures stay valid, because the Host header is
passed on as the client sent it.
"""

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan decides by."""

    number: int
    """From 0, in order of arrival."""
    method: str
    target: str
    """Path and query."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The service does not see the request; the client gets this status."""

    status: int = 503
    code: str = "SlowDown"


@dataclass(frozen=True, slots=True)
class Stall:
    """The service does not see the request; the client gets nothing for a while, then a closed connection."""

    seconds: float


@dataclass(frozen=True, slots=True)
class DropRequest:
    """The connection is reset when this many bytes of the request's body (or all) have come; the service does not see it."""

    after_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DropAnswer:
    """The service carries the request out; the connection is reset after this many bytes of its answer's body."""

    after_bytes: int = -1
    """-1 cuts before the status line."""


Fault = Answer | Stall | DropRequest | DropAnswer
Plan = Callable[[Request], Fault | None]


def by_number(faults: Mapping[int, Fault]) -> Plan:
    """Breaks the requests with these numbers."""
    return lambda request: faults.get(request.number)


def first_of(method: str, faults: list[Fault], *, containing: str = "") -> Plan:
    """Breaks the first requests of a method whose target contains a text, one fault each."""
    left = list(faults)
    return lambda request: left.pop(0) if left and request.method == method and containing in request.target else None


def seeded(seed: int, *, share: float, faults: tuple[Fault, ...]) -> Plan:
    """Breaks about this share of all requests; which, and how, follows from the seed and the request's number."""

    def plan(request: Request) -> Fault | None:
        dice = random.Random(seed * 1_000_003 + request.number)
        return dice.choice(faults) if dice.random() < share else None

    return plan


@dataclass(slots=True)
class FaultProxy:
    """A running proxy. `plan` may be exchanged at any time; `seen` and `broken` tell what has happened."""

    port: int
    plan: Plan
    seen: list[Request] = field(default_factory=list)
    broken: list[tuple[Request, Fault]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def decide(self, method: str, target: str) -> Fault | None:
        with self._lock:
            request = Request(len(self.seen), method, target)
            self.seen.append(request)
            fault = self.plan(request)
            if fault is not None:
                self.broken.append((request, fault))
            return fault

    def follow(self, plan: Plan) -> None:
        """Forgets what was and goes on by another plan."""
        with self._lock:
            self.plan = plan
            self.seen.clear()
            self.broken.clear()


@contextlib.contextmanager
def running_proxy(upstream_port: int, plan: Plan = lambda _: None) -> Iterator[FaultProxy]:
    """Listens on a free port of loopback, in threads of this process, and passes on to `upstream_port` of loopback."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0), backlog=64)) as listener:
        proxy = FaultProxy(listener.getsockname()[1], plan)
        open_sockets: set[socket.socket] = set()

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                open_sockets.add(client)
                threading.Thread(target=serve, args=(client,), daemon=True).start()

        def serve(client: socket.socket) -> None:
            with contextlib.suppress(OSError, EOFError), client:
                _Connection(client, upstream_port, proxy).serve()
            open_sockets.discard(client)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for client in list(open_sockets):
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class _Head:
    lines: list[bytes]
    headers: dict[bytes, bytes]

    def encode(self, *, without: bytes = b"") -> bytes:
        kept = [line for line in self.lines if not (without and line.lower().startswith(without + b":"))]
        return b"\r\n".join(kept) + b"\r\n\r\n"


class _Connection:
    """One client's connection and the one behind it."""

    def __init__(self, client: socket.socket, upstream_port: int, proxy: FaultProxy) -> None:
        self._client = client
        self._upstream_port = upstream_port
        self._proxy = proxy

    def serve(self) -> None:
        with (
            self._client.makefile("rb") as from_client,
            socket.create_connection(("127.0.0.1", self._upstream_port)) as upstream,
            upstream.makefile("rb") as from_upstream,
        ):
            while True:
                head = _read_head(from_client)
                method, target, _ = head.lines[0].decode("latin-1").split(" ", 2)
                fault = self._proxy.decide(method, target)
                if head.headers.get(b"expect", b"").lower() == b"100-continue":
                    self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                if isinstance(fault, DropRequest):
                    from_client.read(min(fault.after_bytes, int(head.headers.get(b"content-length", b"0"))))
                    return self._reset()
                if isinstance(fault, Stall):
                    return time.sleep(fault.seconds)
                if isinstance(fault, Answer):
                    for _ in _body(from_client, head.headers):
                        pass
                    self._client.sendall(_answer(fault, with_body=method != "HEAD"))
                    continue
                upstream.sendall(head.encode(without=b"expect"))
                for piece in _body(from_client, head.headers):
                    upstream.sendall(piece)
                if not self._pass_answer(from_upstream, method, fault):
                    return self._reset()

    def _pass_answer(self, from_upstream: BinaryIO, method: str, fault: DropAnswer | None) -> bool:
        """Whether the connection may go on."""
        head = _read_head(from_upstream)
        if fault is not None and fault.after_bytes < 0:
            return False
        self._client.sendall(head.encode())
        status = int(head.lines[0].split(b" ")[1])
        bodiless = method == "HEAD" or status in (204, 304)
        passed = 0
        for piece in () if bodiless else _body(from_upstream, head.headers):
            if fault is not None and passed + len(piece) > fault.after_bytes:
                self._client.sendall(piece[: fault.after_bytes - passed])
                return False
            self._client.sendall(piece)
            passed += len(piece)
        return fault is None

    def _reset(self) -> None:
        # With a linger time of zero, close sends RST and not FIN.
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _read_head(stream: BinaryIO) -> _Head:
    lines = []
    while (line := stream.readline().rstrip(b"\r\n")) or not lines:
        if not line:
            raise EOFError
        lines.append(line)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
    return _Head(lines, headers)


def _body(stream: BinaryIO, headers: dict[bytes, bytes]) -> Iterator[bytes]:
    """The raw body in pieces, still in its transfer encoding."""
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        while True:
            size_line = stream.readline()
            size = int(size_line.split(b";")[0], 16)
            yield size_line
            if size == 0:
                while (line := stream.readline()) not in (b"\r\n", b""):
                    yield line
                yield b"\r\n"
                return
            yield stream.read(size + 2)
    left = int(headers.get(b"content-length", b"0"))
    while left > 0:
        piece = stream.read(min(left, 1 << 16))
        if not piece:
            raise EOFError
        left -= len(piece)
        yield piece


def _answer(fault: Answer, *, with_body: bool) -> bytes:
    body = f"<Error><Code>{fault.code}</Code><Message>Injected.</Message></Error>".encode() if with_body else b""
    head = f"HTTP/1.1 {fault.status} Injected\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
