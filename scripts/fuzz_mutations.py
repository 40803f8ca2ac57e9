"""The ways in which `fuzz_run_folder.py` damages a run folder: each a function of a random generator and the folders.

`outside` is a folder beside the run, which nothing may touch. Mutations of a manifest are sealed again with a right digest, so
that they reach what lies behind the digest; they keep to what a reader must refuse, or to what does not matter.
"""

import json
import os
import random
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

ALGORITHM = b'"digest_algorithm":'
HUGE = 30 * 10**9
MOST_BYTES = 64 << 20
RNG = random.Random
SPECIAL_TEXTS = (
    "../../outside/precious.txt",
    "/etc/passwd",
    "a/b",
    "",
    ".",
    "..",
    "x\0y",
    "\u202e",
    "A" * 5000,
    "${oc.env:FUZZ_SECRET}",
)
SPECIAL_VALUES: tuple[object, ...] = (-1, 0, 2**63, 10**40, True, None, 1.5, "7", [], {}, [[]], -(10**30), *SPECIAL_TEXTS)
RAW_NUMBERS = ("1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "1E400", "-0")
NOISE: tuple[bytes, ...] = (
    b"",
    b"\0" * 4096,
    b"{",
    b"null",
    b"[]",
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b'{"time":' + b"9" * 5000 + b"}",
    b"\xff\xfe\x00broken",
    b'{"step":1e999}',
    b'{"step":NaN,"step":2}',
    b'"' + b"x" * 2_000_000 + b'"',
)
ALIAS_BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n".encode() for n in range(12)
)
CONFIGS: tuple[bytes, ...] = (
    ALIAS_BOMB,
    b"task:\n  _target_: fuzz_evil.Task\n",
    b"task: !!python/object/apply:os.system ['touch imported']\n",
    b"run:\n  dir: ${oc.env:FUZZ_SECRET}\n",
    b"run: ${run}\n",
    b"a: " + b"[" * 50_000,
    b"? " * 20_000,
    b"\xff\xfe",
    b"- 1\n- 2\n",
    b"run: &r\n  dir: x\nmodel: *r\n",
)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One kind of damage."""

    name: str
    apply: Callable[[RNG, Path, Path], None]


def read_file(path: Path) -> bytes:
    """Of a file. Raises: ValueError where an earlier mutation has made it something that cannot be read."""
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > MOST_BYTES:
        raise ValueError(f"{path} is nothing to change any more")
    return path.read_bytes()


def check_copyable(path: Path) -> None:
    """Whether a file, or all that a folder holds, can be copied. Raises: ValueError if not."""
    for one in [path, *path.rglob("*")]:
        if not one.is_dir() or one.is_symlink():
            read_file(one)


def any_file(rng: RNG, folder: Path, pattern: str = "*") -> Path:
    """A regular file of the run."""
    return rng.choice([path for path in sorted(folder.rglob(pattern)) if path.is_file() and not path.is_symlink()])


def any_folder(rng: RNG, folder: Path) -> Path:
    """A folder of the run, not the run itself."""
    return rng.choice([path for path in sorted(folder.rglob("*")) if path.is_dir() and not path.is_symlink()])


def any_shard(rng: RNG, folder: Path) -> Path:
    """A shard file of some checkpoint."""
    return any_file(rng, folder / "checkpoints", "*.safetensors")


def any_manifest(rng: RNG, folder: Path) -> Path:
    """The manifest of some checkpoint."""
    return any_file(rng, folder / "checkpoints", "manifest.json")


def any_part(rng: RNG, folder: Path) -> Path:
    """A part of the manifest of some checkpoint."""
    return any_file(rng, folder / "checkpoints", "*-part.json")


def remove(path: Path) -> None:
    """Whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def canonical(document: object) -> bytes:
    """As a manifest is written."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def seal(document: dict[str, Any]) -> bytes:
    """The bytes of a manifest with a digest that is right, by the format's description."""
    document.pop("digest", None)
    text = canonical(document)
    digest = xxhash.xxh3_128(text).hexdigest()
    place = text.index(ALGORITHM)
    return text[:place] + f'"digest":"{digest}",'.encode() + text[place:]


def flip_byte(rng: RNG, path: Path, *, below: int | None = None) -> None:
    """One bit of a file."""
    data = bytearray(read_file(path))
    data[rng.randrange(min(below or len(data), len(data)))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(rng: RNG, path: Path) -> None:
    """Cut a file short."""
    os.truncate(path, rng.choice((0, 1, 7, 8, path.stat().st_size // 2, path.stat().st_size - 1)))


def replace_with_link(rng: RNG, path: Path, outside: Path) -> None:
    """A link in the place of a file or folder: out of the run, to itself, or to nothing."""
    is_folder = path.is_dir()
    remove(path)
    inside = outside / "step-000000099" if is_folder else outside / rng.choice(("precious.txt", "manifest.json"))
    path.symlink_to(rng.choice((inside, Path("../../../outside"), path, Path("nowhere"), Path("/dev/zero"))))


def move_out_and_link(rng: RNG, path: Path, outside: Path) -> None:
    """Valid content, but reached through a link out of the run."""
    check_copyable(path)
    target = outside / f"moved-{rng.randrange(10**9)}"
    shutil.copytree(path, target) if path.is_dir() else shutil.copyfile(path, target)
    remove(path)
    path.symlink_to(target)


def replace_with_odd(rng: RNG, path: Path) -> None:
    """A FIFO, a socket or a folder in the place of a file."""
    remove(path)
    kind = rng.choice(("fifo", "socket", "folder"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "deep").mkdir(parents=True)
        (path / "deep" / "file").write_bytes(b"kept")
    else:
        with socket.socket(socket.AF_UNIX) as made:
            # A socket's path may have 108 bytes, and the run's folder is deep.
            short = Path(tempfile.gettempdir(), f"fuzz-{os.getpid()}-{rng.randrange(10**9)}")
            made.bind(str(short))
            short.rename(path)


def edit_manifest(change: Callable[[RNG, dict[str, Any]], None]) -> Callable[[RNG, Path, Path], None]:
    """A change of the parsed manifest, or of a part of it, sealed again."""

    def apply(rng: RNG, folder: Path, outside: Path) -> None:
        path = any_manifest(rng, folder)
        document = json.loads(read_file(path))
        if document.get("parts") and rng.random() < 0.7:
            edit_part(rng, document, path.parent, change)
        else:
            change(rng, document)
        path.write_bytes(seal(document))

    return apply


def edit_part(rng: RNG, document: dict[str, Any], folder: Path, change: Callable[[RNG, dict[str, Any]], None]) -> None:
    """The change sees the part's files and tensors in the places of the manifest's; what the manifest says of them follows."""
    record = rng.choice(document["parts"])
    path, tensors = folder / record["name"], document["tensors"]
    part = json.loads(read_file(path))
    document |= {name: part.pop(name) for name in ("files", "tensors")}
    change(rng, document)
    part |= {name: document.pop(name) for name in ("files", "tensors") if name in document}
    with suppress(AttributeError, KeyError, TypeError):
        record["files"] = {file["name"]: file["bytes"] for file in part["files"]}
        for name in part["tensors"].keys() & tensors.keys():
            tensors[name] |= {key: part["tensors"][name][key] for key in ("dtype", "shape")}
    document |= {"files": [], "tensors": tensors}
    raw = canonical(part)
    record |= {"bytes": len(raw), "digest": xxhash.xxh3_128(raw).hexdigest()}
    path.write_bytes(raw)


def odd_parts(rng: RNG, document: dict[str, Any]) -> None:
    """What a manifest says of its parts: which they are, what they hold, where that belongs."""
    parts, boxes = document["parts"], document["boxes"]
    box = rng.choice(rng.choice(boxes))
    odd = rng.choice((-1, 0, 7, 2**63, 10**40, None, "x", 1.5, [], [1], [10**9, 10**9]))
    kind = rng.randrange(8)
    if kind == 0:
        parts.pop(rng.randrange(len(parts)))
    elif kind == 1:
        parts.append(rng.choice(parts))
    elif kind == 2:
        rng.choice(parts)[rng.choice(("bytes", "digest", "files"))] = odd
    elif kind == 3:
        rng.choice(parts)["name"] = rng.choice((*SPECIAL_TEXTS, "manifest.json", parts[0]["name"]))
    elif kind == 4:
        box[rng.randrange(3)] = odd
    elif kind == 5:
        rng.choice(boxes).remove(box)
    elif kind == 6:
        rng.choice(sorted(document["tensors"].items()))[1]["boxes"] = odd
    else:
        document[rng.choice(("parts", "boxes"))] = odd


def swap_part(rng: RNG, folder: Path, outside: Path) -> None:
    """One part in the place of another, of the same checkpoint or of another one."""
    any_part(rng, folder).write_bytes(read_file(any_part(rng, folder)))


def some_chunk(rng: RNG, document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tensor with elements, and one of its chunks."""
    tensor = rng.choice([tensor for _, tensor in sorted(document["tensors"].items()) if tensor["shape"]])
    return tensor, rng.choice(tensor["chunks"])


def overlap_chunks(rng: RNG, document: dict[str, Any]) -> None:
    """Two chunks at the same place, whose sizes still add up to the tensor."""
    tensor = rng.choice([tensor for _, tensor in sorted(document["tensors"].items()) if len(tensor["chunks"]) > 1])
    one, other = rng.sample(tensor["chunks"], 2)
    one["offsets"] = [min(a, n - s) for a, n, s in zip(other["offsets"], tensor["shape"], one["sizes"], strict=True)]


def drop_chunk(rng: RNG, document: dict[str, Any]) -> None:
    """A tensor that is not covered."""
    tensor, chunk = some_chunk(rng, document)
    tensor["chunks"].remove(chunk)


def odd_chunk_number(rng: RNG, document: dict[str, Any]) -> None:
    """A number of a chunk that cannot be."""
    _, chunk = some_chunk(rng, document)
    key = rng.choice(("start", "bytes", "offsets", "sizes"))
    value = rng.choice((-1, 2**63, 10**40, True, None, 1.5, "7", {}))
    chunk[key] = [value] * len(chunk[key]) if isinstance(chunk[key], list) else value


def odd_shape(rng: RNG, document: dict[str, Any]) -> None:
    """A shape that no tensor of this model has."""
    tensor, _ = some_chunk(rng, document)
    tensor["shape"] = rng.choice(([2**62, 2**62], [-1], [10**30], [1] * 4000, "x", None, [True], [1e300]))


def odd_dtype(rng: RNG, document: dict[str, Any]) -> None:
    """An element type that is unknown, or of another width."""
    some_chunk(rng, document)[0]["dtype"] = rng.choice(("float64", "int8", "object", "", None, "__import__", "float16"))


def odd_file_name(rng: RNG, document: dict[str, Any]) -> None:
    """A shard file whose name leads elsewhere."""
    name = rng.choice(SPECIAL_TEXTS)
    old = document["files"][0]["name"]
    document["files"][0]["name"] = name
    for tensor in document["tensors"].values():
        for chunk in tensor["chunks"]:
            if chunk["file"] == old:
                chunk["file"] = name


def odd_file_facts(rng: RNG, document: dict[str, Any]) -> None:
    """Sizes and digests of a file that are not its own."""
    key = rng.choice(("bytes", "header_bytes", "header_digest", "digest"))
    rng.choice(document["files"])[key] = rng.choice((0, 1, -1, 10**15, "0" * 32, "xyz", None))


def drop_key(rng: RNG, document: dict[str, Any]) -> None:
    """A part of the manifest."""
    for _ in range(rng.choice((1, 3))):
        keys = sorted(set(document) - {"digest", "digest_algorithm"})
        del document[rng.choice(keys)]


def odd_top_level(rng: RNG, document: dict[str, Any]) -> None:
    """A part of the manifest that is of another kind."""
    document[rng.choice(("tensors", "files", "state", "versions", "step", "world_size", "incarnation"))] = rng.choice(
        (None, [], -1, 10**40, "x", [[[]]], True)
    )


def drop_tensor(rng: RNG, document: dict[str, Any]) -> None:
    """A tensor that the model needs."""
    del document["tensors"][rng.choice(sorted(name for name in document["tensors"] if name.startswith("model.")))]


def rename_tensor(rng: RNG, document: dict[str, Any]) -> None:
    """A tensor under a name that the model does not have."""
    name = rng.choice(sorted(name for name in document["tensors"] if name.startswith("model.")))
    document["tensors"][rng.choice(("model.other", "../x", "", "__class__"))] = document["tensors"].pop(name)


def odd_state(rng: RNG, document: dict[str, Any]) -> None:
    """A scalar of the run's state that cannot be."""
    document["state"][rng.choice(("step", "positions"))] = rng.choice((-1, None, "x", 10**40, True, [], 1.5))


def raw_number(rng: RNG, folder: Path, outside: Path) -> None:
    """A number that JSON's grammar lets through, in the text of a manifest."""
    path = any_manifest(rng, folder)
    text = read_file(path).decode()
    key = rng.choice(('"step":', '"world_size":', '"start":', '"bytes":', '"created":'))
    place = text.index(key) + len(key)
    end = min(found for found in (text.find(",", place), text.find("}", place)) if found > 0)
    path.write_text(text[:place] + rng.choice(RAW_NUMBERS) + text[end:])


def edit_json(rng: RNG, folder: Path, outside: Path) -> None:
    """A value of some other JSON object of the run: marks, generations, ends, lineage, hosts."""
    path = rng.choice([path for path in sorted(folder.rglob("*.json")) if path.is_file() and path.name != "manifest.json"])
    document = json.loads(read_file(path))
    if isinstance(document, dict) and document:
        document[rng.choice(sorted(document))] = rng.choice(SPECIAL_VALUES)
    path.write_bytes(json.dumps(document).encode())


def edit_shard_header(rng: RNG, folder: Path, outside: Path) -> None:
    """Offsets, types or the length in the header of a shard file."""
    path = any_shard(rng, folder)
    data = bytearray(read_file(path))
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.4:
        data[:8] = rng.choice((0, 2**63, 2**64 - 1, length + 1, HUGE)).to_bytes(8, "little")
    else:
        place = 8 + rng.randrange(length)
        data[place : place + 6] = rng.choice((b"[[[[[[", b"1e9999", b"-99999", b"\xff" * 6, b"nullnu"))
    path.write_bytes(data)


def swap_shards(rng: RNG, folder: Path, outside: Path) -> None:
    """The content of two files of the same size."""
    one, other = rng.sample(sorted((folder / "checkpoints").rglob("*.safetensors")), 2)
    a, b = read_file(one), read_file(other)
    one.write_bytes(b)
    other.write_bytes(a)


def move_checkpoint(rng: RNG, folder: Path, outside: Path) -> None:
    """A checkpoint under the name of another step."""
    source = rng.choice(sorted((folder / "checkpoints").glob("step-*")))
    step = rng.choice(
        ("step-000000099", "step-99999999999999999999", "step-000000001", "step-000000000", "step--00000001", "step-x")
    )
    rng.choice((shutil.move, shutil.copytree))(str(source), str(source.with_name(step)))


def strange_folders(rng: RNG, folder: Path, outside: Path) -> None:
    """Things that nobody put there, with content that is not ours to delete."""
    for number in range(rng.choice((1, 5, 50))):
        place = rng.choice((folder, folder / "checkpoints", any_folder(rng, folder)))
        target = place / rng.choice(
            (f"step-{number:09d}", f"x{number}", f"\udcff{number}", f"step-{number}", ".hidden", "a" * 200)
        )
        target.mkdir(exist_ok=True)
        (target / rng.choice(("file", "manifest.json", "deep"))).write_bytes(b"{}")


def subfolder_in_checkpoint(rng: RNG, folder: Path, outside: Path) -> None:
    """A folder within a checkpoint, or a link out of it."""
    checkpoint = rng.choice(sorted((folder / "checkpoints").glob("step-*")))
    if rng.random() < 0.5:
        (checkpoint / "sub" / "deep").mkdir(parents=True)
        (checkpoint / "sub" / "deep" / "notes.txt").write_bytes(b"a person's notes")
    else:
        (checkpoint / "sub").symlink_to(outside)


def sparse(rng: RNG, folder: Path, outside: Path) -> None:
    """A file of 30 GB without a byte."""
    path = any_file(rng, folder) if rng.random() < 0.5 else any_manifest(rng, folder)
    os.truncate(path, HUGE)


def noise(rng: RNG, folder: Path, outside: Path) -> None:
    """Content that is nothing, or nothing but brackets."""
    any_file(rng, folder).write_bytes(rng.choice(NOISE))


def manifest_noise(rng: RNG, folder: Path, outside: Path) -> None:
    """The same, for what every start reads."""
    any_manifest(rng, folder).write_bytes(rng.choice(NOISE))


def record_noise(rng: RNG, folder: Path, outside: Path) -> None:
    """Lines among the records of what happened."""
    path = any_file(rng, folder / "events", "*.jsonl")
    lines = read_file(path).splitlines(keepends=True)
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(NOISE) + rng.choice((b"\n", b"")))
    path.write_bytes(b"".join(lines))


def config_noise(rng: RNG, folder: Path, outside: Path) -> None:
    """A stored configuration that is a program, a bomb or a question about the environment."""
    path = folder / "config.yaml"
    content = rng.choice(CONFIGS)
    path.write_bytes(read_file(path) + content if rng.random() < 0.3 else content)


def config_value(rng: RNG, folder: Path, outside: Path) -> None:
    """A line of the stored configuration."""
    path = folder / "config.yaml"
    lines = read_file(path).decode().splitlines()
    place = rng.randrange(len(lines))
    lines[place] = (
        lines[place].partition(":")[0] + ": " + rng.choice(("*x", "&x y", "${oc.env:FUZZ_SECRET}", "[", "!!binary x", "1e999"))
    )
    path.write_text("\n".join(lines))


def delete_something(rng: RNG, folder: Path, outside: Path) -> None:
    """A file or a folder with all that is in it, but not all checkpoints."""
    path = rng.choice([any_file(rng, folder), rng.choice(sorted((folder / "checkpoints").glob("step-*")))])
    remove(path)


def quarantine_mark(rng: RNG, folder: Path, outside: Path) -> None:
    """A mark that an earlier start would have left."""
    checkpoint = rng.choice(sorted((folder / "checkpoints").glob("step-*")))
    (checkpoint / "quarantine.json").write_bytes(rng.choice((*NOISE, b'{"reason": 1}', b'{"reason": "${oc.env:FUZZ_SECRET}"}')))


def drop_all_checkpoints(rng: RNG, folder: Path, outside: Path) -> None:
    """Every checkpoint, with or without the folder that held them."""
    if rng.random() < 0.5:
        shutil.rmtree(folder / "checkpoints")
    else:
        for checkpoint in (folder / "checkpoints").glob("step-*"):
            remove(checkpoint)


MUTATIONS: tuple[Mutation, ...] = (
    Mutation("flip a bit of a shard", lambda rng, folder, _: flip_byte(rng, any_shard(rng, folder))),
    Mutation("flip a bit of a shard's header", lambda rng, folder, _: flip_byte(rng, any_shard(rng, folder), below=2000)),
    Mutation("flip a bit of a manifest", lambda rng, folder, _: flip_byte(rng, any_manifest(rng, folder))),
    Mutation("flip a bit of any file", lambda rng, folder, _: flip_byte(rng, any_file(rng, folder))),
    Mutation("cut a shard short", lambda rng, folder, _: truncate(rng, any_shard(rng, folder))),
    Mutation("cut any file short", lambda rng, folder, _: truncate(rng, any_file(rng, folder))),
    Mutation("edit a shard's header", edit_shard_header),
    Mutation("swap shards", swap_shards),
    Mutation("flip a bit of a part", lambda rng, folder, _: flip_byte(rng, any_part(rng, folder))),
    Mutation("cut a part short", lambda rng, folder, _: truncate(rng, any_part(rng, folder))),
    Mutation("swap parts", swap_part),
    Mutation("part -> link", lambda rng, folder, out: replace_with_link(rng, any_part(rng, folder), out)),
    Mutation("part -> FIFO, socket, folder", lambda rng, folder, _: replace_with_odd(rng, any_part(rng, folder))),
    Mutation("noise in a part", lambda rng, folder, _: any_part(rng, folder).write_bytes(rng.choice(NOISE)) and None),
    Mutation("odd parts", edit_manifest(odd_parts)),
    Mutation("file -> link", lambda rng, folder, out: replace_with_link(rng, any_file(rng, folder), out)),
    Mutation("shard -> link", lambda rng, folder, out: replace_with_link(rng, any_shard(rng, folder), out)),
    Mutation("manifest -> link", lambda rng, folder, out: replace_with_link(rng, any_manifest(rng, folder), out)),
    Mutation("folder -> link", lambda rng, folder, out: replace_with_link(rng, any_folder(rng, folder), out)),
    Mutation("file moved out, link", lambda rng, folder, out: move_out_and_link(rng, any_file(rng, folder), out)),
    Mutation("folder moved out, link", lambda rng, folder, out: move_out_and_link(rng, any_folder(rng, folder), out)),
    Mutation("file -> FIFO, socket, folder", lambda rng, folder, _: replace_with_odd(rng, any_file(rng, folder))),
    Mutation("manifest -> FIFO, socket, folder", lambda rng, folder, _: replace_with_odd(rng, any_manifest(rng, folder))),
    Mutation("config -> FIFO, socket, folder", lambda rng, folder, _: replace_with_odd(rng, folder / "config.yaml")),
    Mutation("config -> link", lambda rng, folder, out: replace_with_link(rng, folder / "config.yaml", out)),
    Mutation("overlapping chunks", edit_manifest(overlap_chunks)),
    Mutation("missing chunk", edit_manifest(drop_chunk)),
    Mutation("odd chunk", edit_manifest(odd_chunk_number)),
    Mutation("odd shape", edit_manifest(odd_shape)),
    Mutation("odd dtype", edit_manifest(odd_dtype)),
    Mutation("odd file name", edit_manifest(odd_file_name)),
    Mutation("odd file facts", edit_manifest(odd_file_facts)),
    Mutation("manifest without a part", edit_manifest(drop_key)),
    Mutation("odd part of a manifest", edit_manifest(odd_top_level)),
    Mutation("missing tensor", edit_manifest(drop_tensor)),
    Mutation("renamed tensor", edit_manifest(rename_tensor)),
    Mutation("odd state", edit_manifest(odd_state)),
    Mutation("odd number in a manifest", raw_number),
    Mutation("odd value in a JSON object", edit_json),
    Mutation("checkpoint of another step", move_checkpoint),
    Mutation("strange folders", strange_folders),
    Mutation("folder in a checkpoint", subfolder_in_checkpoint),
    Mutation("30 GB of nothing", sparse),
    Mutation("noise in any file", noise),
    Mutation("noise in a manifest", manifest_noise),
    Mutation("noise among events", record_noise),
    Mutation("another configuration", config_noise),
    Mutation("odd line of the configuration", config_value),
    Mutation("something deleted", delete_something),
    Mutation("quarantine mark", quarantine_mark),
    Mutation("no checkpoints", drop_all_checkpoints),
)
