"""Ranks that exchange their process groups in place train on as if nothing had happened."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from torchruns import environment
from warm import warm_host

PHASES = ("forward", "backward", "reduce", "control", "update", "meet")
LIMIT_S = 100.0
BLOCKED_S = 1.0  # a survivor raises within milliseconds after `detach`; a busy machine takes longer


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("kind", "world", "precision", "compiled", "phases"),
    [
        ("ddp", 2, "bf16", "compiled", PHASES[:2]),
        ("ddp", 3, "fp32", "plain", PHASES),
        ("fsdp", 2, "fp32", "plain", PHASES),
        ("fsdp", 3, "fp8", "compiled", PHASES[:2]),
        ("fsdp", 4, "fp32", "plain", PHASES),
        ("hsdp", 4, "bf16", "plain", PHASES),
        ("hsdp", 4, "fp32", "compiled", PHASES[:2]),
    ],
)
def test_losses_are_those_of_an_undisturbed_run(
    kind: str, world: int, precision: str, compiled: str, phases: tuple[str, ...], tmp_path: Path
) -> None:
    folder, script = tmp_path / "run", str(Path(__file__).with_name("exchanging.py"))
    arguments = [script, str(folder), kind, str(world), precision, compiled, *phases]
    process = warm_host().start(arguments, environment=environment(), log=tmp_path / "log", cwd=tmp_path)
    assert process.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()[-3000:]
    for rank in range(world):
        expected = {line["step"]: line["loss"] for line in lines(folder / "reference", rank) if "step" in line}
        by_process: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in lines(folder / "disturbed", rank):
            by_process[line["pid"]].append(line)
        trained = set()
        for mine in by_process.values():
            assert {line["held"] for line in mine if "held" in line} <= {0}, "parked, it holds no memory of a device"
            # What a standby did on its own does not count.
            began = next((place + 1 for place, line in enumerate(mine) if "warm" in line), 0)
            steps = [line for line in mine[began:] if "step" in line]
            assert [line["loss"] for line in steps] == [expected[line["step"]] for line in steps]
            trained |= {line["step"] for line in steps}
            exchanges = [line for line in mine if "left" in line]
            assert all(line["raised_s"] < BLOCKED_S for line in exchanges)
            # The compiled code of before serves after each exchange.
            compiled_graphs = [line["graphs"] for line in mine if line.get("graphs")]
            assert len(set(compiled_graphs)) <= 1
            assert bool(compiled_graphs) == (compiled == "compiled")
        assert trained == set(expected)
