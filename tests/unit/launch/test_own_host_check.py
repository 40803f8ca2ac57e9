from dataclasses import fields, replace
from pathlib import Path

import pytest

from elastictrain.config.composed import RunConfig
from elastictrain.config.load import load
from elastictrain.config.preflight import MODES, PreflightChecks
from elastictrain.launch.own_host import why_unfit
from elastictrain.preflight.host_checks import HostFacts, OwnChecks
from elastictrain.preflight.policy import Level
from elastictrain.preflight.verdict import Verdict, describe
from elastictrain.surroundings import Surroundings
from tests.unit.preflight.made import verdict
from tests.unit.preflight.transport.made import MadeHost


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load(["recipe=llama_tiny", "preflight=quick", "run.dir=/data/run", "run.num_threads=3"], with_task=False)


class Asked:
    """Takes down what is to be checked, and finds what it is told to."""

    def __init__(self, *found: Verdict) -> None:
        self.found = found
        self.asked: list[OwnChecks] = []

    def __call__(self, at: HostFacts) -> list[Verdict]:
        self.asked.append(at.asked)
        return list(self.found)


def unfit(config: RunConfig, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("elastictrain.launch.own_host.check_host", asked)
    return why_unfit(config, Surroundings(host="a"), processes=4)


def test_a_host_that_passes(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(verdict(), verdict("warn"), verdict("skip"))
    assert unfit(config, asked, monkeypatch) == ""
    (options,) = asked.asked
    assert options.level is Level.QUICK
    assert options.local_world_size == 4
    assert (options.run_dir, options.cpus) == ("/data/run", 12.0)
    assert options.transport


def test_storage_is_not_asked_here(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is away the registry says so, and waits; a host that leaves for it would be missed."""
    asked = Asked()
    unfit(config, asked, monkeypatch)
    assert asked.asked[0].settings.modes == {**MODES, "storage": "off"}


def test_the_first_failure_is_told_with_its_remedy(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(
        verdict("warn", check="load"),
        verdict("fail", check="disk", measured=1.0, expected=5.0, unit="GB"),
        verdict("fail", check="gpus"),
    )
    assert unfit(config, asked, monkeypatch) == describe(asked.found[1])


def test_without_a_preflight_nothing_is_asked(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(verdict("fail"))
    assert unfit(replace(config, preflight=replace(config.preflight, level="off")), asked, monkeypatch) == ""
    assert asked.asked == []


def test_a_gpu_that_is_needed_is_asked_for_first(config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = Asked()
    monkeypatch.setattr("elastictrain.launch.own_host.check_host", asked)
    needing = replace(config, parallel=replace(config.parallel, backend="nccl"))
    on_gloo = replace(config, parallel=replace(config.parallel, backend="gloo", device="cuda"))
    for one in (needing, on_gloo, replace(needing, preflight=replace(config.preflight, level="off"))):
        assert "GPU" in why_unfit(one, Surroundings(host="a", root=tmp_path, environment={}), processes=4)
    assert asked.asked == []


def test_the_checks_themselves_of_a_host_made_up_of_files(config: RunConfig, tmp_path: Path) -> None:
    names = {field.name: "off" for field in fields(PreflightChecks) if field.name != "memory"}
    only_memory = replace(config.preflight, checks=replace(config.preflight.checks, **names))
    made = MadeHost(tmp_path / "root", environment={"XDG_STATE_HOME": str(tmp_path)})
    made.write("/proc/self/cgroup", "0::/\n")
    made.write("/sys/fs/cgroup/memory.max", f"{64 << 30}\n")
    made.write("/sys/fs/cgroup/memory.current", f"{1 << 30}\n")
    asked = replace(config, preflight=only_memory)
    assert why_unfit(asked, made.surroundings(), processes=1) == ""
    made.write("/sys/fs/cgroup/memory.current", f"{64 << 30}\n")
    assert why_unfit(asked, made.surroundings(), processes=1).startswith("h1: memory is ")
