"""The verdicts of one check about one host, and sizes as people read them."""

from dataclasses import dataclass

from elastictrain.preflight.verdict import Figure, Scope, Status, Verdict

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """Says what `check` found about `host`."""

    check: str
    host: str

    def passed(self, measured: Figure = None, *, expected: Figure = None, unit: str = "") -> Verdict:
        """All is well."""
        return self._verdict(Status.PASS, measured, expected, unit, "")

    def skipped(self, measured: Figure, *, remedy: str) -> Verdict:
        """It does not apply, or nothing is known."""
        return self._verdict(Status.SKIP, measured, None, "", remedy)

    def warned(self, measured: Figure, *, remedy: str, expected: Figure = None, unit: str = "") -> Verdict:
        """The host can take part, but worse than it could."""
        return self._verdict(Status.WARN, measured, expected, unit, remedy)

    def failed(
        self, measured: Figure, *, remedy: str, expected: Figure = None, unit: str = "", may_pass: bool = False
    ) -> Verdict:
        """The host cannot take part. `may_pass`: as in `Verdict`."""
        return self._verdict(Status.FAIL, measured, expected, unit, remedy, may_pass=may_pass)

    def _verdict(
        self, status: Status, measured: Figure, expected: Figure, unit: str, remedy: str, *, may_pass: bool = False
    ) -> Verdict:
        return Verdict(
            check=self.check,
            scope=Scope.HOST,
            subject=self.host,
            status=status,
            measured=measured,
            expected=expected,
            unit=unit,
            remedy=remedy,
            may_pass=may_pass,
        )


def in_gib(num_bytes: float) -> float:
    """Bytes as GiB with three significant digits."""
    return float(f"{num_bytes / GIB:.3g}")
