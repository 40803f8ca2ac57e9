"""Boxes of tensors come back whatever they were sharded over."""

import random
from pathlib import Path

import torch

from elastictrain.checkpoint.commands.survey import find_checkpoint, locate
from elastictrain.checkpoint.safetensors_format import BY_NAME
from elastictrain.checkpoint.tensor_bytes import dtype_named, read_box, read_tensor
from tests.integration.checkpoint.commands.made import save


def test_every_element_type_and_empty_and_scalar_tensors(tmp_path: Path) -> None:
    raw = torch.arange(8 * 6 * 4, dtype=torch.uint8) % 2
    tensors = {name: raw.view(dtype_named(name)).reshape(4, -1) for name in BY_NAME}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "flat": torch.zeros(4, 0)}
    save(tmp_path, 10, tensors=tensors, world_size=3, chunk_bytes=16)
    found = find_checkpoint(locate(str(tmp_path)))
    for name, tensor in tensors.items():
        read = read_tensor(found.folder, found.manifest.tensors[name])
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_boxes(tmp_path: Path) -> None:
    tensor = torch.arange(7 * 5 * 3).reshape(7, 5, 3)
    dice = random.Random(1)
    for dim in range(3):
        save(tmp_path / str(dim), 10, tensors={"x": tensor}, world_size=3, dim=dim, chunk_bytes=70)
        found = find_checkpoint(locate(str(tmp_path / str(dim))))
        for _ in range(30):
            offsets = tuple(dice.randrange(extent) for extent in tensor.shape)
            sizes = tuple(dice.randrange(1, extent - first + 1) for extent, first in zip(tensor.shape, offsets, strict=True))
            box = read_box(found.folder, found.manifest.tensors["x"], offsets=offsets, sizes=sizes, threads=2)
            assert torch.equal(box, tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))])
