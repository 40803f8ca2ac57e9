"""Whatever comes over the network: that connection ends or is refused, all others are served, and no other file is touched."""

import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.checkpoint.memory.layout import RankLayout
from elastictrain.checkpoint.peers.requests import HANDSHAKE, Put, request_to_json
from elastictrain.errors import TransientStorageError
from elastictrain.net.channel import MOST_JSON_BYTES, Channel, ChannelError, Handshake, Secret, StrangerError
from tests.unit.checkpoint.peers.hosts import LAYOUT, LIMITS, TOKEN, Host, connected, facts_of, fill_slot, host, put_of
from tests.unit.examples import examples

QUICK = replace(LIMITS, handshake_s=0.3, io_s=0.3, idle_s=0.6)
HELLO_BYTES = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host with a replica and a snapshot of its own, beside a file that is none of anybody's business."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "secret").write_bytes(b"secret" * 1000)
    with host(folder / "b", limits=QUICK) as b:
        fill_slot(b.folder, "own-r00005-s0", facts_of(5))
        send(b, 1)
        yield b


@pytest.fixture(autouse=True)
def still_serving(target: Host) -> Iterator[None]:
    before = sorted(path.name for path in target.folder.iterdir())
    yield
    assert target.replicas().get("replica-r00000-s0") == 1
    assert not send(target, 1)
    assert sorted(path.name for path in target.folder.parent.iterdir()) == ["b", "secret"]
    assert [
        path.name for path in target.folder.iterdir() if not path.name.startswith(("own-", "replica-r00000-", "layout-"))
    ] == []
    assert {path for path in before if "layout" not in path} <= {path.name for path in target.folder.iterdir()}


def send(to: Host, step: int) -> bool:
    put, data = put_of(facts_of(0, step))
    with connected(to.peer) as connection:
        return connection.put(put, data, before_frame=lambda count: None)


def ends(connection: socket.socket, *, within_s: float = 2.0) -> bool:
    """Whether the server hangs up, whatever it says before."""
    connection.settimeout(within_s)
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def dial(to: Host) -> socket.socket:
    return socket.create_connection((to.peer.address, to.peer.port), timeout=2.0)


def admitted(to: Host) -> tuple[socket.socket, Channel]:
    connection = dial(to)
    channel = Channel(connection)
    HANDSHAKE.introduce(channel, Secret(TOKEN), limit_s=2.0)
    return connection, channel


def frame(body: bytes, *, kind: bytes = b"J", length: int | None = None, digest: bytes | None = None) -> bytes:
    stated = len(body) if length is None else length
    return struct.pack("<cQ16s", kind, stated, xxhash.xxh3_128_digest(body) if digest is None else digest) + body


STRANGERS = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: b\r\n\r\n" + b"x" * 100,
    "zeros": bytes(4096),
    "magic alone": b"ETPEER01",
    "another version": b"ETPEER99" + bytes(64),
    "no proof": b"ETPEER01" + bytes(64),
    "much": secrets.token_bytes(1 << 20),
}


def test_silent_strangers_keep_nobody_out(tmp_path: Path) -> None:
    """More than are served at once, and more than there is a thread for."""
    put, data = put_of(facts_of())
    with host(tmp_path / "b", limits=replace(LIMITS, handshake_s=60.0)) as b, ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(dial(b))
        before = threading.active_count()
        with connected(b.peer) as connection:
            assert connection.put(put, data, before_frame=lambda count: None)
        assert threading.active_count() <= before + 1


def test_a_token_that_is_replaced_between_proof_and_answer_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host(tmp_path / "b") as b:
        prove = Handshake.prove

        def replaced(handshake: Handshake, secret: Secret, *, greeting: bytes, received: bytes) -> bytes | None:
            found = prove(handshake, secret, greeting=greeting, received=received)
            b.server.set_token(b"of the next incarnation")
            return found

        monkeypatch.setattr(Handshake, "prove", replaced)
        with dial(b) as connection, pytest.raises(ChannelError):
            HANDSHAKE.introduce(Channel(connection), Secret(TOKEN), limit_s=2.0)


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers(target: Host, name: str) -> None:
    with dial(target) as connection:
        try:
            connection.sendall(STRANGERS[name])
        except ConnectionError:
            return
        assert ends(connection)


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=72, max_size=300))
def test_random_strangers(target: Host, data: bytes) -> None:
    with dial(target) as connection:
        connection.sendall(data)
        assert ends(connection)


def test_a_nonce_sent_back_is_no_proof(target: Host) -> None:
    with dial(target) as connection:
        hello = connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
        connection.sendall(hello + hello[8:])
        assert ends(connection)


def test_another_token(target: Host) -> None:
    put, data = put_of(facts_of(step=2))
    refusal = pytest.raises(TransientStorageError, match="token")
    with connected(target.peer, token=b"of the incarnation before") as connection, refusal:
        connection.put(put, data, before_frame=lambda count: None)


def test_a_server_that_does_not_know_the_token_is_found_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        with far:
            far.sendall(b"ETPEER01" + bytes(32) + bytes(32))
            with pytest.raises(StrangerError):
                HANDSHAKE.introduce(Channel(near), Secret(TOKEN), limit_s=1.0)


DEEP = b'{"op":' + b"[" * 100_000
FRAMES = {
    "another kind": frame(b"{}", kind=b"X"),
    "raw bytes where a message must be": frame(b"{}", kind=b"D"),
    "all the bytes in the world": frame(b"", length=2**64 - 1),
    "a little too much": frame(b"{}", length=MOST_JSON_BYTES + 1),
    "cut in the head": frame(b"{}")[:10],
    "cut in the body": frame(b'{"op":"get"}')[:-3],
    "less than announced": frame(b"{}", length=MOST_JSON_BYTES),
    "wrong digest": frame(b"{}", digest=bytes(16)),
    "no JSON": frame(b"\xff\x00{"),
    "nested too deep": frame(DEEP),
    "a list": frame(b"[1]"),
    "a number of many digits": frame(b'{"op":' + b"9" * 10_000 + b"}"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames(target: Host, name: str) -> None:
    connection, channel = admitted(target)
    with connection:
        with suppress(ChannelError):
            channel.send(FRAMES[name], limit_s=2.0)
        assert ends(connection)


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=25, max_size=300))
def test_random_frames(target: Host, data: bytes) -> None:
    connection, channel = admitted(target)
    with connection:
        # The first bytes may have been enough for it to hang up.
        with suppress(ChannelError, OSError):
            channel.send(data, limit_s=2.0)
            connection.shutdown(socket.SHUT_WR)
        assert ends(connection)


def test_one_byte_at_a_time_is_too_slow(target: Host) -> None:
    connection, _ = admitted(target)
    began = time.monotonic()
    with connection:
        for byte in frame(json.dumps({"op": "get", "more": "x" * 200}).encode()):
            try:
                connection.sendall(bytes([byte]))
            except ConnectionError:
                break
            time.sleep(0.02)
        assert ends(connection)
    assert time.monotonic() - began < 2


def test_idle_connections_end(target: Host) -> None:
    connection, _ = admitted(target)
    with connection:
        assert ends(connection)


GET: dict[str, JsonValue] = {
    "op": "get",
    "run": "run0",
    "incarnation": "i00001-aa",
    "step": 1,
    "rank": 5,
    "start": 0,
    "length": 8,
}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"op": "delete"}, "malformed"),
        ({"op": None}, "malformed"),
        ({"start": -1}, "malformed"),
        ({"length": 2**63}, "malformed"),
        ({"length": True}, "malformed"),
        ({"length": 1.5}, "malformed"),
        ({"start": 2**62, "length": 2**62}, "malformed"),
        ({"rank": "../../secret"}, "malformed"),
        ({"rank": [5]}, "malformed"),
        ({"incarnation": None}, "malformed"),
        ({"run": "../secret"}, "missing"),
        ({"run": "another"}, "missing"),
        ({"step": None}, "malformed"),
    ],
)
def test_gets(target: Host, change: dict[str, JsonValue], code: str) -> None:
    connection, channel = admitted(target)
    with connection:
        channel.send_json(GET | change, limit_s=2.0)
        answer = channel.receive_json(limit_s=2.0)
        assert (answer["ok"], answer["code"]) == (False, code)
        # A request that is refused is no reason to hang up.
        channel.send_json(GET, limit_s=2.0)
        assert channel.receive_json(limit_s=2.0) == {"ok": True}
        channel.receive_data(memoryview(bytearray(8)), limit_s=2.0)


PUT, DATA = put_of(facts_of(step=7))
MESSAGE = request_to_json(PUT)
MANY_ROWS = RankLayout((Item("w", "int8", (2**55,), (0,), (2**55,)),), shard_bytes=1, chunk_bytes=1)
TWINS = RankLayout((Item("w", "int8", (1,), (0,), (1,)), Item("w", "int8", (1,), (0,), (1,))), shard_bytes=1)


def with_facts(**changes: object) -> Callable[[], dict[str, JsonValue]]:
    return lambda: MESSAGE | {"facts": asdict(PUT.facts) | changes}  # type: ignore[dict-item]


def of_layout(layout: RankLayout) -> Callable[[], dict[str, JsonValue]]:
    put = Put(replace(PUT.facts, layout=layout.digest), layout, PUT.digests)
    # Its size would not be known without laying it out.
    return lambda: {**MESSAGE, "facts": asdict(put.facts), "layout": layout.to_bytes().decode(), "size_bytes": 2**55}


PUTS: dict[str, tuple[Callable[[], dict[str, JsonValue]], str]] = {
    "no facts": (lambda: MESSAGE | {"facts": None}, "$.facts"),
    "rank no number": (with_facts(rank="../../x"), "$.facts.rank"),
    "rank negative": (with_facts(rank=-1), "$.facts.rank"),
    "rank past the world": (with_facts(rank=8), "not below the world size"),
    "rank of another": (with_facts(rank=5), "does not keep replicas of rank 5"),
    "another run": (with_facts(run="../other"), "keeps replicas of run"),
    "a path as incarnation": (with_facts(incarnation="../../x"), "`incarnation` must be a name"),
    "a path as layout": (with_facts(layout="../../x"), "the layout has digest"),
    "another version": (with_facts(version=2), "$.facts.version"),
    "infinite": (with_facts(created=float("inf")), "it is no replica"),
    "a state that fits into no header": (with_facts(state={"x": "y" * 20_000}), "must fit into"),
    "no layout": (lambda: MESSAGE | {"layout": None}, "$.layout"),
    "layout no JSON": (lambda: MESSAGE | {"layout": "{"}, "is no layout"),
    "layout of another": (lambda: MESSAGE | {"layout": TWINS.to_bytes().decode()}, "the layout has digest"),
    "layout with half a character": (lambda: MESSAGE | {"layout": "\ud800"}, "it is no replica"),
    "two tensors of one name": (of_layout(TWINS), "2 chunks|both be called"),
    "more chunks than there is memory for": (of_layout(MANY_ROWS), f"the layout has {2**55} chunks"),
    "a layout that lies about its size": (lambda: MESSAGE | {"size_bytes": LAYOUT.size_bytes - 4096}, "are announced"),
    "size no number": (lambda: MESSAGE | {"size_bytes": "many"}, "$.size_bytes"),
    "no digests": (lambda: MESSAGE | {"digests": None}, "$.digests"),
    "digests no texts": (lambda: MESSAGE | {"digests": {"files": [1], "headers": [], "chunks": []}}, "$.digests.files"),
    "too few digests of files": (
        lambda: MESSAGE | {"digests": {"files": [], "headers": [], "chunks": list(PUT.digests.chunks)}},
        "0 digests of files",
    ),
    "too few digests": (lambda: MESSAGE | {"digests": {"files": [], "headers": [], "chunks": []}}, "0 digests of chunks"),
}


@pytest.mark.parametrize("name", PUTS)
def test_puts(target: Host, name: str) -> None:
    message, words = PUTS[name]
    connection, channel = admitted(target)
    with connection:
        channel.send_json(message(), limit_s=2.0)
        answer = channel.receive_json(limit_s=2.0)
        if answer == {"ok": True, "send": True}:
            for start in range(0, len(DATA), 1 << 20):
                channel.send_data(memoryview(DATA)[start : start + (1 << 20)], limit_s=2.0)
            answer = channel.receive_json(limit_s=2.0)
        assert answer["ok"] is False
        assert any(word in str(answer["error"]) for word in words.split("|"))


PAYLOADS = {
    "cut": frame(bytes(DATA[:5000]), kind=b"D", length=1 << 20),
    "wrong digest": frame(bytes(DATA[: 1 << 20]), kind=b"D", digest=bytes(16)),
    "no bytes": frame(b"", kind=b"D"),
    "longer than a frame": frame(b"", kind=b"D", length=(1 << 20) + 1),
    "longer than the snapshot": frame(b"", kind=b"D", length=2**62),
    "a message among them": frame(b"{}"),
    "noise": secrets.token_bytes(1 << 20),
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_payloads(target: Host, name: str) -> None:
    connection, channel = admitted(target)
    with connection:
        channel.send_json(MESSAGE, limit_s=2.0)
        assert channel.receive_json(limit_s=2.0) == {"ok": True, "send": True}
        try:
            channel.send(PAYLOADS[name], limit_s=2.0)
        except ChannelError:
            return
        assert ends(connection)


def test_more_than_was_announced(target: Host) -> None:
    """The last frame must end where the snapshot does."""
    connection, channel = admitted(target)
    with connection:
        channel.send_json(MESSAGE, limit_s=2.0)
        assert channel.receive_json(limit_s=2.0) == {"ok": True, "send": True}
        with suppress(ChannelError):
            # The frame that is too long has its length in front: the server may hang up before it has read all of it.
            for start in range(0, len(DATA), 1 << 20):
                channel.send_data(memoryview(bytes(DATA[start : start + (1 << 20)]).ljust(1 << 20)), limit_s=2.0)
        assert ends(connection)
    assert 7 not in target.replicas().values()


def test_bytes_without_their_digests_are_refused_and_the_connection_goes_on(target: Host) -> None:
    connection, channel = admitted(target)
    with connection:
        for _ in range(2):
            channel.send_json(MESSAGE, limit_s=2.0)
            assert channel.receive_json(limit_s=2.0) == {"ok": True, "send": True}
            for start in range(0, len(DATA), 1 << 20):
                channel.send_data(memoryview(bytes(len(DATA[start : start + (1 << 20)]))), limit_s=2.0)
            assert channel.receive_json(limit_s=2.0)["code"] == "refused"
    assert 7 not in target.replicas().values()


@pytest.mark.parametrize(
    "answer",
    [
        frame(b'{"ok":true}') + frame(b"x" * 9, kind=b"D"),
        frame(b'{"ok":true}') + frame(b"x" * 8, kind=b"D", digest=bytes(16)),
        frame(b'{"ok":true}') + frame(b"{}"),
        frame(b"[]"),
        frame(b"{}", length=2**62),
        b"",
    ],
)
def test_a_server_that_answers_nonsense(target: Host, answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client says what came, and from where."""
    monkeypatch.setattr("elastictrain.net.channel.Handshake.introduce", lambda self, channel, secret, limit_s: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = replace(target.peer, port=listener.getsockname()[1])

        listener.settimeout(5.0)

        def serve() -> None:
            # The second attempt fares no better. A client that has seen enough hangs up with bytes unread.
            for _ in range(2):
                near, _ = listener.accept()
                with near, suppress(OSError):
                    near.recv(65536)
                    near.sendall(answer)
                    near.shutdown(socket.SHUT_WR)
                    near.recv(65536)

        thread = threading.Thread(target=serve)
        thread.start()
        buffer = memoryview(bytearray(8))
        with (
            connected(peer, limits=QUICK) as connection,
            pytest.raises(TransientStorageError, match=rf"b \(127.0.0.1:{peer.port}\)"),
        ):
            connection.get_into(buffer, facts_of(5), start=0)
        thread.join()


def test_links_in_the_folder_are_not_followed(tmp_path: Path) -> None:
    """A link of a slot's name leads nowhere, for readers and for writers."""
    fill_slot(tmp_path, "elsewhere", facts_of(6))
    before = (tmp_path / "elsewhere").read_bytes()
    with host(tmp_path / "b", limits=QUICK) as b:
        (b.folder / "own-r00006-s0").symlink_to(tmp_path / "elsewhere")
        connection, channel = admitted(b)
        with connection:
            channel.send_json(GET | {"rank": 6}, limit_s=2.0)
            assert channel.receive_json(limit_s=2.0)["code"] == "missing"
        (b.folder / "replica-r00000-s0").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(TransientStorageError, match="cannot get"):
            send(b, 1)
    assert (tmp_path / "elsewhere").read_bytes() == before
