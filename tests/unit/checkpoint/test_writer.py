"""Objects that are created once."""

import pytest

from elastictrain.chaos.memory_store import MemoryStore
from elastictrain.checkpoint.writer import create_exactly
from elastictrain.errors import CheckpointError, ObjectExistsError, TransientStorageError

KEY, RAW = "checkpoints/step-000000015/manifest.json", b'{"step": 15}'


def test_a_manifest_that_was_created_in_part_does_not_stay() -> None:
    store = MemoryStore()
    store.after = lambda _, key: store.objects.update({key: RAW[:-1]})
    with pytest.raises(CheckpointError):
        create_exactly(store, KEY, RAW)
    assert not store.objects


def test_of_a_reply_that_was_lost_the_object_tells() -> None:
    def lost(_: str, key: str) -> None:
        raise TransientStorageError(key)

    store = MemoryStore(after=lost)
    create_exactly(store, KEY, RAW)
    assert store.objects == {KEY: RAW}


def test_an_object_of_somebody_else_stays() -> None:
    store = MemoryStore({KEY: RAW[:-1]})
    with pytest.raises(ObjectExistsError):
        create_exactly(store, KEY, RAW)
    assert store.objects == {KEY: RAW[:-1]}
