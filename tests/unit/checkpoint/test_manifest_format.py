import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint.manifest import ChunkRecord, FileRecord, JsonValue, Manifest, TensorRecord, digest_of
from elastictrain.checkpoint.manifest_format import encode_manifest, parse_manifest
from elastictrain.errors import CheckpointError, InvalidCheckpointError, UnknownFormatError
from tests.unit.examples import examples

D = digest_of(b"")
MANIFEST = Manifest(
    step=7,
    world_size=2,
    incarnation="inc",
    created=1.5,
    config_digest="cfg",
    versions={"torch": "2"},
    state={"step": 7, "x": [1.25, None, {"ä": True}]},
    files=(FileRecord("a.safetensors", 100, D, 60, D),),
    tensors={
        "w": TensorRecord(
            "int16",
            (4, 2),
            (ChunkRecord((0, 0), (2, 2), "a.safetensors", 60, 8, D), ChunkRecord((2, 0), (2, 2), "a.safetensors", 68, 8, D)),
        ),
        "e": TensorRecord("float32", (0,), ()),
    },
)
RAW = encode_manifest(MANIFEST)


def test_round_trip() -> None:
    assert parse_manifest(RAW, where="m") == MANIFEST
    assert MANIFEST.size_bytes == 100


@pytest.mark.parametrize("mask", [1, 0x20, 0x80])
def test_every_flipped_byte_is_noticed(mask: int) -> None:
    for position in range(len(RAW)):
        raw = bytearray(RAW)
        raw[position] ^= mask
        with pytest.raises(InvalidCheckpointError, match=r"^the/manifest: "):
            parse_manifest(bytes(raw), where="the/manifest")


def test_every_truncation_is_noticed() -> None:
    for length in range(len(RAW)):
        with pytest.raises(InvalidCheckpointError, match="m: "):
            parse_manifest(RAW[:length], where="m")


def test_added_white_space_is_noticed() -> None:
    with pytest.raises(InvalidCheckpointError, match="digest"):
        parse_manifest(RAW + b"\n", where="m")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def resigned(document: dict[str, object]) -> bytes:
    """With a digest that is right, so that only the content is wrong."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**document, "digest": digest_of(text)}, sort_keys=True, separators=(",", ":")).encode()


def expect_valid_or_rejected(raw: bytes) -> None:
    with suppress(InvalidCheckpointError, UnknownFormatError):
        parse_manifest(raw, where="m")


@given(st.binary(max_size=50) | JSON.map(lambda value: json.dumps(value).encode()))
def test_garbage(raw: bytes) -> None:
    expect_valid_or_rejected(raw)


@settings(max_examples=examples(200))
@given(st.data())
def test_any_part_replaced_under_a_right_digest(data: st.DataObject) -> None:
    document = json.loads(RAW)
    del document["digest"]
    paths = list(walk(document, ()))
    path = data.draw(st.sampled_from(paths))
    holder = document
    for part in path[:-1]:
        holder = holder[part]
    if data.draw(st.booleans()) and isinstance(holder, dict):
        del holder[path[-1]]
    else:
        holder[path[-1]] = data.draw(JSON)
    expect_valid_or_rejected(resigned(document))


def walk(value: JsonValue, path: tuple[str | int, ...]) -> list[tuple[str | int, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, child in children for found in walk(child, (*path, key))]


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("version",), 3, "is of format version 3, but .* reads versions 1 and 2"),
        (("version",), 2, "must be of version 2 if it has parts"),
        (("version",), "new", "is of format version 'new', but .* reads versions 1 and 2"),
        (("format",), "other", "not a checkpoint manifest"),
        (("files", 0, "name"), "../../etc/passwd", "files.*name"),
        (("files", 0, "name"), "manifest.json", "files.*name"),
        (("tensors", "w", "chunks", 0, "start"), 40, "outside"),
        (("tensors", "w", "chunks", 1, "start"), 96, "outside"),
        (("tensors", "w", "chunks", 0, "file"), "b.safetensors", "outside"),
        (("tensors", "w", "chunks", 0, "sizes"), [2, 1], "number of bytes"),
        (("tensors", "w", "chunks", 1, "offsets"), [3, 0], "beyond"),
        (("tensors", "w", "chunks", 1, "offsets"), [3], "dimensions"),
        (("tensors", "w", "shape"), [5, 2], "do not fill"),
        (("tensors", "w", "dtype"), "int17", "int17"),
        (("step",), True, "step"),
        (("step",), -1, "step"),
    ],
)
def test_reasons(path: tuple[str | int, ...], value: JsonValue, reason: str) -> None:
    document = json.loads(RAW)
    del document["digest"]
    holder = document
    for part in path[:-1]:
        holder = holder[part]
    holder[path[-1]] = value
    with pytest.raises(CheckpointError, match=reason) as caught:
        parse_manifest(resigned(document), where="m")
    assert caught.type is (UnknownFormatError if path == ("version",) and value != 2 else InvalidCheckpointError)


def test_a_garbled_version_is_damage_and_another_kind_of_digest_is_not() -> None:
    garbled = RAW.replace(b'"version":1', b'"version":3')
    with pytest.raises(InvalidCheckpointError, match="digest"):
        parse_manifest(garbled, where="m")
    with pytest.raises(UnknownFormatError, match="version 3"):
        parse_manifest(garbled.replace(b"xxh3_128", b"blake4"), where="m")
    with pytest.raises(InvalidCheckpointError, match="digest"):
        parse_manifest(RAW.replace(b"xxh3_128", b"blake4"), where="m")


def test_hostile_json() -> None:
    for raw in (
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 10_000,
        b'{"format":"elastictrain-checkpoint","version":1,"step":NaN}',
    ):
        with pytest.raises(InvalidCheckpointError):
            parse_manifest(raw, where="m")


def test_state_must_be_json() -> None:
    bad = Manifest(1, 1, "i", 0.0, "c", {}, {"x": float("nan")}, (), {})
    with pytest.raises(ValueError, match="JSON"):
        encode_manifest(bad)
