"""Checks, and how they are run: side by side, each under a deadline, so that none can hang a start."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from elastictrain.preflight.verdict import Reporter, Verdict

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Once(Generic[T]):
    """Asks when first called; every later caller, from any thread, gets the same answer. If asking breaks, all hear of it."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._answers: list[T] = []

    def __call__(self) -> T:
        # Checks run side by side: whoever comes second waits here for the tool instead of starting it again.
        with self._lock:
            if not self._answers:
                self._answers.append(self._ask())
            return self._answers[0]


@dataclass(frozen=True, slots=True)
class Check:
    """One check of one host. `run` returns what it found: one verdict or several, in any scope."""

    name: str
    run: Callable[[], Verdict | Sequence[Verdict]]
    limit_s: float
    """After this long there is no answer."""

    quick: bool = True
    """Whether it is part of a quick preflight, too."""


def run_checks(checks: Sequence[Check], *, subject: str, clock: Callable[[], float] = time.monotonic) -> list[Verdict]:
    """What all checks found, in their order; each runs in a thread of its own. Never raises, and never takes longer than the
    longest limit: what has not answered by then, or broke, is a failure that says so."""
    found: dict[int, Sequence[Verdict]] = {}
    began = clock()

    def answer(index: int, check: Check) -> None:
        found[index] = _run(check, subject=subject, clock=clock)

    threads = [
        threading.Thread(target=answer, args=(index, check), name=f"check-{check.name}", daemon=True)
        for index, check in enumerate(checks)
    ]
    for thread in threads:
        thread.start()
    for thread, check in zip(threads, checks, strict=True):
        thread.join(max(0.0, began + check.limit_s - clock()))
    return [verdict for index, check in enumerate(checks) for verdict in found.get(index, [_no_answer(check, subject)])]


def _run(check: Check, *, subject: str, clock: Callable[[], float]) -> Sequence[Verdict]:
    began = clock()
    try:
        found = check.run()
        verdicts = [found] if isinstance(found, Verdict) else list(found)
    except Exception as error:
        # The edge of a thread. A check that breaks knows nothing about its subject, and that must be seen.
        logger.exception("check %s broke", check.name)
        remedy = f"report it as a bug; to go on without this check: preflight.checks.{check.name}=off"
        measured = f"{type(error).__name__}: {error}"
        verdicts = [Reporter(check.name, subject).failed(measured, expected="an answer", remedy=remedy)]
    seconds = clock() - began
    if seconds > check.limit_s:
        return [_no_answer(check, subject)]
    return [replace(verdict, seconds=round(seconds, 4)) for verdict in verdicts]


def _no_answer(check: Check, subject: str) -> Verdict:
    report = Reporter(check.name, subject, seconds=check.limit_s)
    remedy = f"look at what the check waits for on {subject}; to go on without it: preflight.checks.{check.name}=off"
    return report.failed(f"no answer in {check.limit_s:g} s", expected="an answer", remedy=remedy, may_pass=True)
