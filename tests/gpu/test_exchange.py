"""NCCL groups are exchanged under a compiled model: the same bits, nothing is compiled again, nothing leaks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXCHANGES = 30
SETTLED = 10
"""By then caches are full."""


@pytest.mark.one_device
@pytest.mark.parametrize("first", ["group", "lone"])
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_groups_are_exchanged_on_a_device(kind: str, first: str) -> None:
    program = Path(__file__).with_name("exchange_alone.py")
    command = [sys.executable, str(program), kind, first, str(EXCHANGES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == EXCHANGES
    assert all(row["equal"] for row in rows)
    assert len({row["graphs"] for row in rows}) == 1
    settled, last = rows[SETTLED], rows[-1]
    assert last["memory"] <= settled["memory"]
    assert last["free"] >= settled["free"] - (64 << 20)
    assert last["descriptors"] <= settled["descriptors"] + 2
    assert last["threads"] <= settled["threads"] + 2
