from collections.abc import Mapping

import pytest
from torch.distributed import DistBackendError, DistNetworkError

from elastictrain import errors
from elastictrain.errors import ConfigError, Problem, TransportError
from elastictrain.fault.reasons import ExitClassification, classify_exit, describe_heard
from elastictrain.liveness.progress import Phase, ProgressMark

REDUCE = ProgressMark(Phase.REDUCE, 7, 0, 0.0, True)
HEARD = {"rank 1 on b": "backward of step 7, 3.0 s ago", "rank 2 on c": "never heard in this incarnation"}

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
    assert "rank 1 on b: backward of step 7, 3.0 s ago" in what.sentence
    assert "rank 2 on c: never heard" in what.sentence


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase not in (Phase.START, Phase.DATA)])
def test_collectives_fail_in_every_phase_that_has_some(phase: Phase) -> None:
    what = classify(TRANSPORT[0], mark=ProgressMark(phase, 1, 0, 0.0, False), last_heard={})
    assert what.exit_code == errors.EXIT_TRANSPORT


@pytest.mark.parametrize("phase", [Phase.START, Phase.DATA])
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
    what = classify(
        TransportError("rank(s) 1 did not say hello"), mark=ProgressMark(Phase.START, 0, 0, 0.0, False), last_heard=HEARD
    )
    assert what.exit_code == errors.EXIT_TRANSPORT
    assert "rank(s) 1 did not say hello\nlast heard of the other ranks:\n  rank 1 on b: " in what.sentence


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
    assert what.sentence == "a collective failed in reduce of step 7: NCCL error: unhandled"


def test_nobody_heard_is_nothing_said() -> None:
    assert describe_heard({}) == ""


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
