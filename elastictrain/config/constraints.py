"""What a config field's value must be, beyond its type; carried in `Annotated` beside the type."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """A number within [minimum, maximum], or (minimum, maximum] if `exclusive`; None leaves an end open."""

    minimum: float | None = None
    maximum: float | None = None
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class NonEmpty:
    """A text with at least one character that is not white space."""
