import json
import logging
from pathlib import Path

import pytest

from elastictrain.fault.reasons import Reason, leave_begun, leave_reason, read_begun, read_reasons

REASON = Reason(3, 71, "reduce", 12, "a peer is gone: “é”\nand more")


def test_what_workers_leave_is_read_in_order_of_rank(tmp_path: Path) -> None:
    folder = str(tmp_path)
    others = [Reason(rank, 70, "start", 0, "boom") for rank in (11, 100_000, 0)]
    for reason in (others[0], REASON, *others[1:]):
        leave_reason(folder, reason)
    assert [reason.rank for reason in read_reasons(folder)] == [0, 3, 11, 100_000]
    assert read_reasons(folder)[1] == REASON


def test_the_last_word_of_a_rank_counts(tmp_path: Path) -> None:
    leave_reason(str(tmp_path), REASON)
    leave_reason(str(tmp_path), Reason(3, 70, "update", 13, "later"))
    assert read_reasons(str(tmp_path)) == [Reason(3, 70, "update", 13, "later")]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00003.json"]


def test_what_a_rank_has_said_itself_is_kept_if_asked(tmp_path: Path) -> None:
    for _ in range(2):
        leave_reason(str(tmp_path), REASON, only_if_none=True)
    leave_reason(str(tmp_path), Reason(3, 70, "update", 13, "another one"), only_if_none=True)
    assert read_reasons(str(tmp_path)) == [REASON]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00003.json"]


def test_what_a_rank_says_at_the_same_moment_is_kept_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.write_text

    def write_text(self: Path, text: str) -> int:
        written = real(self, text)
        monkeypatch.undo()
        leave_reason(str(tmp_path), REASON)
        # It is another process that speaks at the same moment.
        real(self, text)
        return written

    monkeypatch.setattr(Path, "write_text", write_text)
    leave_reason(str(tmp_path), Reason(3, 71, "update", 13, "from outside"), only_if_none=True)
    assert read_reasons(str(tmp_path)) == [REASON]


def test_nothing_was_left(tmp_path: Path) -> None:
    assert read_reasons(str(tmp_path)) == read_reasons(str(tmp_path / "nowhere")) == []
    assert read_begun(str(tmp_path)) is read_begun(str(tmp_path / "nowhere")) is None


GOOD = {"rank": 1, "exit_code": 70, "phase": "start", "step": 0, "sentence": "boom", "guilty": False}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        json.dumps({**GOOD, "rank": "1"}).encode(),
        json.dumps({**GOOD, "exit_code": None}).encode(),
        json.dumps({**GOOD, "step": True}).encode(),
        json.dumps({**GOOD, "sentence": 5}).encode(),
        json.dumps({name: value for name, value in GOOD.items() if name != "phase"}).encode(),
    ],
    ids=repr,
)
def test_what_cannot_be_read_is_left_out(data: bytes, tmp_path: Path) -> None:
    leave_reason(str(tmp_path), REASON)
    (tmp_path / "rank-00001.json").write_bytes(data)
    assert read_reasons(str(tmp_path)) == [REASON]


def test_what_somebody_else_adds_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "rank-00001.json").write_text(json.dumps({**GOOD, "more": 1}))
    (tmp_path / "rank-00002.77.tmp").write_text(json.dumps(GOOD))
    (tmp_path / "rank-00004.json").mkdir()
    assert read_reasons(str(tmp_path)) == [Reason(1, 70, "start", 0, "boom")]


@pytest.mark.parametrize("step", [0, 12])
def test_where_a_generation_went_on_from(step: int, tmp_path: Path) -> None:
    leave_begun(str(tmp_path), resumed_step=step)
    assert read_begun(str(tmp_path)) == step
    assert read_reasons(str(tmp_path)) == []


@pytest.mark.parametrize("text", ["", "{", "null", "true", "1.5", '"12"', "[12]"])
def test_a_beginning_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "begun.json").write_text(text)
    assert read_begun(str(tmp_path)) is None


def test_leaving_word_never_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The launcher may be gone, and its folder with it."""
    with caplog.at_level(logging.WARNING):
        leave_reason(str(tmp_path / "nowhere"), REASON)
        leave_begun(str(tmp_path / "nowhere"), resumed_step=1)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["the launcher cannot be told"] * 2


@pytest.mark.parametrize("only_if_none", [True, False])
def test_what_cannot_be_left_is_no_litter(only_if_none: bool, tmp_path: Path) -> None:
    place = tmp_path / "rank-00003.json"
    place.mkdir()
    leave_reason(str(tmp_path), REASON, only_if_none=only_if_none)
    assert list(tmp_path.iterdir()) == [place]


def test_a_reader_sees_whole_words_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_reason(str(tmp_path), REASON)
    seen: list[list[Reason]] = []
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        seen.append(read_reasons(str(tmp_path)))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    leave_reason(str(tmp_path), Reason(3, 70, "update", 13, "later"))
    assert seen == [[REASON]]
