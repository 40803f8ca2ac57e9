"""The group checks on three ranks under gloo: all well, and broken for real in every way that has a name."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torchruns import wait_until, warm_ranks_started

from tests.unit.preflight.made import rank as subject

SCRIPT = Path(__file__).with_name("group_ranks.py")
RANKS = 3


class Answers:
    """What each rank wrote down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self, name: str) -> list[dict[str, Any]]:
        files = sorted(self.folder.glob(f"{name}-*.json"))
        return [json.loads(file.read_text()) for file in files]

    def verdicts(self, name: str) -> list[Mapping[str, Any]]:
        """The same on all ranks."""
        answers = self.all(name)
        assert answers
        for answer in answers:
            assert _without_times(answer["verdicts"]) == _without_times(answers[0]["verdicts"])
        verdicts: list[Mapping[str, Any]] = answers[0]["verdicts"]
        return verdicts

    def bad(self, name: str) -> list[tuple[str, str, str]]:
        """Check, subject, and the first word of what was found."""
        return [
            (verdict["check"], verdict["subject"], str(verdict["measured"]).split()[0])
            for verdict in self.verdicts(name)
            if verdict["status"] != "pass"
        ]

    def seconds(self, name: str) -> float:
        return max(float(answer["seconds"]) for answer in self.all(name))


def _without_times(verdicts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in verdict.items() if name != "seconds"} for verdict in verdicts]


def run(folder: Path, *scenarios: str, last: str, num_answers: int) -> Answers:
    answers = Answers(folder / "answers")
    answers.folder.mkdir(parents=True)
    program = [str(SCRIPT), str(answers.folder), *scenarios]
    with warm_ranks_started(program, world_size=RANKS, folder=folder, errors=["UserWarning"]) as ranks:

        def written() -> bool:
            assert all(rank.process.poll() is None for rank in ranks), ranks[0].output()[-4000:]
            return len(answers.all(last)) == num_answers

        wait_until(written, timeout_s=120, what=f"{num_answers} answers of {last}")
    return answers


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Scenarios after which the group still works, and one after which it does not."""
    names = ("healthy", "wrong", "slow", "corrupt", "tables", "pieces", "absent", "late")
    return run(tmp_path_factory.mktemp("well"), *names, last="late", num_answers=2)


def test_healthy_ranks_pass_everything(well: Answers) -> None:
    # Three ranks on two processors are not equally fast all the time.
    assert [bad for bad in well.bad("quick") if bad[0] != "matmul"] == []
    assert [bad for bad in well.bad("full") if bad[0] != "matmul"] == []
    checks = {verdict["check"] for verdict in well.verdicts("full")}
    assert checks == {"present", "collectives", "bus_bandwidth", "matmul", "sdc"}
    assert {verdict["unit"] for verdict in well.verdicts("quick") if verdict["check"] == "collectives"} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "all_to_all",
        "send_recv",
    }
    assert all(answer["usable"] for answer in well.all("full"))


def test_cost(well: Answers) -> None:
    """Several times what is promised on an idle machine: other tests may be running beside this one."""
    assert well.seconds("quick_again") < 2.0
    assert well.seconds("full") < 20.0


def test_what_is_off_is_not_run(well: Answers) -> None:
    assert {verdict["check"] for verdict in well.verdicts("less")} == {"matmul", "sdc"}


def test_wrong_values_name_the_rank(well: Answers) -> None:
    found = [verdict for verdict in well.verdicts("wrong") if verdict["status"] == "fail"]
    assert [(verdict["unit"], verdict["subject"]) for verdict in found] == [
        ("all_reduce", "all"),
        ("all_gather", subject(1, "h2")),
        ("broadcast", subject(2, "h3")),
    ]
    # Two hosts are blamed by the parts of one check: neither must leave for it.
    assert {verdict["scope"] for verdict in found} == {"group"}
    assert "bfloat16" in found[0]["measured"]
    assert all(answer["usable"] for answer in well.all("wrong"))


def test_a_straggler_is_named(well: Answers) -> None:
    found = [verdict for verdict in well.verdicts("slow") if verdict["check"] == "matmul"]
    assert (subject(1, "h2"), "warn") in [(verdict["subject"], verdict["status"]) for verdict in found]


def test_a_wrong_bit_names_the_rank(well: Answers) -> None:
    found = [verdict for verdict in well.verdicts("corrupt") if verdict["check"] == "sdc"]
    assert [(verdict["subject"], verdict["status"], verdict["scope"]) for verdict in found] == [
        (subject(1, "h2"), "fail", "host")
    ]


def test_tables_measure_sizes_and_rails(well: Answers) -> None:
    found = {verdict["check"]: verdict["status"] for verdict in well.verdicts("tables") if verdict["check"] in ("p2p", "rails")}
    # Each host has one rank, and so no pair.
    assert found == {"p2p": "skip", "rails": "pass"}
    assert [answer["sizes"][:3] for answer in well.all("points")] == [[1 << 10, 1 << 12, 1 << 14]] * RANKS


def test_pieces(well: Answers) -> None:
    answers = well.all("pieces")
    for rank, answer in enumerate(answers):
        assert {one["source"] for one in answer["reached"]} == {0, 1, 2} - {rank}
        assert all(one["gbs"] > 0 for one in answer["reached"])


def test_a_rank_that_never_comes_is_named(well: Answers) -> None:
    assert well.bad("absent") == [("present", subject(2, "h3"), "did")]
    assert well.verdicts("absent")[-1]["scope"] == "host"
    assert well.seconds("absent") < 3.5


def test_a_rank_that_does_not_enter_a_collective_is_named(well: Answers) -> None:
    assert well.bad("late") == [("collectives", subject(2, "h3"), "did")]
    assert well.seconds("late") < 4.0
    assert not any(answer["usable"] for answer in well.all("late"))
    assert well.verdicts("late")[-1]["scope"] == "host"
    assert "py-spy" in well.verdicts("late")[-1]["remedy"]


def test_a_frozen_rank_is_named(tmp_path: Path) -> None:
    found = run(tmp_path, "frozen", last="frozen", num_answers=2)
    assert found.bad("frozen") == [("collectives", subject(1, "h2"), "entered")]
