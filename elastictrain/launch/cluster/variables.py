"""Reads variables of an environment; what is wrong with them is collected, and refused at once."""

import re
from collections.abc import Mapping

from elastictrain.errors import ConfigError, Problem

_WHOLE = re.compile(r"[0-9]{1,18}")


class Variables:
    """An environment mapping, and the problems found in it so far."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._problems: dict[str, Problem] = {}

    def first(self, *names: str) -> str:
        """The first of the names that is set; empty if none is."""
        return next((name for name in names if name in self.environment), "")

    def text(self, *names: str) -> str:
        """The value of the first of the names that is set; empty if none is."""
        return self.environment.get(self.first(*names), "")

    def whole(self, *names: str, least: int = 0) -> int | None:
        """The first of the names that is set, as a number; None if none is set, or if it is no such number (a problem)."""
        name = self.first(*names)
        if not name:
            return None
        number = as_whole(self.environment[name])
        if number is None or number < least:
            self.refuse(name, f"must be a whole number >= {least} in the environment, but is {self.environment[name]!r}")
            return None
        return number

    def show(self, *names: str) -> str:
        """`NAME=value` of the first of the names that is set."""
        name = self.first(*names)
        return f"{name}={self.environment[name]}" if name else ""

    def refuse(self, name: str, message: str) -> None:
        """One more problem; `message` completes the sentence that starts with the name. Only the first of a name is told."""
        self._problems.setdefault(name, Problem(name, message))

    def check(self) -> None:
        """Raises: ConfigError with every problem so far, if there is one."""
        if self._problems:
            raise ConfigError(tuple(self._problems.values()))


def as_whole(text: str) -> int | None:
    """A number of decimal digits and nothing else, small enough to be a count or a time."""
    return int(text) if _WHOLE.fullmatch(text) else None
