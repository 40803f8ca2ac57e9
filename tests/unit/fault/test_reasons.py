import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.distributed import DistBackendError, DistNetworkError

from elastictrain import errors
from elastictrain.errors import ConfigError, Problem, TransportError
from elastictrain.fault.reasons import (
    ExitClassification,
    Reason,
    SlowRank,
    classify_exit,
    describe_heard,
    elect_reporter,
    leave_begun,
    leave_reason,
    leave_straggler,
    read_begun,
    read_reasons,
    read_straggler,
)
from elastictrain.liveness.progress import Phase, ProgressMark

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


def test_the_request_to_leave_a_straggler_out(tmp_path: Path) -> None:
    assert read_straggler(tmp_path) is None
    slow = SlowRank(3, "rank 3 is slow")
    for told in (slow, None, None, slow):
        leave_straggler(str(tmp_path), told)
        assert read_straggler(tmp_path) == told
    assert read_reasons(str(tmp_path)) == []
    (tmp_path / "straggler.json").write_text("{")
    assert read_straggler(tmp_path) is None


def test_leaving_word_never_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The launcher may be gone, and its folder with it."""
    with caplog.at_level(logging.WARNING):
        leave_reason(str(tmp_path / "nowhere"), REASON)
        leave_begun(str(tmp_path / "nowhere"), resumed_step=1)
        leave_straggler(str(tmp_path / "nowhere"), SlowRank(0, "slow"))
    assert len(caplog.records) == 3


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


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_first_worker_speaks_at_once() -> None:
    clock = Clock()
    assert elect_reporter(0, ending=lambda: True, clock=clock, sleep=clock.sleep)
    assert clock.now == 100.0


def test_the_others_wait_to_be_ended() -> None:
    clock = Clock()
    assert not elect_reporter(1, ending=lambda: clock.now > 103, limit_s=10, clock=clock, sleep=clock.sleep)
    assert clock.now < 104


def test_a_worker_that_is_alone_with_its_finding_speaks() -> None:
    clock = Clock()
    assert elect_reporter(1, ending=lambda: False, limit_s=10, clock=clock, sleep=clock.sleep)
    assert 110 <= clock.now < 111


REDUCE = ProgressMark(Phase.REDUCE, 7, 0, 0.0, True)
HEARD = {"rank 1 on b": "backward of step 7, 3.0 s ago", "rank 2 on c": "never heard in this generation"}

TRANSPORT = [
    RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:40211"),
    RuntimeError("Application timeout caused pair closure"),
    RuntimeError("[enforce fail at unbound_buffer.cc:81] Timed out waiting 120000ms for recv operation to complete"),
    RuntimeError("Connection reset by peer"),
    DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error"),
    DistNetworkError("The client socket has timed out after 300s while trying to connect to (a, 29400)."),
]


def classify(error: BaseException, *, mark: ProgressMark, last_heard: Mapping[str, str]) -> ExitClassification:
    return classify_exit(error, where=str(mark), in_collective=mark.in_collective, last_heard=last_heard)


@pytest.mark.parametrize("error", TRANSPORT, ids=lambda error: str(error)[:30])
def test_a_failed_collective_is_a_transport_failure_that_says_who_was_heard_last(error: Exception) -> None:
    what = classify(error, mark=REDUCE, last_heard=HEARD)
    assert what.exit_code == errors.EXIT_TRANSPORT
    assert what.sentence.startswith("a collective failed in reduce of step 7: ")
    assert what.sentence.endswith(describe_heard(HEARD))


NO_COLLECTIVES = (Phase.STANDBY, Phase.START, Phase.DATA)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase not in NO_COLLECTIVES])
def test_collectives_fail_in_every_phase_that_has_some(phase: Phase) -> None:
    what = classify(TRANSPORT[0], mark=ProgressMark(phase, 1, 0, 0.0, False), last_heard={})
    assert what.exit_code == errors.EXIT_TRANSPORT


@pytest.mark.parametrize("phase", NO_COLLECTIVES)
def test_a_connection_that_breaks_where_no_collective_runs_is_no_transport_failure(phase: Phase) -> None:
    what = classify(RuntimeError("Connection reset by peer"), mark=ProgressMark(phase, 1, 0, 0.0, False), last_heard={})
    assert what.exit_code == errors.EXIT_BUG


@pytest.mark.parametrize(
    "error",
    [
        ConfigError([Problem("train.steps", "must be >= 1")]),
        errors.DataError("no tokens"),
        errors.NonFiniteError("11 steps in a row"),
        errors.StopRequestedError("SIGTERM"),
        errors.NoValidCheckpointError("all are damaged"),
        errors.AccessDeniedError("s3://b: denied"),
        errors.HostUnfitError("gpu 3"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_our_own_errors_speak_for_themselves(error: errors.ElasticTrainError) -> None:
    what = classify(error, mark=REDUCE, last_heard=HEARD)
    assert what.exit_code == error.exit_code
    assert what.sentence == str(error)
    assert not what.show_stack


def test_our_transport_error_also_says_who_was_heard_last() -> None:
    error = TransportError("rank(s) 1 did not say hello", missing=(1,))
    what = classify(error, mark=ProgressMark(Phase.START, 0, 0, 0.0, False), last_heard=HEARD)
    assert (what.exit_code, what.missing) == (errors.EXIT_TRANSPORT, (1,))
    assert str(error) in what.sentence
    assert what.sentence.endswith(describe_heard(HEARD))


@pytest.mark.parametrize(
    "error",
    [KeyError("tokens"), RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("gloo"), MemoryError()],
    ids=repr,
)
def test_everything_else_is_a_bug_with_its_stack(error: Exception) -> None:
    what = classify(error, mark=REDUCE, last_heard=HEARD)
    assert what.exit_code == errors.EXIT_BUG
    assert what.sentence.startswith(f"{type(error).__name__} in reduce of step 7: ")
    assert what.show_stack


GLOO = "/__w/pytorch/pytorch/third_party/gloo/gloo"


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (RuntimeError("feature server: connection refused by peer, timed out waiting"), errors.EXIT_BUG),
        (RuntimeError("ProcessGroupGloo::allgather: invalid output tensor list at index 0"), errors.EXIT_BUG),
        (RuntimeError(f"[enforce fail at {GLOO}/allreduce.cc:30] opts.elements > 0"), errors.EXIT_BUG),
        (RuntimeError("no NCCL here"), errors.EXIT_BUG),
        (BrokenPipeError("Broken pipe"), errors.EXIT_BUG),
        (TRANSPORT[0], errors.EXIT_TRANSPORT),
        (RuntimeError(f"[{GLOO}/transport/tcp/pair.cc:538] Read error [127.0.0.1]:1: Broken pipe"), errors.EXIT_TRANSPORT),
        (RuntimeError(f"Gloo connectFullMesh failed with [{GLOO}/transport/tcp/pair.cc:144] no error"), errors.EXIT_TRANSPORT),
        (TRANSPORT[-2], errors.EXIT_TRANSPORT),
        (TRANSPORT[-1], errors.EXIT_TRANSPORT),
        (TransportError("rank 1 has left"), errors.EXIT_TRANSPORT),
    ],
    ids=repr,
)
def test_in_a_loop_of_a_users_only_what_collectives_raise_is_a_transport_failure(error: Exception, exit_code: int) -> None:
    what = classify_exit(error, where="step 7", in_collective=True, last_heard={}, in_own_loop=True)
    assert (what.exit_code, what.show_stack) == (exit_code, exit_code == errors.EXIT_BUG)


@pytest.mark.parametrize("explicit", [True, False])
def test_the_cause_of_an_error_counts(explicit: bool) -> None:
    def fail() -> None:
        try:
            raise TRANSPORT[0]
        except RuntimeError as error:
            if explicit:
                raise ValueError("the gradient hook failed") from error
            raise ValueError("the gradient hook failed")  # noqa: B904

    with pytest.raises(ValueError, match="hook") as caught:
        fail()
    assert classify(caught.value, mark=REDUCE, last_heard={}).exit_code == errors.EXIT_TRANSPORT


def test_only_the_first_line_of_a_foreign_message_is_shown() -> None:
    what = classify(RuntimeError("\n  NCCL error: unhandled\nException raised from a.cpp:1\n"), mark=REDUCE, last_heard={})
    assert what.sentence.endswith(": NCCL error: unhandled")


def test_nobody_heard_is_nothing_said() -> None:
    assert describe_heard({}) == ""
    assert [line.strip() for line in describe_heard(HEARD).splitlines()[2:]] == [
        f"{who}: {what}" for who, what in HEARD.items()
    ]


@pytest.mark.parametrize(
    ("error", "alone"),
    [
        (errors.ElasticTrainError("data-worker-0 (pid 7) died of SIGKILL"), True),
        (TRANSPORT[0], True),
        (KeyError("tokens"), True),
        (errors.NonFiniteError("11 steps in a row"), False),
        (errors.ReplicasDivergedError("rank 1 differs"), False),
        (errors.StopRequestedError("SIGTERM"), False),
        (ConfigError([Problem("train.steps", "must be >= 1")]), False),
    ],
    ids=repr,
)
def test_what_all_ranks_find_alike_is_nobodys_own_trouble(error: Exception, alone: bool) -> None:
    assert classify(error, mark=REDUCE, last_heard={}).alone is alone
