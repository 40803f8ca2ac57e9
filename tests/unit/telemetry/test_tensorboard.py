import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import torch
from tensorboard.compat.proto.summary_pb2 import Summary

from elastictrain.errors import AccessDeniedError
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Bytes, ObjectInfo, ObjectWriter
from elastictrain.telemetry.progress import Reading
from elastictrain.telemetry.tensorboard import (
    VERSION,
    HostProbe,
    LocalEventFile,
    ScalarWriter,
    StoredEventFile,
    encode_event,
    scalars_of,
)


class FakeStore:
    """Keeps whole objects, as an object store does; or fails, or hangs until it is let go."""

    def __init__(self, url: str, *, error: Exception | None = None, gate: threading.Event | None = None) -> None:
        self.url = url
        self.error = error
        self.gate = gate
        self.entered = threading.Event()
        self.objects: dict[str, bytes] = {}
        self.writes = 0

    def write(self, key: str, data: Bytes) -> None:
        self.entered.set()
        if self.gate is not None:
            self.gate.wait(10.0)
        if self.error is not None:
            raise self.error
        self.writes += 1
        self.objects[key] = bytes(data)

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        return self.objects[key][start:end]

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        raise NotImplementedError

    def create(self, key: str, data: Bytes) -> None:
        raise NotImplementedError

    def open_writer(self, key: str) -> AbstractContextManager[ObjectWriter]:
        raise NotImplementedError

    def stat(self, key: str) -> ObjectInfo:
        raise NotImplementedError

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        raise NotImplementedError

    def delete(self, key: str) -> None:
        raise NotImplementedError


def read_scalar(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The curve that TensorBoard itself would draw."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curve = EventAccumulator(str(folder))
    curve.Reload()
    return [(point.step, point.value) for point in curve.Scalars(tag)]


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    writer = ScalarWriter(open_store(str(tmp_path)), purge_step=None, flush_s=10.0)
    for step in (10, 20):
        writer.write(step, {"loss/train": 1.0 / step, "optimizer/lr": 0.5})
    writer.close(timeout_s=10.0)
    assert read_scalar(tmp_path / "tensorboard", "loss/train") == [(10, pytest.approx(0.1)), (20, pytest.approx(0.05))]
    assert read_scalar(tmp_path / "tensorboard", "optimizer/lr") == [(10, 0.5), (20, 0.5)]


def test_a_resume_makes_tensorboard_forget_the_steps_that_were_lost(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    wall_time = 1_700_000_000.0
    for purge_step, steps, value in ((None, (1, 2, 3, 4), 1.0), (3, (3,), 2.0)):
        wall_time += 60.0
        writer = ScalarWriter(store, purge_step=purge_step, flush_s=10.0, clock=lambda now=wall_time: now)  # type: ignore[misc]
        for step in steps:
            writer.write(step, {"loss/train": value})
        writer.close(timeout_s=10.0)
    assert read_scalar(tmp_path / "tensorboard", "loss/train") == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_parts_on_an_object_store_are_bounded_and_read_as_one_curve(tmp_path: Path) -> None:
    store = FakeStore("s3://bucket/run")
    file = StoredEventFile(store, key="tensorboard/events.out.tfevents.0000000001.host.1", clock=lambda: 1.0, part_bytes=200)
    file.append(encode_event(wall_time=1.0, file_version=VERSION))
    for step in range(1, 31):
        summary = Summary(value=[Summary.Value(tag="loss/train", simple_value=float(step))])
        file.append(encode_event(wall_time=1.0, step=step, summary=summary))
    file.flush()
    assert len(store.objects) > 3
    assert max(map(len, store.objects.values())) < 300
    assert all(b"brain.Event:2" in content for content in store.objects.values())
    for key, content in store.objects.items():
        (tmp_path / Path(key).name).write_bytes(content)
    assert read_scalar(tmp_path, "loss/train") == [(step, float(step)) for step in range(1, 31)]


def test_an_object_store_gets_whole_objects_from_the_thread() -> None:
    store = FakeStore("s3://bucket/run")
    writer = ScalarWriter(store, purge_step=None, flush_s=10.0, clock=lambda: 1.0)
    writer.write(1, {"loss/train": 1.0})
    writer.close(timeout_s=10.0)
    (key,) = store.objects
    assert key.startswith("tensorboard/events.out.tfevents.0000000001.")
    assert key.endswith(".0000")


def test_an_unchanged_part_is_not_written_again() -> None:
    store = FakeStore("s3://bucket/run")
    file = StoredEventFile(store, key="k", clock=lambda: 1.0)
    file.flush()
    assert store.writes == 0
    file.append(b"x")
    file.flush()
    file.flush()
    assert store.writes == 1


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_local_folder_is_appended_to(tmp_path: Path, scheme: str) -> None:
    store = open_store(f"{scheme}{tmp_path}")
    assert isinstance(store, LocalStore)
    file = LocalEventFile(store, key="tensorboard/x")
    file.append(b"a")
    file.append(b"b")
    assert (tmp_path / "tensorboard" / "x").read_bytes() == b"ab"


def test_file_names_sort_by_time(tmp_path: Path) -> None:
    for wall_time in (1_000_000_000.0, 999_999_999.0):
        ScalarWriter(open_store(str(tmp_path)), purge_step=None, flush_s=10.0, clock=lambda now=wall_time: now).close(  # type: ignore[misc]
            timeout_s=10.0
        )
    names = sorted(path.name for path in (tmp_path / "tensorboard").iterdir())
    assert [name.split(".")[3] for name in names] == ["0999999999", "1000000000"]


def test_a_failure_is_logged_once_and_never_reaches_the_trainer(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore("s3://bucket/run", error=AccessDeniedError("s3://bucket/run: denied"))
    with caplog.at_level(logging.WARNING, logger="elastictrain.telemetry.tensorboard"):
        writer = ScalarWriter(store, purge_step=None, flush_s=10.0, max_waiting=4)
        writer.write(1, {"loss/train": 1.0})
        writer.close(timeout_s=10.0)
        for step in range(2, 20):
            writer.write(step, {"loss/train": 1.0})
        writer.close(timeout_s=10.0)
    assert [record.getMessage() for record in caplog.records] == [
        "TensorBoard is off for the rest of this generation: AccessDeniedError: s3://bucket/run: denied"
    ]


def test_a_hanging_store_costs_points_and_a_bounded_wait_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    store = FakeStore("s3://bucket/run", gate=gate)
    with caplog.at_level(logging.WARNING, logger="elastictrain.telemetry.tensorboard"):
        writer = ScalarWriter(store, purge_step=None, flush_s=10.0, max_waiting=2)
        assert store.entered.wait(10.0)
        for step in range(5):
            writer.write(step, {"loss/train": 1.0})
        writer.close(timeout_s=0.05)
    gate.set()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "TensorBoard's storage is too slow: points are being dropped, the first at step 2",
        "TensorBoard's storage is stuck: the last points are lost",
    ]


def test_every_figure_has_its_tag() -> None:
    reading = Reading(step=3, loss=1.0, lr=2.0, grad_norm=3.0, tokens_per_s=4.0, step_s=5.0, mfu=0.5, skipped=6)
    assert scalars_of(reading) == {
        "loss/train": 1.0,
        "optimizer/lr": 2.0,
        "optimizer/grad_norm": 3.0,
        "optimizer/skipped": 6.0,
        "speed/tokens_per_s": 4.0,
        "speed/step_s": 5.0,
        "speed/mfu": 0.5,
    }


def test_what_is_not_known_has_no_tag() -> None:
    reading = Reading(step=3, loss=1.0, lr=2.0, grad_norm=3.0, tokens_per_s=4.0, step_s=5.0, mfu=None, skipped=0)
    assert "speed/mfu" not in scalars_of(reading)


def test_a_host_without_cuda_has_plausible_figures_and_none_of_a_device() -> None:
    values = HostProbe(torch.device("cpu")).scalars()
    assert values.keys() == {"system/cpu_percent", "system/memory_gb"}
    assert 0.0 <= values["system/cpu_percent"] <= 100.0
    assert 0.0 < values["system/memory_gb"] < psutil.virtual_memory().total / 1e9
