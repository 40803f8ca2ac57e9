"""All ranks of made-up hosts in threads, over an exchange in memory; links are on loopback."""

import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from elastictrain.config.preflight import PreflightLimits
from elastictrain.errors import PreflightError
from elastictrain.preflight import host_preflight
from elastictrain.preflight.host_checks import HostFacts, OwnChecks
from elastictrain.preflight.host_preflight import HostPreflight, Report, find_layout
from elastictrain.preflight.links.probes import LinkOptions
from elastictrain.preflight.policy import Level
from elastictrain.preflight.verdict import Status, Verdict, failures
from elastictrain.surroundings import Surroundings
from tests.unit.preflight.made import settings, verdict
from tests.unit.preflight.table import Table

ALL: Mapping[str, str] = {}
LINKS = LinkOptions(grace_s=0.3)
LIMITS = PreflightLimits()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Verdict]]:
    """What hosts find of themselves, by host."""
    found: dict[str, list[Verdict]] = {}
    monkeypatch.setattr(host_preflight, "check_host", lambda at: found.get(at.host, [verdict(check="disk")]))
    return found


def check(
    ranks: list[tuple[str, int]],
    tmp_path: Path,
    *,
    absent: tuple[int, ...] = (),
    limit_s: float = 20.0,
    modes: Mapping[str, str] = ALL,
    ports: tuple[int, ...] = (),
    table: Table | None = None,
    limits: PreflightLimits = LIMITS,
) -> dict[int, Report | Exception]:
    table, results = table or Table(), {}
    environments: list[dict[str, str]] = [{} for _ in ranks]
    firsts: list[int] = []
    left_s: dict[int, float] = {}
    while len(firsts) < len(ranks):
        firsts += [len(firsts)] * ranks[len(firsts)][1]

    def run(rank: int, local_rank: int) -> None:
        layout = find_layout(ranks, rank=rank, local_rank=local_rank, rendezvous="127.0.0.1")
        # Hosts on loopback are what the check `interface` is against.
        wanted = replace(
            settings(interface="off", **modes), wait_s=min(2.0, limit_s / 2), limit_s=limit_s, ports=ports, limits=limits
        )
        one = HostPreflight(
            layout=layout,
            own=OwnChecks(level=Level.QUICK, settings=wanted, memory_dir=str(tmp_path)),
            exchange=table,
            environment=environments[rank],
            surroundings=Surroundings(host=ranks[rank][0], environment={}),
            links=LINKS,
        )
        try:
            results[rank] = one.check()
        except Exception as error:  # noqa: BLE001
            results[rank] = error
        left_s[rank] = time.monotonic()

    threads = []
    for rank in range(len(ranks)):
        local_rank = rank - firsts[rank]
        if rank not in absent:
            threads.append(threading.Thread(target=run, args=(rank, local_rank)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    check.environments = environments  # type: ignore[attr-defined]
    check.left_s = left_s  # type: ignore[attr-defined]
    return results


def codes(results: Mapping[int, Report | Exception]) -> dict[int, int]:
    """With which each rank leaves; 0 goes on."""
    reports = {rank: one for rank, one in sorted(results.items()) if isinstance(one, Report)}
    return {rank: 0 if one.error is None else one.error.exit_code for rank, one in reports.items()}


def test_one_host(tmp_path: Path, own: dict[str, list[Verdict]]) -> None:
    results = check([("a", 2), ("a", 2)], tmp_path)
    first, second = results[0], results[1]
    assert isinstance(first, Report)
    assert isinstance(second, Report)
    assert [one.check for one in first.verdicts] == ["infiniband", "disk"]
    # What passed matters to nobody else.
    assert second.verdicts == ()
    assert first.error is second.error is None
    assert first.plan is not None
    assert second.plan is None
    environments = check.environments  # type: ignore[attr-defined]
    assert environments[0] == environments[1]
    assert environments[1]["GLOO_SOCKET_IFNAME"] == "lo"


def test_hosts_come_back_with_the_same_verdicts_and_the_unfit_one_leaves(tmp_path: Path, own: dict[str, list[Verdict]]) -> None:
    own["b"] = [verdict("fail", check="storage", subject="b")]
    results = check([("a", 1), ("b", 2), ("b", 2)], tmp_path)
    reports = [one for one in results.values() if isinstance(one, Report)]
    assert len(reports) == 3, results
    assert len({tuple(failures(one.verdicts)) for one in reports}) == 1
    assert codes(results) == {0: 71, 1: 69, 2: 69}
    # What is between them was looked at, too.
    leader = results[0]
    assert isinstance(leader, Report)
    assert {"roster", "reachable", "clock"} <= {one.check for one in leader.verdicts}


def test_what_only_warns_stops_nobody(tmp_path: Path, own: dict[str, list[Verdict]]) -> None:
    own["a"] = [verdict("fail", check="storage", subject="a"), verdict("fail", check="disk", subject="a")]
    (result,) = check([("a", 1)], tmp_path, modes={"storage": "warn", "disk": "off"}).values()
    assert isinstance(result, Report)
    assert result.error is None
    assert [(one.check, one.status) for one in result.verdicts if one.status is Status.WARN] == [("storage", "warn")]
    assert not [one for one in result.verdicts if one.check == "disk"]


def test_a_host_that_never_comes_is_named(tmp_path: Path, own: dict[str, list[Verdict]]) -> None:
    results = check([("a", 1), ("b", 1), ("c", 1)], tmp_path, absent=(1,), limit_s=6.0)
    for rank in (0, 2):
        result = results[rank]
        assert isinstance(result, Report), result
        assert isinstance(result.error, PreflightError)
        assert {one.subject for one in result.verdicts if one.status is Status.FAIL} == {"b"}


def test_without_the_first_host_the_others_do_not_wait_for_ever(tmp_path: Path, own: dict[str, list[Verdict]]) -> None:
    began = time.monotonic()
    results = check([("a", 1), ("b", 1)], tmp_path, absent=(0,), limit_s=2.0)
    assert isinstance(results[1], PreflightError)
    assert time.monotonic() - began < 5


def test_checks_that_never_end_make_a_host_silent_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, list[Verdict]]
) -> None:
    released = threading.Event()

    def stuck(at: HostFacts) -> list[Verdict]:
        if at.host == "b":
            released.wait(30)
        return [verdict(check="disk", subject=at.host)]

    monkeypatch.setattr(host_preflight, "check_host", stuck)
    results = check([("a", 1), ("b", 1)], tmp_path, limit_s=4.0)
    released.set()
    for result in results.values():
        assert isinstance(result, Report), result
        failed = [one for one in result.verdicts if one.status is Status.FAIL]
        assert [(one.check, one.subject) for one in failed] == [("roster", "b")]


def test_a_host_whose_checks_break_does_not_pass_for_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, list[Verdict]], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(at: HostFacts) -> list[Verdict]:
        if at.host == "b":
            raise OSError("no home")
        return [verdict(check="disk", subject=at.host)]

    monkeypatch.setattr(host_preflight, "check_host", broken)
    results = check([("a", 1), ("b", 1)], tmp_path)
    assert codes(results) == {0: 71, 1: 69}
    (result, *_) = results.values()
    assert isinstance(result, Report)
    (failed,) = failures(result.verdicts)
    assert (failed.check, failed.subject, "OSError" in str(failed.measured)) == ("roster", "b", True)
    assert "no home" in caplog.text


def test_a_port_that_somebody_else_has_is_named_by_its_host(tmp_path: Path, own: dict[str, list[Verdict]]) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # Both hosts are on loopback here, so neither can listen; each must say so itself.
        results = check([("a", 1), ("b", 1)], tmp_path, ports=(port,), limit_s=12.0)
    told = [one for result in results.values() if isinstance(result, Report) for one in failures(result.verdicts)]
    assert any(one.check == "reachable" and one.subject == "b" and str(port) in f"{one.measured}" for one in told), results


def test_hosts_of_one_name_are_told_apart_in_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, list[Verdict]]
) -> None:
    seen: list[str] = []

    def both(at: HostFacts) -> list[Verdict]:
        seen.append(at.host)
        return [verdict("fail" if len(seen) == 1 else "pass", check="disk", subject=at.host)]

    monkeypatch.setattr(host_preflight, "check_host", both)
    ranks = [("x", 1), ("x", 1)]
    hosts = find_layout(ranks, rank=0, local_rank=0, rendezvous=None).hosts
    results = check(ranks, tmp_path)
    # Each looks up its own name as it is.
    assert seen == ["x", "x"]
    for result in results.values():
        assert isinstance(result, Report), result
        (failed,) = failures(result.verdicts)
        assert failed.subject in hosts
    assert sorted(codes(results).values()) == [69, 71]


class Slow(Table):
    """A table on which the result takes a while to reach the others, and what they say of it may not come at all."""

    def __init__(self, *, loses_acknowledgements: bool) -> None:
        super().__init__()
        self._loses_acknowledgements = loses_acknowledgements
        self.heard_s: list[float] = []
        self.published_s = 0.0

    def put(self, key: str, value: bytes) -> None:
        if key == "result":
            self.published_s = time.monotonic()
        if not (self._loses_acknowledgements and key.startswith("read/")):
            super().put(key, value)

    def get(self, key: str, *, limit_s: float) -> bytes | None:
        found = super().get(key, limit_s=limit_s)
        if key == "result":
            time.sleep(0.3)
            self.heard_s.append(time.monotonic())
        return found


@pytest.mark.parametrize("loses", [False, True])
def test_the_first_host_leaves_when_the_others_have_read_why_but_does_not_wait_for_ever(
    loses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, list[Verdict]]
) -> None:
    monkeypatch.setattr(host_preflight, "_READ_S", 1.0)
    own["b"] = [verdict("fail", check="storage", subject="b")]
    table = Slow(loses_acknowledgements=loses)
    results = check([("a", 1), ("b", 1)], tmp_path, table=table)
    assert codes(results) == {0: 71, 1: 69}
    left_s = check.left_s[0]  # type: ignore[attr-defined]
    assert left_s >= table.heard_s[0]
    if loses:
        assert 1.0 <= left_s - table.published_s < 5.0


def test_where_nothing_failed_nobody_has_to_say_that_he_read_it(tmp_path: Path, own: dict[str, list[Verdict]]) -> None:
    table = Table()
    check([("a", 1), ("b", 1)], tmp_path, table=table)
    assert "result" in table.rows
    assert not [key for key in table.rows if key.startswith("read/")]


class Lost(Table):
    """A table at which the host of one node rank ends as soon as it has heard who takes part."""

    def __init__(self, node_rank: int) -> None:
        super().__init__()
        self._own_word = f"links/found/0/{node_rank}"

    def put(self, key: str, value: bytes) -> None:
        if key == self._own_word:
            raise RuntimeError("killed")
        super().put(key, value)


def test_a_host_that_is_lost_after_all_had_met_is_named(tmp_path: Path, own: dict[str, list[Verdict]]) -> None:
    results = check(
        [("a", 1), ("b", 1), ("c", 1)], tmp_path, table=Lost(1), limits=PreflightLimits(contact_s=2.0), limit_s=15.0
    )
    assert isinstance(results[1], RuntimeError)
    for rank in (0, 2):
        result = results[rank]
        assert isinstance(result, Report), result
        assert isinstance(result.error, PreflightError)
        # Nothing that it does not answer any more is held against anybody else.
        assert {(one.check, one.subject) for one in failures(result.verdicts)} == {("roster", "b")}
