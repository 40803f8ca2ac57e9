"""A program with a recoverable function on hosts that leave and come: who stays keeps its process, and the run is the same."""

import os
import signal
from pathlib import Path

from torchruns import events, kill, losses, wait_until, warm_ranks

from elastictrain.chaos.fleet import LauncherFleet, launcher_of, workers
from elastictrain.chaos.network.hosts import VirtualNetwork

STEPS = 150
PROGRAM = """
import sys, time
import torch
import elastictrain

folder, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
elastictrain.init_process_group(folder, recoverable=True, telemetry={"flush_s": 0.1})
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


@elastictrain.recoverable
def train(run):
    for step in range(run.restore() + 1, steps + 1):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(pause_s)
        run.step_done(step, metrics={"loss": loss})
        if run.should_stop:
            break


with elastictrain.attach(folder, model=model, optimizer=optimizer) as run:
    train(run)
"""


def test_a_host_is_replaced_while_the_other_keeps_its_process(network: VirtualNetwork, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    right = tmp_path / "undisturbed"
    warm_ranks([str(program), str(right), str(STEPS), "0"], world_size=2, folder=tmp_path)
    a, b, c = (network.add(name) for name in "abc")
    run_dir = tmp_path / "run"
    launch = ("launch.min_hosts=2", "launch.max_hosts=2", "launch.join_s=120", "launch.notices=false", "preflight=off")
    fleet = LauncherFleet(run_dir, tmp_path / "logs", launch)
    more = ["--", str(program), str(run_dir), "100000", "0.03"]
    fleet.start(a, b, more=more)
    fleet.wait_for_step(12)
    (stays,) = workers(b)

    kill(workers(a)[0])
    wait_until(lambda: bool(events(run_dir, "recovery")), timeout_s=30, what="a recovery")
    assert [one.pid for one in workers(b)] == [stays.pid]

    fleet.start(c, more=more)
    wait_until(lambda: len(list((run_dir / "launch/hosts").glob("*.json"))) == 3, timeout_s=30, what="a host that waits")
    os.kill(launcher_of(a), signal.SIGTERM)
    assert fleet.launchers.pop("a").wait(60) == 75, fleet.output()[-8000:]
    fleet.wait_for_members(["b", "c"])
    fleet.go_on()
    assert [one.pid for one in workers(b)] == [stays.pid], fleet.output()[-8000:]
    fleet.wait_for_step(STEPS)
    for host in (b, c):
        os.kill(launcher_of(host), signal.SIGTERM)
    assert fleet.wait() == {"b": 75, "c": 75}, fleet.output()[-8000:]
    assert {step: loss for step, loss in losses(run_dir).items() if step <= STEPS} == losses(right)
    assert [row["rung"] for row in events(run_dir, "recovery")] == ["in_place"]
