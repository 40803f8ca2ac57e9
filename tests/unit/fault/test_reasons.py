import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.distributed import DistBackendError, DistNetworkError

from elastictrain import errors
from elastictrain.errors import ConfigError, Problem, TransportError
from elastictrain.fault.reasons import (
    JOB_NAME,
    ExitClassification,
    classify_exit,
    describe_heard,
    elect_reporter,
    leave_text,
    read_noted_step,
)
from elastictrain.liveness.progress import Phase, ProgressMark


def test_what_is_noted_is_read_and_never_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_noted_step(str(tmp_path)) == read_noted_step(str(tmp_path / "nowhere")) == 0
    # A cleaner may have deleted the folder.
    folder = tmp_path / "launch"
    leave_text(folder / JOB_NAME, '{"step": 3, "more": 1}')
    assert read_noted_step(str(folder)) == 3
    for text in ("", "{", "null", '{"step": "3"}'):
        leave_text(folder / JOB_NAME, text)
        assert read_noted_step(str(folder)) == 0
    assert [path.name for path in folder.iterdir()] == [JOB_NAME]
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        leave_text(tmp_path / "file" / JOB_NAME, "{}")
    assert len(caplog.records) == 1


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
