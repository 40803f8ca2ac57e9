"""What comes from storage or from strangers is parsed by `bounded_json` and `stored_yaml`, and nothing unpickles it."""

import ast
from pathlib import Path

import elastictrain
from tests.unit.sources import nodes

ROOT = Path(elastictrain.__file__).parent
PARSERS = {
    "json.load",
    "json.loads",
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "yaml.load",
    "yaml.safe_load",
    "OmegaConf.load",
    "OmegaConf.create",
    "eval",
    "exec",
}

OWN = {
    "bounded_json.py": "the parser itself",
    "config/digest.py": "the parser itself",
    "chaos/damage.py": "the run that this command has started",
    "chaos/fleet.py": "the run that this command has started",
    "chaos/in_process.py": "the plan of the command that started this process",
    "chaos/run_events.py": "the run that this command has started",
    "data/loader.py": "bytes of this very process",
    "checkpoint/exchange.py": "ranks of the same group",
    "net/channel.py": "frames of bounded size from hosts that have shown the token",
    "liveness/__main__.py": "the worker that started this process",
    "liveness/flight_recorder.py": "torch's trace of this process",
    "launch/worker_process.py": "the worker that this process has had started",
    "preflight/host/trip.py": "the process that started this one",
}


def parsing_calls(path: Path) -> set[str]:
    calls = (node for node in nodes(path) if isinstance(node, ast.Call))
    return {name for call in calls if (name := ast.unparse(call.func)) in PARSERS}


def test_only_known_files_parse_anything_else() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if parsing_calls(path)}
    assert found == OWN.keys()
