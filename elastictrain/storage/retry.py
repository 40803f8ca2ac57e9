"""When to try a failed request again, and doing so."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from elastictrain.errors import StorageError
from elastictrain.storage.failures import Fault, fault_of, reason_of, storage_error

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Such an exception is a mistake in the program, not an answer of a backend.
_BUGS = (TypeError, AttributeError, NameError, LookupError, AssertionError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class RetryOptions:
    """How long a store insists. A request may outlast `total_s` by the time-out of its last attempt."""

    attempts: int = 12
    """Attempts in all; 1 for no second one."""

    base_s: float = 0.25
    """Upper bound of the first pause; it doubles with each attempt."""

    max_delay_s: float = 8.0
    """Upper bound of any pause."""

    total_s: float = 60.0
    """No attempt begins later than this after the first one."""

    answer_timeout_s: float = 20.0
    """An attempt ends when the service is silent for so long. Large bodies get time in addition."""


def next_delay(attempt: int, *, elapsed_s: float, options: RetryOptions, fault: Fault, jitter: float) -> float | None:
    """Pause before the next attempt, or None to give up.

    `attempt` (from 1) has just failed; `jitter` in [0, 1) spreads clients that failed together over the upper
    half of the pause.
    """
    if fault is not Fault.TRANSIENT or attempt >= options.attempts:
        return None
    longest = min(options.max_delay_s, options.base_s * 2.0 ** min(attempt - 1, 60))
    delay = longest * (0.5 + 0.5 * jitter)
    return delay if elapsed_s + delay <= options.total_s else None


@dataclass(frozen=True, slots=True)
class Retrying:
    """Runs a request until it succeeds or there is no point in going on."""

    options: RetryOptions
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = random.random

    def once(self) -> "Retrying":
        """The same without second attempts: only the translation of errors."""
        return replace(self, options=replace(self.options, attempts=1))

    def call(self, request: Callable[[], T], *, action: str, url: str) -> T:
        """What `request` returns.

        Raises: StorageError for whatever the backend raised last.
        """
        began = self.clock()
        attempt = 1
        while True:
            try:
                return request()
            except (StorageError, *_BUGS):
                raise
            except Exception as error:
                # Backends raise classes of packages that need not be installed.
                fault = fault_of(error)
                elapsed_s = self.clock() - began
                delay = next_delay(attempt, elapsed_s=elapsed_s, options=self.options, fault=fault, jitter=self.random())
                reason = reason_of(error)
                if delay is None:
                    if fault is Fault.TRANSIENT:
                        reason += f" (attempt {attempt}, after {elapsed_s:.0f} s)"
                    raise storage_error(fault, action=action, url=url, reason=reason) from error
            level = logging.WARNING if attempt == 1 else logging.DEBUG
            logger.log(level, "cannot %s %s: %s; trying again for up to %g s", action, url, reason, self.options.total_s)
            self.sleep(delay)
            attempt += 1
