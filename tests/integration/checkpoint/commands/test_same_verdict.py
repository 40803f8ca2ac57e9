"""Whatever a restore would refuse, `verify` refuses; and a start goes back to the checkpoint before.

Every change here keeps all digests right, as a writer with a defect or a person with an editor would leave them.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.commands.verify import verify_checkpoints
from elastictrain.checkpoint.manifest import digest_of
from elastictrain.config.composed import CheckpointGroup
from elastictrain.errors import EXIT_OK, EXIT_STORAGE
from elastictrain.storage.opening import open_store
from tests.integration.checkpoint.commands.made import (
    Document,
    change_manifest,
    folders,
    save,
    shard,
    state_of,
)


def change_header(folder: Path, act: Callable[[Document], bytes | None]) -> None:
    """Of the first file; `act` may return the bytes of the header instead of changing it. Its length stays as it is."""
    path = shard(folder)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    document = json.loads(raw[8 : 8 + length])
    text = act(document) or json.dumps(document, separators=(",", ":")).encode()
    assert len(text) <= length
    raw = struct.pack("<Q", length) + text.ljust(length) + raw[8 + length :]
    path.write_bytes(raw)

    def redigest(manifest: Document) -> None:
        manifest["files"][0] |= {"digest": digest_of(raw), "header_digest": digest_of(raw[: 8 + length])}

    change_manifest(folder, redigest)


def weight(document: Document) -> Document:
    return document["tensors"]["model.weight"]  # type: ignore[no-any-return]


def overlap(document: Document) -> None:
    first, second = weight(document)["chunks"]
    assert first["sizes"] == second["sizes"]
    second["offsets"] = first["offsets"]


def overlap_in_part(document: Document) -> None:
    second = weight(document)["chunks"][1]
    second["offsets"] = [second["offsets"][0] - 1, *second["offsets"][1:]]


def same_bytes_twice(document: Document) -> None:
    first, second = weight(document)["chunks"]
    second |= {"start": first["start"], "digest": first["digest"], "file": first["file"]}


def other_name(document: Document) -> None:
    document["tensors"]["model.weights"] = document["tensors"].pop("model.weight")


def huge_and_empty(document: Document) -> None:
    document["tensors"]["extra"] = {"dtype": "float32", "shape": [0, 2**62, 2**62], "chunks": []}


def more_shape(document: Document) -> None:
    weight(document)["shape"] = [6, 4, 1]
    for chunk in weight(document)["chunks"]:
        chunk["offsets"].append(0)
        chunk["sizes"].append(1)


def transposed(document: Document) -> None:
    shapes = {"model.weight", "optim.exp_avg.weight"}
    for name in shapes:
        document["tensors"][name] |= {"shape": [12, 2]}
        for chunk in document["tensors"][name]["chunks"]:
            chunk["offsets"] = [chunk["offsets"][0] * 2, 0]
            chunk["sizes"] = [chunk["sizes"][0] * 2, 2]


MANIFESTS: dict[str, Callable[[Document], None]] = {
    "two chunks at one place": overlap,
    "two chunks that overlap": overlap_in_part,
    "two chunks of the same bytes": same_bytes_twice,
    "a tensor under another name": other_name,
    "a tensor of another type": lambda document: weight(document).update(dtype="int32"),
    "a tensor of another shape": transposed,
    "a tensor of more dimensions": more_shape,
    "an empty tensor of impossible extent": huge_and_empty,
    "another step in the state": lambda document: document["state"].update(step=7),
    "a step that is a text": lambda document: document["state"].update(step="2"),
    "a step that is a truth": lambda document: document["state"].update(step=True),
    "a negative count": lambda document: document["state"].update(skipped_total=-1),
    "a broken count": lambda document: document["state"].update(skipped_in_a_row=1.5),
    "no count at all": lambda document: document["state"].update(skipped_in_a_row=None),
    "negative positions": lambda document: document["state"].update(positions=-3),
    "a digest of data that is no text": lambda document: document["state"].update(data_digest=[]),
    "a world of nobody": lambda document: document.update(world_size=0),
    "a time after all calendars": lambda document: document.update(created=1e300),
    "a header of nothing": lambda document: document["files"][0].update(header_bytes=0, header_digest=digest_of(b"")),
    "a step of other folders": lambda document: document.update(step=9, state={}),
}


def key_of_weight(document: Document) -> str:
    return next(key for key in document if key.startswith("model.weight"))


def rename(document: Document) -> None:
    key = key_of_weight(document)
    document[key.replace("weight", "wright")] = document.pop(key)


def retype(document: Document) -> None:
    document[key_of_weight(document)]["dtype"] = "I32"


def reshape(document: Document) -> None:
    document[key_of_weight(document)]["shape"].reverse()


def swap(document: Document) -> None:
    first, second = key_of_weight(document), next(key for key in document if key.startswith("optim.exp_avg.weight"))
    document[first], document[second] = document[second], document[first]


HEADERS: dict[str, Callable[[Document], bytes | None]] = {
    "a tensor under another name in the header": rename,
    "a tensor of another type in the header": retype,
    "a tensor of another shape in the header": reshape,
    "two tensors for each other in the header": swap,
    "a header that is no JSON": lambda document: b"{" * 40,
    "a header that is a list": lambda document: b"[1,2]",
    "a header without tensors": lambda document: b"{}",
    "a tensor without offsets": lambda document: b'{"a":{"dtype":"F32","shape":[1]}}',
    "a tensor with a broken extent": lambda document: b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
    "an unknown type in the header": lambda document: b'{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}',
    "a type that is a list": lambda document: b'{"a":{"dtype":[],"shape":[1],"data_offsets":[0,4]}}',
    "deep brackets": lambda document: b"[" * 60 + b"]" * 60,
}


def checkpointer(run: Path) -> Checkpointer:
    return Checkpointer(
        open_store(str(run)),
        options=CheckpointGroup(),
        group=None,
        rank=0,
        world_size=1,
        incarnation="000009-zz",
        config_digest="digest",
        record=lambda event: None,
    )


@pytest.fixture(params=[0, 2], ids=["whole", "parts"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    for step in (1, 2):
        save(tmp_path, step, world_size=2, ranks_per_part=request.param)
    return tmp_path


def verdicts(run: Path) -> tuple[int, int]:
    """The exit code of `verify`, and the step that a start goes on from."""
    code = verify_checkpoints(str(run), every=False, step=2, threads=1, as_json=True)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}
    restored = checkpointer(run).restore(tensors=tensors, reset=lambda: None)
    assert restored is not None
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state_of(restored.step).items())
    assert (run / "checkpoints" / "step-000000002" / "quarantine.json").exists() == (restored.step == 1)
    return code, restored.step


def test_what_is_whole_is_taken(run: Path) -> None:
    folder = run / "checkpoints" / "step-000000002"
    change_manifest(folder, lambda document: None)
    change_header(folder, lambda document: None)
    assert verdicts(run) == (EXIT_OK, 2)
    assert len(folders(run)) == 2


@pytest.mark.parametrize("act", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_no_run_writes(run: Path, act: Callable[[Document], None]) -> None:
    change_manifest(run / "checkpoints" / "step-000000002", act)
    assert verdicts(run) == (EXIT_STORAGE, 1)


@pytest.mark.parametrize("act", HEADERS.values(), ids=HEADERS)
def test_a_header_that_tells_something_else(run: Path, act: Callable[[Document], bytes | None]) -> None:
    change_header(run / "checkpoints" / "step-000000002", act)
    assert verdicts(run) == (EXIT_STORAGE, 1)


def test_a_chunk_whose_digest_alone_is_wrong(run: Path) -> None:
    change_manifest(
        run / "checkpoints" / "step-000000002", lambda document: weight(document)["chunks"][0].update(digest=digest_of(b"?"))
    )
    assert verdicts(run) == (EXIT_STORAGE, 1)


def boxes_of_weight(document: Document) -> list[Any]:
    return document["boxes"][weight(document)["boxes"]]  # type: ignore[no-any-return]


def swap_parts(document: Document) -> None:
    first, second = document["parts"]
    first["name"], second["name"] = second["name"], first["name"]


def swap_files(document: Document) -> None:
    first, second = document["parts"]
    first["files"], second["files"] = second["files"], first["files"]


def boxes_of_another_shape(document: Document) -> None:
    document["tensors"]["optim.step"] |= {"boxes": weight(document)["boxes"]}


ROOTS: dict[str, Callable[[Document], None]] = {
    "parts that are swapped": swap_parts,
    "files of parts that are swapped": swap_files,
    "a part that is missing": lambda document: document["parts"].pop(),
    "no parts": lambda document: document.pop("parts"),
    "a part twice": lambda document: document["parts"].append(document["parts"][0]),
    "a part of terabytes": lambda document: document["parts"][0].update(bytes=1 << 42),
    "a part with another digest": lambda document: document["parts"][0].update(digest=digest_of(b"")),
    "the version without parts": lambda document: document.update(version=1),
    "a box in no part": lambda document: boxes_of_weight(document)[0].__setitem__(0, 2),
    "a box in another part": lambda document: boxes_of_weight(document)[0].__setitem__(0, 1),
    "a box of another place": lambda document: boxes_of_weight(document)[1].__setitem__(1, [0, 0]),
    "a box of other dimensions": lambda document: boxes_of_weight(document)[1].__setitem__(1, [0]),
    "boxes for each other": lambda document: boxes_of_weight(document).sort(key=lambda box: (-box[0], box[1].reverse())),
    "a box too few": lambda document: boxes_of_weight(document).pop(),
    "a number of boxes that are not there": lambda document: weight(document).update(boxes=99),
    "boxes of another shape": boxes_of_another_shape,
    "a tensor in no part": lambda document: weight(document).pop("boxes"),
    "a tensor of another type": lambda document: weight(document).update(dtype="int32"),
    "a tensor that no part has": lambda document: document["tensors"].update(more=document["tensors"]["model.weight"]),
    "a tensor too few": lambda document: document["tensors"].pop("model.weight"),
}


@pytest.mark.parametrize("act", ROOTS.values(), ids=ROOTS)
def test_a_manifest_that_its_parts_do_not_fit(tmp_path: Path, act: Callable[[Document], None]) -> None:
    for step in (1, 2):
        save(tmp_path, step, world_size=2, ranks_per_part=1)
    assert len(list((tmp_path / "checkpoints" / "step-000000002").glob("*-part.json"))) == 2
    change_manifest(tmp_path / "checkpoints" / "step-000000002", act, whole=False)
    assert verdicts(tmp_path) == (EXIT_STORAGE, 1)
