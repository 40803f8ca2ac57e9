import json
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from elastictrain.errors import EXIT_BUG, EXIT_CONFIG, EXIT_OK, EXIT_USAGE, UsageError
from elastictrain.simulate.__main__ import main
from elastictrain.simulate.costs import RunCosts, read_costs

SHORT = ("--hosts", "4", "--days", "0.2", "--host-h", "3")


def test_a_run_in_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "launch.max_hosts=3", "--price", "2.5"]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 hosts, 0.2 days, seed 1"
    assert max(map(len, lines)) <= 80


def test_a_sweep_has_a_line_for_each_setting_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    assert main([*SHORT, "--sweep", "every_s=60,600", "--sweep", "replicas=0,1", "--plot", str(plot)]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    settings = [" ".join(line.split()[:2]) for line in lines]
    assert settings == ["every_s replicas", "60 0", "60 1", "600 0", "600 1"]
    assert max(map(len, lines)) <= 80
    drawn = ElementTree.parse(plot).iter()
    assert sum(one.tag.endswith("circle") for one in drawn) == 4


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, float]]:
    assert main([*SHORT, "--json", *arguments]) == EXIT_OK
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_figures_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices"
    prices.write_text("0,1\n8640,3\n")
    (flat,), (changing,) = figures(capsys, "--price", "2"), figures(capsys, "--price", str(prices))
    assert flat["cost"] == pytest.approx(2 * flat["host_hours"])
    assert changing["cost"] == pytest.approx(2 * changing["host_hours"], rel=0.2)
    assert changing["cost"] != flat["cost"]
    assert flat["goodput"] == changing["goodput"]
    assert flat["generations"] > 1


def test_a_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,4\n3600,0\n7200,4\n17280,4\n")
    (found,) = figures(capsys, "--trace", str(trace), "launch.grow_every_s=10")
    assert found["host_hours"] == pytest.approx(4 * 4.8 - 4, abs=0.1)
    assert 0.7 < found["goodput"] < 0.79


def test_more_frequent_checkpoints_repeat_less_where_nothing_else_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    often, seldom = figures(capsys, "--sweep", "every_s=60,3600", "--replicas", "0")
    assert often["totals"]["lost_steps"] < seldom["totals"]["lost_steps"]  # type: ignore[index]


def test_a_run_that_is_given_up_shows_in_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hosts", "2", "--days", "0.1", "--worker-h", "0.001", "launch.max_failures=1"]) == EXIT_BUG
    assert "the run is given up" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--hosts", "0"], EXIT_USAGE, "--hosts must be >= 1, but is 0"),
        (["--every-s", "0"], EXIT_USAGE, "--every-s must be > 0, but is 0"),
        (["--step-s", "-1"], EXIT_USAGE, "--step-s must be > 0, but is -1"),
        (["--plot", "x.svg"], EXIT_USAGE, "--plot must go with --sweep"),
        (["--sweep", "speed=1"], EXIT_USAGE, "--sweep must be"),
        (["--sweep", "hosts=1.5"], EXIT_USAGE, "--sweep hosts must have whole numbers"),
        (["--sweep", "every_s=0"], EXIT_USAGE, "--every-s must be > 0"),
        (["--price", "cheap"], EXIT_USAGE, "--price must be"),
        (["--noticed", "2"], EXIT_USAGE, "--noticed must be"),
        (["--worker-h", "-1"], EXIT_USAGE, "--worker-h must be >= 0, but is -1"),
        (["--back-s", "nan"], EXIT_USAGE, "--back-s must be >= 0, but is nan"),
        (["min_hosts=3"], EXIT_USAGE, "launch.KEY=VALUE"),
        (["launch.min_hosts=70"], EXIT_USAGE, "launch.min_hosts must be at most --hosts (64), but is 70"),
        (["launch.min_hosts=0"], EXIT_CONFIG, "launch.min_hosts"),
        (["launch.hosts_min=2"], EXIT_CONFIG, "launch.hosts_min"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], code: int, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == code
    assert named in capsys.readouterr().err


def log(path: Path, *rows: Mapping[str, object]) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps({"rank": 0, "incarnation": "1-a", "step": 1, "loss": 1.0, **row}) for row in rows]
    path.write_text("\n".join([*lines, '{"time": 12, "event": "st']))


def test_what_things_take_is_read_from_the_events_of_a_run(tmp_path: Path) -> None:
    steps = [{"event": "step", "time": time_s} for time_s in (10.0, 11.0, 12.0, 13.5, 14.5)]
    snapshots = [{"event": "snapshot", "time": time_s, "stall_s": 0.25} for time_s in (11.0, 14.0)]
    after = [{"event": "step", "time": time_s, "incarnation": "2-b"} for time_s in (17.0, 18.0)]
    log(tmp_path / "events" / "1-a-r00000.jsonl", *steps, *snapshots, *after)
    saved = {
        "event": "checkpoint_saved",
        "time": 13.0,
        "reason": "interval",
        "bytes": 1,
        "seconds": {"write": 2.0, "commit": 0.5},
    }
    log(tmp_path / "events" / "1-a-k00000.jsonl", saved)
    group = {"event": "generation", "hosts": ["a"], "world_size": 1}
    begins = [{**group, "time": time_s, "incarnation": f"generation-{n}"} for n, time_s in ((1, 3.0), (2, 16.0))]
    ends = [{"event": "generation_ended", "time": 15.0, "incarnation": "generation-1", "kind": "grow", "exit_code": 0}]
    log(tmp_path / "events" / "launcher-a.jsonl", *begins, *ends)
    found = read_costs(str(tmp_path), RunCosts())
    assert found == RunCosts(
        step_s=1.0,
        restart_s=6.0,  # each to its first step, less that step
        recovery_s=0.0,
        stop_s=0.5,
        save_s=2.5,
        save_stall_s=0.5,
        snapshot_every_s=3.0,
        snapshot_stall_s=0.25,
    )


def test_a_start_with_new_launchers_on_all_hosts_is_a_restart_and_storage_counts_apart(tmp_path: Path) -> None:
    """Generations of two hosts begin at 100, 200 and 300. One launcher starts again before the second, both before the third,
    which finds its state in storage."""
    rows = list[dict[str, object]]()
    for number, (name, came) in enumerate((("1-a", "ab"), ("2-b", "a"), ("3-c", "ba"))):
        began_s = 100.0 * (number + 1)
        group = {
            "event": "generation",
            "time": began_s,
            "incarnation": f"generation-{name[0]}",
            "hosts": ["a", "b"],
            "world_size": 2,
        }
        for host in came:
            start = {
                "event": "launcher_started",
                "time": began_s - 2.0,
                "incarnation": "generation-0",
                "launcher": f"{host}-{number}",
                "processes": 1,
            }
            log(tmp_path / "events" / f"launcher-{host}-{number}.jsonl", start, group)
        first_s = began_s + {"1-a": 6.0, "2-b": 3.0, "3-c": 11.0}[name]
        tier, read_s = ("storage", 4.0) if name == "3-c" else ("peer", 0.5)
        resume = {"event": "resume", "time": first_s - 1.0, "tier": tier, "seconds": {"choose": 0.0, "read": read_s}}
        steps = [{"event": "step", "time": first_s + step} for step in range(5)]
        rows += [{**row, "incarnation": name} for row in (resume, *steps)]
    log(tmp_path / "events" / "r00000.jsonl", *rows)
    found = read_costs(str(tmp_path), RunCosts())
    # Less a step of a second each.
    assert (found.restart_s, found.recovery_s, found.restore_s) == (pytest.approx((5.0 + 6.0) / 2), pytest.approx(2.0), 4.0)


@pytest.mark.parametrize(("slow_s", "fixed_s"), [(1.0, 1.0), (1.5, 0.0), (1.25, 0.5), (0.9, 1.0), (4.0, 0.0)])
def test_the_part_of_a_step_that_takes_as_long_on_fewer_hosts(slow_s: float, fixed_s: float, tmp_path: Path) -> None:
    """Three workers take a second; two take `slow_s`, 1.5 s if the whole step is divided among them."""
    for name, world, took_s in (("1-a", 3, 1.0), ("2-b", 2, slow_s)):
        rows = [{"event": "start", "time": 100.0 * world, "world_size": world, "hosts": ["a"]}]
        rows += [{"event": "step", "time": 100.0 * world + took_s * step} for step in range(1, 20)]
        log(tmp_path / "events" / f"{name}-r00000.jsonl", *({**row, "incarnation": name} for row in rows))
    found = read_costs(str(tmp_path), RunCosts())
    assert (found.step_s, found.step_fixed_s) == (pytest.approx(1.0), pytest.approx(fixed_s))


def test_a_folder_without_steps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    with pytest.raises(UsageError, match="--run must be the folder of a run"):
        read_costs(str(tmp_path), RunCosts())
