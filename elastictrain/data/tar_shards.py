"""Webdataset's tar files as a map-style data set: any sample by its index, with one read."""

import io
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from elastictrain.data.dataset import Sample
from elastictrain.data.tar_index import end_of, members, read_index
from elastictrain.errors import DataError, ObjectNotFoundError
from elastictrain.storage.bounded_read import run_concurrently
from elastictrain.storage.local import local_path
from elastictrain.storage.opening import absolute_url, open_store
from elastictrain.storage.store import Store


class TarShards:
    """The samples of tar files that `python -m elastictrain.data index` has indexed, in their order.

    A sample is {"__key__": str, EXTENSION: bytes, ...}, or what `transform` makes of that. Reading raises DataError if a tar
    file is not what was indexed, which its size and the sample's headers tell; StorageError."""

    def __init__(self, index: str, *, transform: Callable[[dict[str, Any]], Sample] | None = None) -> None:
        """`index`: the folder of the index, a path or any fsspec URL. `transform`: a function that pickle can send to data
        workers; it may draw random numbers. Raises: DataError; StorageError."""
        self._folder = absolute_url(index).rstrip("/")
        self._index, self._ranges = read_index(open_store(index, follow_links=True))
        self._transform = transform
        self._ends = tuple(accumulate(shard.num_samples for shard in self._index.shards))
        self._stores: dict[str, Store] = {}
        self._found: set[int] = set()  # shards of which this process has seen the size
        self._fetched: dict[int, tuple[str, bytes]] = {}

    def __len__(self) -> int:
        return self._index.num_samples

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not in [0, {len(self)})")
        url, data = self._fetched.get(index) or self._read(index)
        sample: dict[str, Any] = {}
        end = 0
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
                for key, extension, member in members(tar):
                    content = tar.extractfile(member)
                    assert content is not None  # noqa: S101
                    if sample.setdefault("__key__", key) != key:
                        raise _changed(url, f"has another sample, {key}, where sample {index} was")
                    sample[extension], end = content.read(), end_of(member)
        except tarfile.TarError as error:
            raise _changed(url, f"is damaged where sample {index} was: {error}") from None
        if end != len(data):
            raise _changed(url, f"ends where sample {index} was")
        return sample if self._transform is None else self._transform(sample)

    def fetch(self, indices: Sequence[int]) -> None:
        """Read remote samples that are asked for next, all at once. Raises: as reading one of them."""
        remote = [index for index in dict.fromkeys(indices) if local_path(self._url(bisect_right(self._ends, index))) is None]
        found = run_concurrently([partial(self._read, index) for index in remote])
        self._fetched = dict(zip(remote, found, strict=True))

    def _url(self, number: int) -> str:
        url = self._index.shards[number].url
        return url if "://" in url or url.startswith("/") else f"{self._folder}/{url}"

    def _read(self, index: int) -> tuple[str, bytes]:
        number = bisect_right(self._ends, index)
        shard, url = self._index.shards[number], self._url(number)
        folder, _, key = url.rpartition("/")
        if (store := self._stores.get(folder)) is None:
            store = self._stores[folder] = open_store(folder or "/", follow_links=True)
        begin, end = map(int, self._ranges[index])
        try:
            if number not in self._found:
                if (size_bytes := store.stat(key).size_bytes) != shard.size_bytes:
                    raise _changed(url, f"has {size_bytes} bytes in place of {shard.size_bytes}")
                self._found.add(number)
            return url, store.read(key, start=begin, end=end)
        except ObjectNotFoundError:
            raise _changed(url, "does not exist") from None

    def __getstate__(self) -> dict[str, object]:
        # Connections are made anew where the data set is sent to.
        return {**self.__dict__, "_stores": {}, "_found": set(), "_fetched": {}}


def _changed(url: str, found: str) -> DataError:
    return DataError(f"{url} must be the tar file that was indexed, but {found}; put it back, or index the files again")
