"""How many saves may fail in a row. Pure."""

from dataclasses import dataclass, replace

from elastictrain.errors import SavesFailingError


@dataclass(frozen=True, slots=True)
class FailedSaves:
    """Counts failed saves in a row against `checkpoint.max_failed_saves`."""

    limit: int
    in_a_row: int = 0

    def succeeded(self) -> "FailedSaves":
        """After a save that is committed."""
        return replace(self, in_a_row=0)

    def failed(self) -> "FailedSaves":
        """After a save that failed."""
        return replace(self, in_a_row=self.in_a_row + 1)

    @property
    def too_many(self) -> bool:
        """Whether `check` raises."""
        return self.in_a_row >= self.limit

    def check(self, cause: Exception, *, kept: str = "") -> None:
        """Raises: SavesFailingError once `limit` saves in a row have failed, `cause` being the last reason. `kept` tells where
        the newest state is instead."""
        if self.too_many:
            raise SavesFailingError(
                f"{self.in_a_row} checkpoints in a row could not be saved (`checkpoint.max_failed_saves` is {self.limit}); "
                f"the last reason: {cause}{'; ' if kept else ''}{kept}"
            ) from cause
