"""A recoverable function is called again after what ends a generation, and after nothing else."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from elastictrain.errors import ConfigError, TransportError, UsageError
from elastictrain.own_loop.run import Run, recoverable
from elastictrain.own_loop.session import Session
from elastictrain.own_loop.state import own_state


class FakeSession:
    def __init__(self, *, recovers: bool, told: bool = False) -> None:
        self.recoverable, self.context, self.ended = recovers, None, False
        self.calls: list[str] = []
        self.part = SimpleNamespace(
            identity=SimpleNamespace(launched=True, rank=1),
            told_to_leave=told,
            keeps_process=recovers,
            may_stay=lambda error: isinstance(error, TransportError),
            leave=self._leave,
        )

    def _leave(self, error: Exception, context: object, *, free: Any) -> int:
        free()
        self.calls.append("leave")
        return 76

    def await_rank(self, exit_code: int) -> None:
        self.calls.append(f"wait with {exit_code}")


def run_of(session: FakeSession, model: nn.Module | None = None) -> Run:
    return Run(cast(Session, session), own_state(model or nn.Linear(2, 2), None, None))


def test_it_is_called_again_with_what_it_was_given() -> None:
    session, model, given = FakeSession(recovers=True, told=True), nn.Linear(2, 2), list[tuple[str, int]]()
    model(model.weight).sum().backward()

    @recoverable
    def train(run: Run, name: str, *, number: int) -> int:
        given.append((name, number))
        if len(given) < 3:
            raise TransportError("reset by peer")
        return 5

    assert train(run_of(session, model), "x", number=4) == 5
    assert given == [("x", 4)] * 3
    assert session.calls == ["leave", "wait with 76"] * 2
    assert model.weight.grad is None


def test_an_error_of_its_own_is_raised() -> None:
    session = FakeSession(recovers=True)

    @recoverable
    def train(run: Run) -> None:
        raise KeyError(1)

    with pytest.raises(KeyError):
        train(run_of(session))
    assert session.calls == []


def test_it_needs_a_run() -> None:
    with pytest.raises(UsageError):
        recoverable(lambda run: None)(cast(Run, 3))


def test_it_is_refused_where_processes_are_not_kept() -> None:
    with pytest.raises(ConfigError) as caught:
        recoverable(lambda run: None)(run_of(FakeSession(recovers=False)))
    assert [problem.key for problem in caught.value.problems] == ["elastictrain.init_process_group"]


@pytest.mark.parametrize("told", [True, False])
def test_the_stack_is_shown_unless_the_launcher_has_lost_a_rank(told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    failures = [TransportError("reset by peer")]

    @recoverable
    def train(run: Run) -> None:
        if failures:
            raise failures.pop()

    train(run_of(FakeSession(recovers=True, told=told)))
    shown = capsys.readouterr().err
    assert [one in shown for one in ("Traceback", "failures.pop()", "reset by peer")] == [not told] * 3
