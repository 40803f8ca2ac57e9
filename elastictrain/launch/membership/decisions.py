"""What a launcher is told to do next."""

from dataclasses import dataclass

from elastictrain.launch.membership.records import End, Generation


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is to be done for now. `for_what` completes "waiting for ..." and is empty where nobody needs to know."""

    for_what: str = ""
    until_s: float | None = None
    """When this wait ends at the latest; None if nothing ends it but what it waits for."""


@dataclass(frozen=True, slots=True)
class Join:
    """Take part in this generation."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Create:
    """Try to make this the next generation; another host may have been faster."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Finish:
    """End what runs here. An `end` of this host is told to the others at once, one of another host is only followed."""

    end: End
    at_once: bool
    """Whether nothing can be saved any more: workers are not asked, and an orderly end that is under way is cut short."""


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """This host is left out for a while: say UNFIT, with `ended` of at least this generation, and check again later."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """End this launcher."""

    exit_code: int
    reason: str


Decision = Wait | Join | Create | Finish | LeaveOut | Leave
