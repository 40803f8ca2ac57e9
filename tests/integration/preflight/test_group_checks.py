"""The whole in a world of one, with collectives that need no process group."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from elastictrain.config.preflight import PreflightGroup, PreflightLimits
from elastictrain.distributed.device import Backend
from elastictrain.distributed.group import Group
from elastictrain.identity import Identity
from elastictrain.preflight.group import checks, measurements
from elastictrain.preflight.group.checks import GroupChecks, GroupFindings, Request
from elastictrain.preflight.group.collectives import MB, Collective, Collectives, Trial
from elastictrain.preflight.group.corruption import COPIES, DeviceFindings, multiply
from elastictrain.preflight.group.measurements import free_memory, measure_all_reduce, sweep_sizes
from elastictrain.preflight.group.members import neighbours
from elastictrain.preflight.verdict import Status
from tests.unit.preflight.group.ranks import members
from tests.unit.preflight.made import OF_GROUPS, rank, settings
from tests.unit.preflight.table import Table

CPU = torch.device("cpu")
PLACE = (0, 1, CPU)


class Alone(Collectives):
    """Collectives of one rank, which gets what it gives."""

    def run(self, trial: Trial, given: Tensor) -> Tensor:
        return given.clone()

    def all_reduce(self, buffer: Tensor) -> None: ...


def run(
    collectives: Alone,
    request: Request,
    *,
    on_part: Callable[[str], None] = lambda _: None,
    product: Callable[[Tensor, Tensor], Tensor] = multiply,
    backend: Backend = "gloo",
) -> GroupFindings:
    group = Group(cast(dist.ProcessGroup, None), backend, CPU)
    identity = Identity(0, 1, 0, 1, "h1", launched=False)
    checks = GroupChecks(
        group,
        Table(),
        identity,
        request,
        hosts=["h1"],
        on_part=on_part,
        collectives=collectives,
        product=product,
    )
    return checks.run()


def test_a_world_of_one() -> None:
    findings = run(Alone(*PLACE), Request(full=True))
    assert findings.usable
    assert {verdict.check for verdict in findings.verdicts} == {"present", "collectives", "matmul", "sdc"}
    assert all(verdict.status is Status.PASS for verdict in findings.verdicts)
    assert findings.points == ()


@pytest.mark.parametrize("check", ["present", "collectives", "matmul", "sdc"])
def test_each_can_be_left_out(check: str) -> None:
    assert check in OF_GROUPS
    entered: list[str] = []
    findings = run(Alone(*PLACE), Request(full=False, settings=settings(**{check: "off"})), on_part=entered.append)
    # Without it nobody knows who the others are.
    assert ("broadcast" in entered) is (check != "collectives")
    # One part measures both.
    assert {"present", "matmul"} <= set(entered)
    assert check not in {verdict.check for verdict in findings.verdicts}
    assert len({verdict.check for verdict in findings.verdicts}) == 3


def test_what_nobody_wants_to_know_is_not_measured() -> None:
    entered: list[str] = []
    run(Alone(*PLACE), Request(full=False, settings=settings(matmul="off", sdc="off")), on_part=entered.append)
    assert "matmul" not in entered


@pytest.mark.parametrize("full", [False, True])
def test_a_single_gpu_communicates_with_nobody(full: bool) -> None:
    parts: list[str] = []
    found = run(Alone(*PLACE), Request(full=full), on_part=parts.append, backend="nccl")
    assert {one.check for one in found.verdicts} == {"present", "matmul", "sdc"}
    assert {one.split()[0] for one in parts} == {"present", "matmul"}


@pytest.mark.parametrize(("full", "fails", "order"), [(True, False, 2), (True, True, 0), (False, False, 1)])
def test_what_is_to_be_done_meanwhile_begins_once_a_gpu_has_copied(
    full: bool, fails: bool, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, begun = list[str](), threading.Event()

    def examine(device: torch.device, at: Callable[[str], None], **_: object) -> DeviceFindings:
        if fails:
            raise RuntimeError
        at(COPIES)
        assert not begun.wait(0.2)
        done.append("copied")
        at("memory")
        assert begun.wait(20.0) is full if full else True
        return DeviceFindings(700.0)

    def in_background() -> None:
        done.append("in the background")
        begun.set()

    for module, name, value in (
        (torch.cuda, "set_device", None),
        (torch.cuda, "get_device_name", "made up"),
        (torch.cuda, "empty_cache", None),
        (measurements, "free_memory", 1 << 36),
        (checks, "read_nvidia", None),
    ):
        monkeypatch.setattr(module, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(checks, "examine_device", examine)
    group, identity = (
        Group(cast(dist.ProcessGroup, None), "nccl", torch.device("cuda", 0)),
        Identity(0, 1, 0, 1, "h1", launched=False),
    )
    began = time.monotonic()
    found = GroupChecks(group, Table(), identity, Request(full=full), hosts=["h1"], in_background=in_background).run()
    assert (found.usable, done) == (not fails, ["copied", "in the background"][:order])
    assert time.monotonic() - began < 10


def test_a_wrong_bit_names_the_device() -> None:
    def flip(left: Tensor, right: Tensor) -> Tensor:
        result = multiply(left, right)
        result.view(torch.int32)[5, 7] ^= 1
        return result

    found = run(Alone(*PLACE), Request(full=False), product=flip)
    assert [(one.check, one.subject, one.status) for one in found.verdicts if one.status is not Status.PASS] == [
        ("sdc", rank(0, "h1"), Status.FAIL)
    ]


def test_a_collective_that_does_nothing_is_wrong() -> None:
    class Lazy(Alone):
        def run(self, trial: Trial, given: Tensor) -> Tensor:
            return given * float("nan") if trial.collective is Collective.ALL_GATHER else given

    [bad] = [one for one in run(Lazy(*PLACE), Request(full=False)).verdicts if one.status is not Status.PASS]
    assert (bad.status, bad.subject, bad.unit) == (Status.FAIL, rank(0, "h1"), "all_gather")
    assert "nan" in str(bad.measured)


def test_a_collective_that_hangs_ends_the_checks_in_time() -> None:
    gate = threading.Event()

    class Hanging(Alone):
        def run(self, trial: Trial, given: Tensor) -> Tensor:
            if trial.collective is Collective.BROADCAST and given.dtype == torch.bfloat16:
                gate.wait(30)
            return given

    began = time.monotonic()
    findings = run(
        Hanging(*PLACE), Request(full=False, settings=PreflightGroup(limits=PreflightLimits(collective_s=1.0)), grace_s=0.1)
    )
    gate.set()
    assert time.monotonic() - began < 5
    assert not findings.usable
    last = findings.verdicts[-1]
    assert (last.check, last.subject) == ("collectives", rank(0, "h1"))
    assert all(word in str(last.measured) for word in ("broadcast", "bfloat16"))


def test_what_nobody_writes_to_is_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that does nothing must not be right by accident."""
    for name in ("_gather", "_scatter"):
        monkeypatch.setattr(f"elastictrain.preflight.group.collectives.{name}", lambda output, given: None)
    monkeypatch.setattr(dist, "all_to_all_single", lambda output, given: None)
    monkeypatch.setattr(Collectives, "send_recv", lambda self, output, buffer, *, source, target: None)
    for collective, num in (("all_gather", 14), ("reduce_scatter", 7), ("all_to_all", 14), ("send_recv", 14)):
        trial = Trial(Collective(collective), 7)
        given = torch.zeros(7 if collective == "all_gather" else 14)
        received = Collectives(0, 2, CPU).run(trial, given)
        assert (len(received), bool(received.isnan().all())) == (num, True)


def test_the_largest_message_counts() -> None:
    measured: list[str] = []
    sizes = sweep_sizes(cuda=False, full=True, free_bytes=1 << 30)
    points = measure_all_reduce(Alone(0, 2, CPU), measured.append, sizes=sizes)
    assert [point.num_bytes for point in points] == [MB, 16 * MB]
    assert measured == [f"all_reduce of {MB} bytes", f"all_reduce of {16 * MB} bytes"]


def test_a_sweep_over_a_slow_link_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr("elastictrain.preflight.group.measurements.SWEEP_BUDGET_S", 20.0)
    clock = lambda: float(next(ticks))  # noqa: E731
    (point,) = measure_all_reduce(Alone(0, 2, CPU), lambda _: None, sizes=(MB, 16 * MB), clock=clock)
    assert point.num_bytes == MB


@pytest.mark.parametrize(("once_s", "rounds"), [(0.01, 5), (5.0, 3), (0.0, 40)])
def test_what_is_quick_is_repeated_more_often(once_s: float, rounds: int) -> None:
    calls: list[int] = []

    class Timed(Alone):
        def all_reduce(self, buffer: Tensor) -> None:
            # The times of all ranks are one float64 each.
            if buffer.dtype == torch.float32:
                calls.append(len(buffer))

    (point,) = measure_all_reduce(Timed(0, 2, CPU), lambda _: None, sizes=(MB,), clock=lambda: once_s * len(calls))
    assert len(calls) == 2 + rounds
    assert point.seconds == pytest.approx(once_s)


def test_large_messages_are_few_where_memory_is() -> None:
    assert sweep_sizes(cuda=True, full=True, free_bytes=1 << 40) == (MB, 64 * MB, 1024 * MB)
    assert sweep_sizes(cuda=True, full=False, free_bytes=1 << 40) == (MB, 64 * MB)
    assert sweep_sizes(cuda=True, full=True, free_bytes=256 * MB) == (MB, 64 * MB)
    assert sweep_sizes(cuda=False, full=False, free_bytes=1 << 40) == (MB,)
    assert sweep_sizes(cuda=True, full=True, free_bytes=10) == (MB,)
    assert sweep_sizes(cuda=True, full=True, table=True, free_bytes=1 << 40) == tuple(1024 * 4**power for power in range(11))
    assert sweep_sizes(cuda=False, full=True, table=True, free_bytes=1 << 40)[-1] == 64 * MB
    assert free_memory(CPU, local_world_size=2) * 2 == pytest.approx(free_memory(CPU, local_world_size=1), rel=0.2)


def test_neighbours_are_in_the_order_of_their_devices() -> None:
    group = members("h1", "h2", "h1", "h2")
    turned = tuple(replace(one, local_rank=1 - one.local_rank) for one in group)
    assert neighbours(group, host="h2") == [1, 3]
    assert neighbours(turned, host="h2") == [3, 1]
