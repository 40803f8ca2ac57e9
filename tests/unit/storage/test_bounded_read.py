import time
import tracemalloc
from pathlib import Path

import pytest

from elastictrain.errors import ObjectNotFoundError, ObjectTooLargeError, PermanentStorageError
from elastictrain.storage.bounded_read import RECORD_BYTES, read_bounded
from elastictrain.storage.opening import open_store


def test_a_file_that_claims_30_gb_costs_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "mark.json").open("wb") as file:
        file.truncate(30 << 30)
    store, began = open_store(str(tmp_path)), time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ObjectTooLargeError, match=r"mark\.json"):
            read_bounded(store, "mark.json")
        assert tracemalloc.get_traced_memory()[1] < 4 * RECORD_BYTES
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 5.0
    assert issubclass(ObjectTooLargeError, PermanentStorageError)


@pytest.mark.parametrize("size_bytes", [0, 1, 7, 8])
def test_what_fits_is_read_whole(tmp_path: Path, size_bytes: int) -> None:
    store = open_store(str(tmp_path))
    store.write("a", b"x" * size_bytes)
    assert read_bounded(store, "a", max_bytes=8) == b"x" * size_bytes
    store.write("a", b"x" * 9)
    with pytest.raises(ObjectTooLargeError):
        read_bounded(store, "a", max_bytes=8)
    with pytest.raises(ObjectNotFoundError):
        read_bounded(store, "b", max_bytes=8)
