"""The figures of a run: shares of its time, steps, speed, failures and cost. A pure function of the events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from elastictrain.errors import UsageError
from elastictrain.report.failures import FailureRecord, RungFigures, by_rung, find_failures
from elastictrain.report.history import History
from elastictrain.report.ledger import GenerationSpan, Segment, TimeCause, attribute, spans
from elastictrain.report.records import FirstStepRow, ResumeRow, StepRow

HOUR_S = 3600.0
BILLION = 1e9


Price = float | Mapping[str, float]  # by host; `*` for those that are not named


def price_of(price: Price, hosts: Sequence[str]) -> float:
    """The mean over `hosts`. Raises: UsageError if one has no price."""
    if isinstance(price, float | int):
        return float(price)
    if unknown := [name for name in hosts if name not in price and "*" not in price]:
        raise UsageError(f"--price must have a price of each host, or of `*`, but has none of {', '.join(unknown)}")
    return sum(price[name if name in price else "*"] for name in hosts) / max(1, len(hosts))


@dataclass(frozen=True, slots=True)
class Costs:
    """In the currency of the price; None where nothing was done yet."""

    total: float
    wasted: float  # of the total, for anything but useful steps
    per_step: float | None
    per_billion_tokens: float | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """Figures of a run from its first start to its newest event."""

    url: str
    begin: float  # Unix seconds
    end: float
    segments: Sequence[Segment]
    generations: Sequence[GenerationSpan]
    failures: Sequence[FailureRecord]
    worker_s: float
    seconds: dict[TimeCause, float]  # of workers, by cause; causes that took no time are left out
    steps: int  # the newest step that is done
    new_steps: int  # steps done for the first time here
    repeated_steps: int
    samples: float  # of new steps
    tokens: float | None  # likewise; None where the task does not count them
    mfu: float | None  # the median of the steps
    step_s: float | None  # likewise
    first_step_s: Mapping[str, float]  # from the command to the first step of the last start, by part; empty if it was not done
    garbled: int  # lines that no writer wrote like that

    @property
    def goodput(self) -> float:
        """Share of useful steps in the time of all workers, absent ones too."""
        return self._share(self.seconds.get(TimeCause.USEFUL, 0.0), self.worker_s)

    @property
    def goodput_present(self) -> float:
        """The same, of the time of workers whose hosts were there."""
        return self._share(self.seconds.get(TimeCause.USEFUL, 0.0), self.present_s)

    @property
    def attributed(self) -> float:
        return self._share(self.worker_s - self.seconds.get(TimeCause.UNKNOWN, 0.0), self.worker_s)

    @property
    def present_s(self) -> float:
        return self.worker_s - self.seconds.get(TimeCause.ABSENT, 0.0)

    @property
    def duration_s(self) -> float:
        return self.end - self.begin

    @property
    def mtbf_s(self) -> float | None:
        """Time in which generations ran, for each failure."""
        ran_s = sum(one.end - one.begin for one in self.generations)
        return ran_s / len(self.failures) if self.failures else None

    @property
    def rungs(self) -> dict[str, RungFigures]:
        return by_rung(self.failures)

    @property
    def rate(self) -> tuple[float, str] | None:
        """New tokens, or samples, of a second of the whole run; None if it took no time."""
        if not self.duration_s:
            return None
        return (self.tokens or self.samples) / self.duration_s, "samples/s" if self.tokens is None else "tokens/s"

    def costs(self, price: Price) -> Costs:
        """`price` of one worker and hour whose host is there. A worker of a generation costs the mean of its hosts, one that
        waits beside it the mean of the others, and one between generations the mean of all."""
        everyone = dict.fromkeys(host for one in self.generations for host in one.hosts)
        total = useful = 0.0
        for one in self.segments:
            if one.cause is not TimeCause.ABSENT:
                hosts = next((span.hosts for span in self.generations if span.begin <= one.begin < span.end), ())
                waits = one.cause is TimeCause.WAITING
                charged = [host for host in everyone if not hosts or (host in hosts) != waits]
                cost = one.worker_s / HOUR_S * price_of(price, charged or [*everyone])
                total += cost
                useful += cost if one.cause is TimeCause.USEFUL else 0.0
        per_step = total / self.new_steps if self.new_steps else None
        return Costs(total, total - useful, per_step, total / self.tokens * BILLION if self.tokens else None)

    @staticmethod
    def _share(part: float, whole: float) -> float:
        return part / whole if whole else 0.0


def summarize(history: History, *, url: str) -> RunReport:
    """The report of all that is known by now."""
    generations, segments = spans(history), attribute(history)
    seconds = dict.fromkeys(TimeCause, 0.0)
    for one in segments:
        seconds[one.cause] += one.worker_s
    steps = [one for span in generations for one in span.events.of(StepRow)]
    newest = list(accumulate((one.row.step for one in steps), max, initial=_first_resumed(generations)))
    new = [one.row for one, before in zip(steps, newest, strict=False) if one.row.step > before]
    usual = [one.end - one.begin for one in segments if one.cause is TimeCause.USEFUL]
    started = [one.row.seconds for span in generations for one in span.events.of(FirstStepRow)]
    mfus = [one.mfu for one in new if one.mfu is not None]
    return RunReport(
        url=url,
        begin=min((one.begin for one in segments), default=0.0),
        end=max((one.end for one in segments), default=0.0),
        segments=segments,
        generations=generations,
        failures=find_failures(generations, history.offsets()),
        worker_s=sum(seconds.values()),
        seconds={cause: value for cause, value in seconds.items() if value},
        steps=newest[-1],
        new_steps=len(new),
        repeated_steps=len(steps) - len(new),
        samples=float(sum(one.samples for one in new)),
        tokens=_tokens(new),
        mfu=median(mfus) if mfus else None,
        step_s=median(usual) if usual else None,
        first_step_s=started[-1] if started else {},
        garbled=history.garbled,
    )


def _first_resumed(generations: Sequence[GenerationSpan]) -> int:
    """The step that the first generation resumed from: older steps were done elsewhere."""
    resumes = (one.events.first(ResumeRow) for one in generations)
    return next((one.row.step for one in resumes if one is not None), 0)


def _tokens(steps: Sequence[StepRow]) -> float | None:
    """None unless all steps count tokens."""
    counts = [one.tokens for one in steps]
    known = [one for one in counts if one is not None]
    return sum(known) if counts and len(known) == len(counts) else None
