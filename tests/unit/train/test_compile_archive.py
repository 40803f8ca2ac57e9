import fcntl
import hashlib
import json
import os
import random
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.checkpoint.signing import SigningKey
from elastictrain.train import compile_archive
from elastictrain.train.compile_archive import (
    KEPT_KEYS,
    ArchiveName,
    ArchiveRefusedError,
    content_of,
    files_in,
    is_whole_object,
    newest,
    pack,
    parse_name,
    remove_torn_objects,
    seal,
    superfluous,
    unpack,
    unseal,
)

NAME = ArchiveName("a" * 24, 7, "b" * 16)
KEY = SigningKey("RUN_KEY", b"k" * 32)
FILES = {"xy/cxy.main.cpp": b"int main", "fxgraph/p6/fp6/kl": b"graph" * 50, "triton/0/H/__grp__k.json": b'{"path": "%s/x"}'}

names = st.builds(
    ArchiveName, st.sampled_from([digit * 24 for digit in "abcdef"]), st.integers(0, 9), st.sampled_from(["1" * 16, "2" * 16])
)


def filled(folder: Path) -> Path:
    for path, data in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data.replace(b"%s", os.fsencode(folder)))
    return folder


def body_of(index: list[tuple[str, int, int]], data: bytes = b"data") -> bytes:
    return zlib.compress(json.dumps({"files": index}).encode() + b"\n" + data)


def refused(name: ArchiveName, data: bytes, signing: SigningKey | None = None) -> str:
    with pytest.raises(ArchiveRefusedError) as caught:
        unseal(name, data, signing=signing)
    return caught.value.reason


def whole_object(data: bytes = b"code" * 30) -> bytes:
    """The header of a 64-bit shared object, its code, and two section headers."""
    header = bytearray(b"\x7fELF\x02\x01".ljust(64, b"\0"))
    header[40:48] = (64 + len(data)).to_bytes(8, "little")
    header[58:60], header[60:62] = (64).to_bytes(2, "little"), (2).to_bytes(2, "little")
    return bytes(header) + data + bytes(128)


def test_files_come_back_in_another_folder(tmp_path: Path) -> None:
    source, target = filled(tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    files = files_in(str(source))
    assert files.keys() == FILES.keys()
    assert unpack(str(target), pack(str(source), files)) == len(FILES)
    # A path of the host's folder within a file is that of the other folder.
    assert {path: (target / path).read_bytes() for path in FILES} == {
        path: data.replace(b"%s", os.fsencode(target)) for path, data in FILES.items()
    }
    assert content_of(files_in(str(target))) == content_of(files)
    assert list(target.glob(".*")) == []


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    source, target = filled(tmp_path / "source"), filled(tmp_path / "target")
    (target / "xy/cxy.main.cpp").write_bytes(b"own")
    (target / "fxgraph/p6/fp6/kl").unlink()
    assert unpack(str(target), pack(str(source), files_in(str(source)))) == 1
    assert (target / "xy/cxy.main.cpp").read_bytes() == b"own"


def test_equal_files_are_stored_once(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(20_000)
    for device in range(8):
        (tmp_path / f"triton/{device}").mkdir(parents=True)
        (tmp_path / f"triton/{device}/kernel.cubin").write_bytes(data)
    assert len(pack(str(tmp_path), files_in(str(tmp_path)))) < 25_000


def test_locks_links_and_what_is_unfinished_are_no_files_of_the_cache(tmp_path: Path) -> None:
    filled(tmp_path)
    for name in ("locks", "triton/0/H/tmp.pid_7"):
        (tmp_path / name).mkdir()
    for name in (
        "locks/held",
        "triton/0/H/tmp.pid_7/x.cubin",
        "xy/c.lock",
        "xy/.1.2.tmp",
        "xy/1.tmp",
        ".contents",
        "xy/empty",
        "xy/a b",
    ):
        (tmp_path / name).write_bytes(b"" if name.endswith("empty") else b"x")
    (tmp_path / "xy/link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "xy/fifo")
    assert files_in(str(tmp_path)).keys() == FILES.keys()


def test_an_object_that_a_killed_linker_left_is_not_packed(tmp_path: Path) -> None:
    data = whole_object()
    assert is_whole_object(data[:64], size=len(data))
    assert not any(is_whole_object(data[:length][:64], size=length) for length in range(len(data)))
    assert not is_whole_object(bytes(64), size=len(data))
    (tmp_path / "whole.so").write_bytes(data)
    (tmp_path / "short.so").write_bytes(data[:-1])
    target = tmp_path / "target"
    target.mkdir()
    unpack(str(target), pack(str(tmp_path), ["whole.so", "short.so"]))
    assert files_in(str(target)).keys() == {"whole.so"}


def test_an_object_that_a_killed_linker_left_is_removed_unless_it_is_being_made(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "xy").mkdir()
    data = whole_object()
    for name in ("whole", "torn", "held", "other"):
        (tmp_path / f"xy/{name}.main.so").write_bytes(data if name == "whole" else data[:-1])
        if name != "other":
            (tmp_path / f"locks/{name}.lock").touch()
    with (tmp_path / "locks/held.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sorted(remove_torn_objects(str(tmp_path))) == ["xy/other.main.so", "xy/torn.main.so"]
        assert files_in(str(tmp_path)).keys() == {"xy/held.main.so", "xy/whole.main.so"}
    assert remove_torn_objects(str(tmp_path)) == ["xy/held.main.so"]


@pytest.mark.parametrize("signing", [None, KEY])
def test_every_damaged_byte_is_noticed(tmp_path: Path, signing: SigningKey | None) -> None:
    data = seal(NAME, pack(str(filled(tmp_path)), FILES), signing=signing)
    body = unseal(NAME, data, signing=signing)
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        # The value of a signature that nobody checks may change.
        found = body
        with suppress(ArchiveRefusedError):
            found = unseal(NAME, changed, signing=signing)
        assert found == body, at
    for length in range(len(data)):
        assert refused(NAME, data[:length], signing) in ("damaged", "signature")


def test_what_another_key_or_none_has_signed_is_refused() -> None:
    sealed = seal(NAME, b"body", signing=KEY)
    assert unseal(NAME, sealed, signing=KEY) == b"body"
    assert refused(NAME, sealed, SigningKey("RUN_KEY", b"o" * 32)) == "signature"
    assert refused(NAME, seal(NAME, b"body", signing=None), KEY) == "signature"
    # The archive of another name is put in the place of this one.
    assert refused(ArchiveName("c" * 24, 7, "b" * 16), sealed, KEY) == "signature"


def test_what_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = seal(NAME, b"body", signing=None)
    monkeypatch.setattr(compile_archive, "MOST_BYTES", len(sealed) - 1)
    assert refused(NAME, sealed) == "size"
    monkeypatch.setattr(compile_archive, "MOST_UNPACKED_BYTES", 1000)
    small_and_large = (zlib.compress(bytes(10**6)), body_of([("a", 0, 600), ("b", 0, 600)], bytes(600)))
    for body in small_and_large:
        with pytest.raises(ArchiveRefusedError) as caught:
            unpack(str(tmp_path), body)
        assert caught.value.reason == "size"
    (tmp_path / "large").write_bytes(bytes(1001))
    with pytest.raises(ArchiveRefusedError):
        pack(str(tmp_path), ["large"])


@pytest.mark.parametrize(
    "path",
    [
        "../out",
        "/etc/x",
        "a/../../out",
        "a//b",
        ".hidden",
        "a/.contents",
        "a/x.lock",
        "a b",
        "",
        "a\0b",
        "/".join("abcdefghij"),
    ],
)
def test_nothing_is_written_outside_or_beside_the_cache(tmp_path: Path, path: str) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    with pytest.raises(ArchiveRefusedError) as caught:
        unpack(str(inside), body_of([("fine", 0, 4), (path, 0, 4)]))
    assert caught.value.reason == "damaged"
    assert sorted(tmp_path.rglob("*")) == [inside]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no zlib",
        zlib.compress(b"no json\n"),
        zlib.compress(b"{}\n"),
        body_of([("a", 0, 5)]),
        body_of([("a", -1, 1)]),
        body_of([("a", 3, -2)]),
    ],
)
def test_a_body_that_no_writer_makes_is_refused(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(ArchiveRefusedError):
        unpack(str(tmp_path), body)
    assert list(tmp_path.iterdir()) == []


@given(names)
def test_a_name_is_read_as_it_was_written(name: ArchiveName) -> None:
    assert parse_name(str(name)) == name


@pytest.mark.parametrize("key", ["compile_cache/x", "checkpoints/" + "a" * 24, f"{NAME}.tmp", f"x{NAME}", str(NAME).upper()])
def test_other_objects_are_no_archives(key: str) -> None:
    assert parse_name(key) is None


@given(st.lists(names, unique=True))
def test_the_newest_archives_of_the_last_keys_remain(found: list[ArchiveName]) -> None:
    removed = superfluous(found)
    kept = [name for name in found if name not in removed]
    assert set(removed) <= set(found)
    assert len(kept) == min(KEPT_KEYS, len({name.key for name in found}))
    for name in kept:
        assert newest(found, key=name.key) == name
    # No key that is gone was written after one that is kept.
    latest = {name.key: newest(found, key=name.key) for name in found}
    gone = [name.number for key, name in latest.items() if name and key not in {one.key for one in kept}]
    assert max(gone, default=-1) <= min((name.number for name in kept), default=10)


def test_a_key_that_nobody_stored_has_no_archive() -> None:
    assert newest([NAME], key="f" * 24) is None
    assert hashlib.sha256(b"").hexdigest()[:16] == content_of({})
