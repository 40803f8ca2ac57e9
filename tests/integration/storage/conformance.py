"""What every store must do: each check gets an empty store."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from elastictrain.errors import IrregularFileError, ObjectExistsError, ObjectNotFoundError, PermanentStorageError
from elastictrain.storage.opening import check_writable
from elastictrain.storage.store import Store

CHANCE = np.random.default_rng(0)

ODD_KEYS = (
    "with space/a b",
    "ünïcode/日本",
    "plus+and&=?#%41",
    "a'b\"c",
    "deep/er/and/deeper/x",
    "UPPER",
    "dot.ted/.hidden",
    "[a]*",
)


def keys(store: Store, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def absent_object(store: Store) -> None:
    for request in (
        lambda: store.read("none"),
        lambda: store.read("none", start=1, end=2),
        lambda: store.read("none", start=2, end=2),
        lambda: store.read_into("none", memoryview(bytearray(4))),
        lambda: store.stat("none"),
    ):
        with pytest.raises(ObjectNotFoundError, match="none"):
            request()
    store.delete("none")
    store.delete("no/folder/none")
    assert keys(store) == []
    assert keys(store, "nowhere") == []


def folder_is_no_object(store: Store) -> None:
    store.write("folder/object", b"x")
    with pytest.raises(ObjectNotFoundError):
        store.read("folder")
    with pytest.raises(ObjectNotFoundError):
        store.stat("folder")


def write_and_replace(store: Store) -> None:
    for content in (b"first", b"second, longer", b"", b"3"):
        store.write("a/b", content)
        assert store.read("a/b") == content
        assert store.stat("a/b").size_bytes == len(content)
    for data in (bytearray(b"abc"), memoryview(b"xabcx")[1:4]):
        store.write("a/b", data)
        assert store.read("a/b") == b"abc"


def ranges(store: Store) -> None:
    content = bytes(range(256)) * 4
    store.write("o", content)
    for start, end in ((0, None), (0, 1), (5, 9), (1000, 1024), (1000, 5000), (1023, None), (1024, None), (9000, 9001), (7, 7)):
        assert store.read("o", start=start, end=end) == content[start:end], (start, end)
    for start, size in ((0, 1024), (0, 2000), (100, 10), (1020, 10), (1024, 10), (4000, 10), (3, 0)):
        buffer = bytearray(b"\xee" * size)
        count = store.read_into("o", memoryview(buffer), start=start)
        assert count == len(content[start : start + size])
        assert buffer == content[start : start + size] + b"\xee" * (size - count)


def empty_object(store: Store) -> None:
    store.write("empty", b"")
    assert store.read("empty") == b""
    assert store.read("empty", start=0, end=10) == b""
    assert store.read_into("empty", memoryview(bytearray(4))) == 0
    assert [(info.key, info.size_bytes) for info in store.list()] == [("empty", 0)]
    store.create("empty-new", b"")
    with pytest.raises(ObjectExistsError, match="empty-new"):
        store.create("empty-new", b"")
    with store.open_writer("empty-stream"):
        pass
    assert store.read("empty-stream") == b""


def odd_keys(store: Store) -> None:
    for key in ODD_KEYS:
        store.write(key, key.encode())
    assert keys(store) == sorted(ODD_KEYS)
    for key in ODD_KEYS:
        assert store.read(key) == key.encode()
        assert store.stat(key).key == key
        store.delete(key)
        store.create(key, b"1")
        with pytest.raises(ObjectExistsError):
            store.create(key, b"2")
        assert store.read(key) == b"1"
        store.delete(key)
    assert keys(store) == []


def keys_that_are_none(store: Store) -> None:
    for key in ("", "/", "/a", "a/", "a//b", ".", "..", "a/../../b", "./a", ".tmp-x", "a/.tmp-/b", "a\0b"):
        with pytest.raises(PermanentStorageError, match="cannot name an object"):
            store.write(key, b"x")
        with pytest.raises(PermanentStorageError, match="cannot name an object"):
            store.read(key)


def listing_is_fresh_and_sorted(store: Store) -> None:
    assert keys(store) == []
    for key in ("b/2", "b/1", "b.txt", "b-/x", "a", "c/d/e", "bb/1"):
        store.write(key, b"12")
        assert key in keys(store)
    assert keys(store) == ["a", "b-/x", "b.txt", "b/1", "b/2", "bb/1", "c/d/e"]
    assert keys(store, "b") == keys(store, "b/") == ["b/1", "b/2"]
    assert keys(store, "c") == ["c/d/e"]
    assert keys(store, "a") == []
    store.delete("b/1")
    assert keys(store, "b") == ["b/2"]
    store.delete("b/2")
    assert keys(store, "b") == []
    store.write("b/2", b"again")
    (found,) = store.list("b")
    assert (found.key, found.size_bytes) == ("b/2", 5)
    assert found.modified == pytest.approx(store.stat("b/2").modified, abs=1.1)
    assert found.modified > 1_600_000_000


def one_creator_wins(store: Store) -> None:
    for attempt in range(3):
        barrier = threading.Barrier(8)

        def create(number: int, key: str = f"new/{attempt}", barrier: threading.Barrier = barrier) -> bool:
            barrier.wait(10)
            try:
                store.create(key, b"%d" % number * 1000)
            except ObjectExistsError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert won.count(True) == 1
        assert store.read(f"new/{attempt}") == b"%d" % won.index(True) * 1000
    assert keys(store) == ["new/0", "new/1", "new/2"]


def streams(store: Store) -> None:
    pieces = [CHANCE.bytes(3 << 20) for _ in range(14)]
    pieces.insert(3, b"")
    pieces.insert(5, b"small")
    store.write("stream", b"old")
    buffer = bytearray(3 << 20)
    with store.open_writer("stream") as writer:
        for piece in pieces:
            buffer[: len(piece)] = piece
            writer.write(memoryview(buffer)[: len(piece)])
        assert store.read("stream") == b"old"
    whole = b"".join(pieces)
    assert store.stat("stream").size_bytes == len(whole)
    assert store.read("stream") == whole
    back = bytearray(len(whole) + 5)
    assert store.read_into("stream", memoryview(back)) == len(whole)
    assert back[:-5] == whole
    assert store.read("stream", start=20 << 20, end=(20 << 20) + 3) == whole[20 << 20 : (20 << 20) + 3]


def large_write(store: Store) -> None:
    data = CHANCE.bytes(40 << 20)
    store.write("large", data)
    assert store.read("large") == data


def break_off(store: Store, key: str, size: int) -> None:
    with store.open_writer(key) as writer:
        writer.write(b"x" * size)
        raise KeyError("mine")


def aborted_stream_leaves_nothing(store: Store) -> None:
    store.write("kept", b"old")
    for size in (10, 20 << 20):
        for key in ("gone/stream", "kept"):
            with pytest.raises(KeyError, match="mine"):
                break_off(store, key, size)
    assert keys(store) == ["kept"]
    assert store.read("kept") == b"old"


def threads_share(store: Store) -> None:
    def use(number: int) -> None:
        for turn in range(5):
            key = f"t{number}/{turn}"
            store.write(key, key.encode())
            assert store.read(key) == key.encode()
            assert [info.key for info in store.list(f"t{number}")] == [key]
            store.delete(key)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert keys(store) == []


def writable(store: Store) -> None:
    check_writable(store)
    assert keys(store) == []


CHECKS: tuple[Callable[[Store], None], ...] = (
    absent_object,
    folder_is_no_object,
    write_and_replace,
    ranges,
    empty_object,
    odd_keys,
    keys_that_are_none,
    listing_is_fresh_and_sorted,
    one_creator_wins,
    streams,
    large_write,
    aborted_stream_leaves_nothing,
    threads_share,
    writable,
)


@contextmanager
def intruders(outside: Path, places: tuple[Path, ...]) -> Iterator[None]:
    """Puts something at each place in turn of which a store may use nothing; afterwards `outside` must be as it was."""
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    (outside / "folder").mkdir()
    (outside / "folder/object").write_bytes(b"precious")
    links = ("precious", "folder", "nothing", "folder/nothing/deeper")
    for place, target in zip(places, links, strict=False):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(outside / target)
    os.mkfifo(places[len(links)])
    listening = socket.socket(socket.AF_UNIX)
    folder = os.open(places[len(links) + 1].parent, os.O_RDONLY)
    try:
        # The whole path may be longer than the name of a socket can be.
        listening.bind(f"/proc/self/fd/{folder}/{places[len(links) + 1].name}")
        yield
    finally:
        os.close(folder)
        listening.close()
    assert {path.relative_to(outside).as_posix() for path in outside.rglob("*")} == {"precious", "folder", "folder/object"}
    assert (outside / "precious").read_bytes() == (outside / "folder/object").read_bytes() == b"precious"


KINDS = ("link-to-file", "link-to-folder", "dangling", "dangling-deep", "fifo", "socket")


def open_write(store: Store, key: str) -> None:
    with store.open_writer(key) as writer:
        writer.write(b"x")


REQUESTS: tuple[Callable[[Store, str], object], ...] = (
    lambda store, key: store.read(key),
    lambda store, key: store.read(key, start=0, end=4),
    lambda store, key: store.read_into(key, memoryview(bytearray(4))),
    lambda store, key: store.stat(key),
    lambda store, key: store.write(key, b"x"),
    lambda store, key: store.create(key, b"x"),
    open_write,
    lambda store, key: store.delete(key),
)


def irregular_files_are_not_objects(store: Store, root: Path, outside: Path) -> None:
    store.write("a/b/good", b"good")
    with intruders(outside, tuple(root / "a/b" / kind for kind in KINDS)):
        assert keys(store) == keys(store, "a") == keys(store, "a/b") == ["a/b/good"]
        for kind in KINDS:
            for request in REQUESTS:
                with pytest.raises(IrregularFileError, match=f"a/b/{kind}"):
                    request(store, f"a/b/{kind}")
            with pytest.raises(IrregularFileError, match=f"a/b/{kind}"):
                keys(store, f"a/b/{kind}")
        assert sorted(path.name for path in (root / "a/b").iterdir()) == sorted((*KINDS, "good"))
    assert store.read("a/b/good") == b"good"


def irregular_folders_are_not_entered(store: Store, root: Path, outside: Path) -> None:
    store.write("a/good", b"good")
    with intruders(outside, tuple(root / "a" / kind for kind in KINDS)):
        for kind in KINDS:
            for request in REQUESTS:
                for key in (f"a/{kind}/object", f"a/{kind}/deep/er/object"):
                    with pytest.raises(IrregularFileError, match=f"a/{kind}"):
                        request(store, key)
            with pytest.raises(IrregularFileError, match=f"a/{kind}"):
                keys(store, f"a/{kind}/deep")
        assert sorted(path.name for path in (root / "a").iterdir()) == sorted((*KINDS, "good"))
    assert keys(store) == ["a/good"]


def folder_that_becomes_a_link_is_left_alone(store: Store, root: Path, outside: Path) -> None:
    """An object that is being written when its folder is taken away goes to where it was begun."""
    with intruders(outside, tuple(root / "others" / kind for kind in KINDS)):
        with store.open_writer("a/b/object") as writer:
            writer.write(b"1")
            (root / "a/b").rename(root / "a/moved")
            (root / "a/b").symlink_to(outside / "folder")
            writer.write(b"2")
        assert (root / "a/moved/object").read_bytes() == b"12"
        assert [path.name for path in (root / "a/moved").iterdir()] == ["object"]


FOLDER_CHECKS: tuple[Callable[[Store, Path, Path], None], ...] = (
    irregular_files_are_not_objects,
    irregular_folders_are_not_entered,
    folder_that_becomes_a_link_is_left_alone,
)
