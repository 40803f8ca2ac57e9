"""Every recording cut anywhere and with noise in it: parsed or unknown, judged, and never a crash."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.preflight.host.kernel_log import judge_xids, parse_kernel_log
from elastictrain.preflight.host.nvidia import parse_nvidia
from elastictrain.preflight.host_checks import HostFacts, OwnChecks, own_checks
from elastictrain.preflight.policy import Level
from elastictrain.preflight.verdict import Verdict
from elastictrain.surroundings import Surroundings, ToolOutput
from tests.unit.examples import examples
from tests.unit.preflight.made import OF_DEVICES

RECORDED = Path(__file__).parent / "recorded"
NAMES = sorted(path.name for path in RECORDED.iterdir())
NOWHERE = Path(__file__).parent / "there-is-no-such-root"


def noise(seed: int) -> list[tuple[int, bytes]]:
    """Where which bytes are wrong."""
    chance = random.Random(seed)
    return [(chance.randrange(2**20), chance.randbytes(chance.randint(1, 4))) for _ in range(chance.randint(0, 12))]


class OneAnswer:
    """Every tool answers with the same text, whatever it was asked."""

    def __init__(self, answer: ToolOutput) -> None:
        self.answer = answer

    def run(self, arguments: object, *, limit_s: float) -> ToolOutput:
        return self.answer


def damaged(name: str, cut: float, bytes_: list[tuple[int, bytes]]) -> str:
    data = bytearray((RECORDED / name).read_bytes())
    data = data[: int(len(data) * cut)]
    for at, wrong in bytes_:
        if data:
            start = at % len(data)
            data[start : start + len(wrong)] = wrong
    return data.decode(errors="replace")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(25))
@given(cut=st.floats(0, 1), seed=st.integers(0, 2**32), code=st.sampled_from([0, 1, 15]))
def test_no_damage_breaks_a_check(
    name: str, cut: float, seed: int, code: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = damaged(name, cut, noise(seed))
    answer = ToolOutput(code, text, text[:200])
    environment = {"CUDA_VISIBLE_DEVICES": "0,x", "XDG_STATE_HOME": str(tmp_path_factory.getbasetemp() / "state")}
    surroundings = Surroundings(host="h1", root=NOWHERE, environment=environment, tools=OneAnswer(answer))
    for check in own_checks(HostFacts(surroundings, OwnChecks(level=Level.FULL, local_world_size=2))):
        if check.name not in OF_DEVICES:
            continue
        # Here and now: a crash is seen as it is, not as a verdict.
        found = check.run()
        assert {verdict.check for verdict in ([found] if isinstance(found, Verdict) else found)} <= {check.name}
    judge_xids(parse_kernel_log(text), None, host="h1")


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".xml")])
@settings(max_examples=examples(40))
@given(cut=st.floats(0, 1))
def test_a_gpu_that_is_read_is_read_right(name: str, cut: float) -> None:
    whole = parse_nvidia(ToolOutput(0, damaged(name, 1, []), ""))
    part = parse_nvidia(ToolOutput(0, damaged(name, cut, []), ""))
    assert part.gpus == whole.gpus[: len(part.gpus)]
