"""The words of one check of devices, put into verdicts."""

from dataclasses import dataclass

from elastictrain.preflight.verdict import Scope, Status, Verdict


@dataclass(frozen=True, slots=True)
class Saying:
    """Says what `check` found."""

    check: str

    def __call__(self, about: str, status: Status, measured: str, expected: str, remedy: str) -> Verdict:
        """`about`: the host, or something on it ("GPU 3 on h1"). An `expected` that is empty is left out."""
        return Verdict(
            check=self.check,
            scope=Scope.HOST,
            subject=about,
            status=status,
            measured=measured,
            expected=expected or None,
            remedy=remedy,
        )
