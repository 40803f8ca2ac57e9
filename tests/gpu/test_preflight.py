"""The preflight's device checks on real GPUs. Run: `python -m pytest tests/gpu/test_preflight.py -p no:xdist`."""

import json
import re
import socket
import subprocess
import sys
import time
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from elastictrain.distributed.group import Group
from elastictrain.identity import Identity
from elastictrain.preflight.group import checks
from elastictrain.preflight.group.checks import GroupChecks, Request
from elastictrain.preflight.group.corruption import (
    BFLOAT16,
    FLOAT8,
    FLOAT32,
    FULL_S,
    QUICK_S,
    DeviceFindings,
    KnownProduct,
    examine_device,
    multiply,
)
from elastictrain.preflight.group.judge import judge_corruption
from elastictrain.preflight.group.members import GroupMember
from elastictrain.preflight.verdict import Status
from tests.unit.preflight.table import Table

FLOAT8_FROM = (8, 9)  # compute capability


def examine(budget_s: float, **options: object) -> DeviceFindings:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return examine_device(
        device,
        lambda _: None,
        budget_s=budget_s,
        free_bytes=torch.cuda.mem_get_info(device)[0],
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.one_device
@pytest.mark.parametrize("known", [FLOAT32, BFLOAT16, FLOAT8])
def test_products_are_exact(known: KnownProduct) -> None:
    if known is FLOAT8 and torch.cuda.get_device_capability() < FLOAT8_FROM:
        pytest.skip("this GPU has no float8")
    for side in (256, 4096, 8192):
        left, right, expected = known.make(side, torch.device("cuda", 0))
        assert torch.equal(multiply(left, right), expected)


@pytest.mark.one_device
@pytest.mark.parametrize("budget_s", [QUICK_S, FULL_S])
def test_a_healthy_gpu_passes_in_time(budget_s: float) -> None:
    examine(0.0)
    began = time.monotonic()
    found = examine(budget_s)
    seconds = time.monotonic() - began
    assert found.wrong == ()
    assert min(found.copies_gbs) > 1
    assert seconds < budget_s + 0.3


@pytest.mark.one_device
@pytest.mark.parametrize("full", [True, False])
def test_a_busy_host_makes_a_gpu_and_its_copies_no_slower(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device, calls, found = torch.device("cuda", 0), list[None](), list[DeviceFindings]()
    quiet = examine(QUICK_S)

    def look(*arguments: object, **options: object) -> DeviceFindings:
        found.append(examine_device(*arguments, **options))  # type: ignore[arg-type]
        return found[-1]

    def keep_busy() -> None:
        calls.append(None)
        until = time.monotonic() + FULL_S
        while time.monotonic() < until:
            sum(range(1000))

    group = Group(cast(dist.ProcessGroup, None), "nccl", device)
    identity = Identity(0, 1, 0, 1, "h1", launched=False)
    monkeypatch.setattr(checks, "examine_device", look)
    verdicts = GroupChecks(group, Table(), identity, Request(full=full), hosts=["h1"], in_background=keep_busy).run().verdicts
    assert {one.check: one.status for one in verdicts}["sdc"] is Status.PASS
    assert len(calls) == full
    (busy,) = found
    assert busy.tflops > 0.9 * quiet.tflops
    assert all(rate > 0.8 * before for rate, before in zip(busy.copies_gbs, quiet.copies_gbs, strict=True))


@pytest.mark.one_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_planted_wrong_bit_names_the_gpu(dtype: torch.dtype) -> None:
    def flip(left: Tensor, right: Tensor) -> Tensor:
        result = multiply(left, right)
        if left.dtype is dtype:
            result.view(torch.int32)[-1, -1] ^= 1
        return result

    found = examine(QUICK_S, product=flip)
    assert len(found.wrong) == 1
    member = GroupMember(rank=0, host="h1", local_rank=0, device=torch.cuda.get_device_name(0))
    (verdict,) = judge_corruption([{0: found}], [member])
    assert (verdict.check, verdict.subject, verdict.status.value) == ("sdc", "GPU 0 on h1", "fail")


@pytest.mark.one_device
@pytest.mark.parametrize("level", ["quick", "full"])
def test_the_command_checks_a_single_gpu(level: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [*launcher, "-m", "elastictrain.preflight", "--json", "--level", level]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    rows = {row["check"]: row for row in json.loads(done.stdout)}
    assert {name: rows[name]["status"] for name in ("present", "matmul", "sdc")} == dict.fromkeys(
        ("present", "matmul", "sdc"), "pass"
    ), done.stderr
    # With the first use of each library; a full one also waits for nvidia-smi.
    assert rows["sdc"]["seconds"] < (1.5 if level == "quick" else 10.0)


def test_a_speed_test_between_two_gpus() -> None:
    speed = [sys.executable, "-m", "elastictrain.preflight", "speed", "--token", "x", "--size", "2G"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    listen = [*speed, "--listen", "127.0.0.1", "--port", port, "--device", "0"]
    with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as listener:
        try:
            assert listener.stdout is not None
            while "--to" not in listener.stdout.readline():
                assert listener.poll() is None
            connect = [*speed, "--to", "127.0.0.1", "--port", port, "--device", "1"]
            done = subprocess.run(connect, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
            assert listener.wait(30) == 0
        finally:
            listener.kill()
    rates = [float(rate) for rate in re.findall(r"([\d.]+) GB/s", done.stdout)]
    assert len(rates) == 3
    assert min(rates) > 1
