import os
from dataclasses import fields
from pathlib import Path

import pytest

from elastictrain.config.preflight import PreflightChecks
from elastictrain.preflight.alone import OwnChecks, check_host, counters_path
from elastictrain.preflight.policy import Level
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Status
from tests.unit.preflight.transport.made import MadeHost


def test_where_counters_are_kept() -> None:
    ending = f"h1-{os.getuid()}.json"
    host = Surroundings(host="h1", environment={"HOME": "/home/x"})
    assert counters_path(host) == Path("/home/x/.local/state/elastictrain") / f"counters-{ending}"
    host = Surroundings(host="h1", environment={"HOME": "/home/x", "XDG_STATE_HOME": "/state"})
    assert counters_path(host) == Path("/state/elastictrain") / f"counters-{ending}"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    ending = f"elastictrain-counters-h1-{os.getuid()}.json"
    assert counters_path(Surroundings(host="h1", environment={})) == Path("/tmp") / ending
    assert counters_path(Surroundings(host="h1", environment={"TMPDIR": "/scratch"})) == Path("/scratch") / ending


def check(made: MadeHost, name: str) -> tuple[Status, object]:
    modes = {field.name: "off" for field in fields(PreflightChecks) if field.name != name}
    surroundings = Surroundings(host="h1", root=made.root, environment=made.environment)
    (found,) = check_host(surroundings, OwnChecks(level=Level.QUICK, modes=modes))
    return found.status, found.expected


def test_locked_memory_matters_where_infiniband_will_be_used(tmp_path: Path) -> None:
    made = MadeHost(tmp_path / "root", environment={"XDG_STATE_HOME": str(tmp_path)})
    assert check(made, "memlock") == (Status.PASS, None)
    made.device("mlx5_0", state="1: DOWN")
    assert check(made, "memlock") == (Status.PASS, None)
    made.device("mlx5_0")
    assert str(check(made, "memlock")[1]).startswith("unlimited")
    made.environment["NCCL_IB_DISABLE"] = "1"
    assert check(made, "memlock") == (Status.PASS, None)
