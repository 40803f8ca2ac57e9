"""Where the time of a start goes."""

import os
import time
from pathlib import Path

from elastictrain.identity import LAUNCHER, RESTARTED
from elastictrain.start_times import ORDERED, StartTimes, of_this_process


def test_each_moment_belongs_to_the_part_that_ends_after_it() -> None:
    now = [10.0]
    times = StartTimes({"process": 1.0}, {"launcher": 2.0}, clock=lambda: now[0])
    for name, at in (("loggers", 10.5), ("build", 13.0), ("loggers", 13.25)):
        now[0] = at
        times.end_part(name)
    assert times.seconds == {"process": 1.0, "loggers": 0.75, "build": 2.5}
    for at, begins in ((14.0, True), (18.0, False)):
        now[0] = at
        times.compiling(begins=begins)
    now[0] = 20.0
    times.end_part("first_step")
    seconds = times.of_first_step()
    assert (seconds["compile"], seconds["first_step"], seconds["launcher"]) == (4.0, 2.75, 2.0)
    assert sum(seconds.values()) == 1.0 + 2.0 + (20.0 - 10.0)


def born(folder: Path, name: str, at_s: float) -> None:
    (folder / name).mkdir()
    ticks = round(at_s * os.sysconf("SC_CLK_TCK"))
    (folder / name / "stat").write_text(f"7 (a name) of 2) S {' '.join(['0'] * 18)} {ticks} 0 0\n".replace(" of 2)", ")"))


def test_what_the_launcher_did_before_the_first_worker_is_told_apart(tmp_path: Path) -> None:
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    born(tmp_path, "self", now_s - 3.0)
    born(tmp_path, "41", now_s - 10.0)
    environment = {LAUNCHER: "41", RESTARTED: "0", ORDERED: str(now_s - 5.0)}
    times = of_this_process(environment, process=tmp_path)
    assert {name: round(value, 1) for name, value in times.before.items()} == {"launcher": 5.0, "fork_server": 2.0}
    assert 2.9 < times.seconds["process"] < 60
    assert of_this_process({**environment, RESTARTED: "1"}, process=tmp_path).before == {}
    assert of_this_process({**environment, ORDERED: ""}, process=tmp_path).before == {}


def test_a_host_without_proc_has_no_such_part(tmp_path: Path) -> None:
    assert of_this_process({}, process=tmp_path).seconds == {"process": 0.0}
