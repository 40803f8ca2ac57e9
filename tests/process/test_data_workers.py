"""The reading processes: they outlast the signals that a process group gets, and never outlive their trainer."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SAMPLES = """
    import os, signal, sys, time
    import torch

    class Samples:
        def __init__(self, trap="", delay_s=0.0):
            self.trap, self.delay_s = trap, delay_s
        def __len__(self):
            return 1000
        def __getitem__(self, index):
            time.sleep(self.delay_s)
            if self.trap == "die" and index == 22:
                if os.fork() == 0:  # a child that keeps the worker's connection open
                    time.sleep(4)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trap == "raise" and index == 22:
                raise KeyError("no such picture")
            if self.trap == "hang" and index == 22:
                time.sleep(1000)
            return {"x": torch.tensor([index, os.getpid(), torch.get_num_threads()])}
"""

MAIN = """
    import json, os, signal, sys, time
    from elastictrain.data.assignment import Share, passes
    from elastictrain.data.loader import Loader
    from elastictrain.data.samples import SampleReader
    from samples import Samples

    def loader(dataset, *, workers=2, first_step=0, last_step=12, pool=None):
        share = Share(global_batch=8, micro_batch=2, world_size=2, rank=1)
        planned = passes(
            first_step, last_step=last_step, share=share, num_samples=len(dataset), seed=0, shuffle=False)
        return Loader(SampleReader(dataset), planned, workers=workers, prefetch=4, pool=pool)

    def children():
        import psutil
        return [p for p in psutil.Process().children() if "resource_tracker" not in " ".join(p.cmdline())]
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[object]:
    """Starts a script that has `loader` and `Samples`; whatever is still running at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str) -> subprocess.Popen[str]:
        (tmp_path / "samples.py").write_text(textwrap.dedent(SAMPLES))
        (tmp_path / "main.py").write_text(
            textwrap.dedent(MAIN) + "\nif __name__ == '__main__':\n" + textwrap.indent(textwrap.dedent(body), "    ")
        )
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "main.py")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            process.kill()


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, error = process.communicate(timeout=90)
    return out, error


def gone(pids: list[int], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.02)
    return False


def test_the_same_batches_as_without_workers(script) -> None:
    out, error = finish(
        script("""
        found, seen = [], {}
        for workers in (0, 2, 3):
            with loader(Samples(), workers=workers, first_step=3) as batches:
                read = list(batches)
            found.append([(one.step, one.portion, one.sample_ids, one.batch["x"][:, 0].tolist()) for one in read])
            seen[workers] = [tuple(row) for one in read for row in one.batch["x"][:, 1:].tolist()]
        assert found[0] == found[1] == found[2], found
        assert len(found[0]) == 18
        seen = seen[2]
        assert len({pid for pid, _ in seen}) == 2 and os.getpid() not in {pid for pid, _ in seen}, seen
        assert {threads for _, threads in seen} == {1}, seen
        assert not children()
        print("ok")
        """)
    )
    assert (out, error) == ("ok\n", "")


def test_another_loader_continues_with_the_same_workers(script) -> None:  # type: ignore[no-untyped-def]
    out, err = finish(
        script("""
        first = loader(Samples())
        seen = [next(first) for _ in range(3)]
        pool = first.release()
        assert pool is not None
        # What the first one had asked for must not be taken for what the second one asks for.
        with loader(Samples(), first_step=2, pool=pool) as second:
            rest = list(second)
        assert {one.batch["x"][0, 1].item() for one in seen} == {one.batch["x"][0, 1].item() for one in rest}
        assert [tuple(one.batch["x"][:, 0].tolist()) for one in rest] == [one.sample_ids for one in rest]
        assert children() == []
        # Workers that were killed are not handed on, not even where the reader waits for room and has not noticed.
        third = loader(Samples())
        next(third)
        while len(third._ready) < 4:
            time.sleep(0.01)
        third._pool.kill()
        assert third.release() is None
        print("continued", len(rest))
    """)
    )
    assert out.split() == ["continued", "20"], err


def test_sigterm_to_the_whole_group_leaves_the_workers_alone(script) -> None:
    process = script("""
        stops = []
        signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
        signal.signal(signal.SIGINT, lambda *_: stops.append(1))
        with loader(Samples(delay_s=0.01), last_step=60) as batches:
            print("starting", flush=True)
            for number, one in enumerate(batches):
                if number == 0:
                    print("reading", flush=True)
        assert number == 119 and stops, (number, stops)
        print("ok", flush=True)
    """)
    assert process.stdout is not None
    for line in ("starting\n", "reading\n"):
        assert process.stdout.readline() == line
        # The first ones arrive while the workers are still starting.
        for _ in range(5):
            os.killpg(process.pid, signal.SIGTERM)
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.05)
    out, error = finish(process)
    assert (out, error, process.returncode) == ("ok\n", "", 0)


@pytest.mark.parametrize("moment", ["starting", "reading"])
def test_a_killed_trainer_leaves_no_worker(script, moment: str) -> None:
    process = script("""
        with loader(Samples(), last_step=10**6) as batches:
            if sys.argv[1:] != ["x"]:
                while len(children()) < 2:
                    time.sleep(0.01)
                print("starting", *(p.pid for p in children()), flush=True)
            next(batches)
            # Of the other worker: both have started by then.
            next(batches)
            print("reading", flush=True)
            time.sleep(1000)
    """)
    assert process.stdout is not None
    word, *pids = process.stdout.readline().split()
    assert word == "starting"
    assert len(pids) == 2
    if moment == "reading":
        assert process.stdout.readline() == "reading\n"
    process.kill()
    # One that is still importing torch ends when it has looked for its parent.
    assert gone([int(pid) for pid in pids], within_s=1 if moment == "reading" else 60)


def test_a_dead_worker_is_reported_at_once(script) -> None:
    out, error = finish(
        script("""
        from elastictrain.errors import ElasticTrainError
        batches = loader(Samples("die"))
        started = None
        try:
            for one in batches:
                started = time.monotonic()
        except ElasticTrainError as failure:
            # Nothing else that is waited for here takes less than a minute; a busy machine may need seconds to start a thread.
            print(failure, f"{time.monotonic() - started < 20}")
        batches.close()
        assert not children()
        """)
    )
    assert [part in out for part in ("SIGKILL", "`data.workers`")] == [True] * 2
    assert out.endswith("True\n")
    assert error == ""


def test_what_the_data_set_raises_arrives(script) -> None:
    out, error = finish(
        script("""
        with loader(Samples("raise")) as batches:
            count = 0
            try:
                for one in batches:
                    count += 1
            except KeyError as failure:
                print(count, failure, *failure.__notes__)
        """)
    )
    # Sample 22 is in the second portion of rank 1 at step 2, after five others.
    assert out.startswith("5 'no such picture' ")
    assert "__getitem__" in out
    assert error == ""


@pytest.mark.parametrize("ending", ["batches.close()", "pass"])
def test_a_hanging_worker_does_not_hold_up_the_end(script, ending: str) -> None:
    out, error = finish(
        script(f"""
        batches = loader(Samples("hang"))
        for _ in range(2):
            next(batches)
        time.sleep(0.5)
        started = time.monotonic()
        {ending}
        import atexit
        print(time.monotonic() - started < 2)
        """)
    )
    assert (out, error) == ("True\n", "")
