"""Uploads in parts, over backends that fail."""

import pytest

from elastictrain.errors import TransientStorageError
from elastictrain.storage.failures import Retrying, RetryOptions
from elastictrain.storage.remote import PART_BYTES, RemoteStore


class OnceFailing:
    """A backend whose only upload counts as complete as soon as its completion was tried, like a file of fsspec."""

    def __init__(self, *, parallel: int) -> None:
        self.parallel = parallel
        self.completions = 0
        self.aborted = False

    def begin(self, path: str) -> str:
        return "upload"

    def put_part(self, path: str, upload: str, number: int, data: bytes) -> None:
        pass

    def finish(self, path: str, upload: str, parts: list[None]) -> None:
        self.completions += 1
        if self.completions == 1:
            raise ConnectionResetError

    def abort(self, path: str, upload: str) -> None:
        self.aborted = True


def write(backend: OnceFailing) -> None:
    retrying = Retrying(RetryOptions(), sleep=lambda seconds: None)
    store = RemoteStore("b", url="x://b", backend=lambda: backend, retrying=retrying)  # type: ignore[arg-type, return-value]
    with store.open_writer("k") as writer:
        writer.write(bytes(PART_BYTES))


def test_a_stream_that_failed_to_complete_is_not_completed_again() -> None:
    backend = OnceFailing(parallel=1)
    with pytest.raises(TransientStorageError, match="x://b/k"):
        write(backend)
    assert backend.completions == 1
    assert backend.aborted


def test_an_upload_in_parallel_parts_is_completed_again() -> None:
    backend = OnceFailing(parallel=4)
    write(backend)
    assert backend.completions == 2
    assert not backend.aborted
