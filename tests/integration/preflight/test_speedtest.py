import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from elastictrain.errors import TransportError, UsageError
from elastictrain.preflight.__main__ import parse_size
from elastictrain.preflight.group.collectives import Collectives
from elastictrain.preflight.group.speedtest import measure

Lines = dict[int, SimpleQueue[Tensor]]


class TwoThreads(Collectives):
    """Two ranks in one process; `spoil` changes what rank 0 receives."""

    lines: ClassVar[Lines] = {}
    spoil: Callable[[Tensor], None] = staticmethod(lambda _: None)

    def all_reduce(self, buffer: Tensor) -> None:
        self.send_recv(other := torch.empty_like(buffer), buffer.clone(), source=1 - self.rank, target=1 - self.rank)
        buffer += other

    def send_recv(self, output: Tensor | None, buffer: Tensor | None, *, source: int, target: int) -> None:
        if buffer is not None:
            self.lines[target].put(buffer.clone())
        if output is not None:
            output.copy_(self.lines[self.rank].get(timeout=10))
            if self.rank == 0 and output.dtype is torch.uint8:
                self.spoil(output)


def both(kind: type[TwoThreads], size_bytes: int) -> list[list[float] | Exception]:
    kind.lines = {0: SimpleQueue(), 1: SimpleQueue()}
    found: dict[int, list[float] | Exception] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = measure(kind(rank, 2, torch.device("cpu")), size_bytes=size_bytes)
        except TransportError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[0], found[1]]


@pytest.mark.parametrize("size_bytes", [1, 1_000_003])
@pytest.mark.parametrize("chunk", [1 << 28, 4096])
def test_all_bytes_come(size_bytes: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastictrain.preflight.group.speedtest._CHUNK_BYTES", chunk)
    for times in both(TwoThreads, size_bytes):
        assert isinstance(times, list)
        assert len(times) == 3
        assert min(times) > 0


def test_changed_bytes_are_an_error() -> None:
    class Spoiled(TwoThreads):
        @staticmethod
        def spoil(output: Tensor) -> None:
            output[-1] ^= 4

    for error in both(Spoiled, 1000):
        assert isinstance(error, TransportError)
        assert "from 1 to 0" in str(error)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("64M", 64 << 20),
        ("10G", 10 << 30),
        ("1k", 1024),
        ("1.5KiB", 1536),
        ("2 MB", 2 << 20),
        ("7", 7),
        ("7B", 7),
        ("1024T", 1 << 50),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "M", "-1M", "64X", "1e9", "64 M 3", "0", "0.1", "1025T", "٣M", "nan", "9" * 400])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_size(text)
    assert repr(text) in str(refused.value)
