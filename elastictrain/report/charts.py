"""Drawings over the time of a run: bands of causes, the hosts, curves, and marks. Pure functions of a report."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from elastictrain.report.ledger import Segment, TimeCause
from elastictrain.report.markup import Markup, join, svg, tag
from elastictrain.report.output import show_number, show_s, show_time
from elastictrain.report.records import StepRow
from elastictrain.report.summary import RunReport

COLUMNS = 500  # of a drawing: more cannot be told apart
_BANDS = 120
_TICKS = 5
_DAY_S = 86400.0
_SPEED_STEPS = 8
_HEIGHT = 100.0
MAX_MARKS = 1000


@dataclass(frozen=True, slots=True)
class TimeScale:
    """From Unix seconds to columns."""

    begin: float
    end: float
    columns: int = COLUMNS

    def at(self, time: float) -> float:
        """The place of a time, within the drawing."""
        share = (time - self.begin) / max(self.end - self.begin, 1e-9)
        return round(min(1.0, max(0.0, share)) * self.columns, 2)

    def axis(self) -> Markup:
        """The times below a drawing."""
        times = [self.begin + index * (self.end - self.begin) / (_TICKS - 1) for index in range(_TICKS)]
        shown = slice(5, 16) if self.end - self.begin > _DAY_S else slice(11, 19)
        return tag("div", (tag("span", show_time(one)[shown]) for one in times), class_="axis")


def color(cause: TimeCause) -> str:
    """The CSS that paints something in the colour of a cause."""
    return f"--c:var(--{cause.name.lower().replace('_', '-')})"


def legend(causes: Iterable[TimeCause]) -> Markup:
    return tag("ul", *(tag("li", tag("i", style=color(one)), str(one)) for one in causes), class_="legend")


CurvePoints = list[tuple[float, float]]  # times and values
Columns = Mapping[int, Mapping[TimeCause, float]]  # worker-seconds by cause; empty columns are left out


def by_column(segments: Iterable[Segment], scale: TimeScale) -> Columns:
    """What was done in each column."""
    found: dict[int, dict[TimeCause, float]] = defaultdict(lambda: defaultdict(float))
    width = max(scale.end - scale.begin, 1e-9) / scale.columns
    for one in segments:
        begin, end = one.begin - scale.begin, one.end - scale.begin
        first, last = int(begin / width), min(scale.columns - 1, int(end / width))
        if first == last:
            found[first][one.cause] += one.worker_s
            continue
        for column in range(first, last + 1):
            overlap = min(end, (column + 1) * width) - max(begin, column * width)
            if overlap > 0:
                found[column][one.cause] += overlap * one.workers
    return found


def whole_bar(seconds: Mapping[TimeCause, float], worker_s: float) -> Markup:
    """One bar with the share of each cause."""
    begin, parts = 0.0, []
    for cause, value in seconds.items():
        share = value / worker_s * 1000
        title = tag("title", f"{cause}: {show_s(value)}, {value / worker_s:.2%}")
        parts.append(tag("rect", title, x=f"{begin:.2f}", y=0, width=f"{share:.2f}", height=10, style=color(cause)))
        begin += share
    return svg(parts, width=1000, height=10, label="share of each cause", css="whole")


def bands(report: RunReport) -> Markup:
    """Shares of all workers' time, stacked, over the time of the run."""
    scale = TimeScale(report.begin, report.end, _BANDS)
    columns = by_column(report.segments, scale)
    floors, parts = [0.0] * _BANDS, []
    for cause in report.seconds:
        upper, lower = [], []
        for index in range(_BANDS):
            column, bottom = columns.get(index, {}), floors[index]
            floors[index] += column.get(cause, 0.0) / max(sum(column.values()), 1e-9) * _HEIGHT
            upper += [(index, floors[index]), (index + 1, floors[index])]
            lower += [(index, bottom), (index + 1, bottom)]
        points = " L".join(f"{x} {_HEIGHT - y:.2f}" for x, y in (*upper, *reversed(lower)))
        parts.append(tag("path", tag("title", str(cause)), d=f"M{points}Z", style=color(cause)))
    drawing = svg(parts, width=_BANDS, height=_HEIGHT, label="causes over time, stacked", css="bands")
    return join(drawing, scale.axis())


def host_rows(report: RunReport) -> Markup:
    """For each host what most of its time in generations was spent on, and the failures of which it is the culprit."""
    scale = TimeScale(report.begin, report.end)
    hosts = list(dict.fromkeys(host for one in report.generations for host in one.hosts))
    shown = hosts[:64]
    by_generation: dict[int, list[Segment]] = defaultdict(list)
    for one in report.segments:
        if one.generation:
            by_generation[one.generation].append(one)
    done = {number: by_column(found, scale) for number, found in by_generation.items()}
    rows = []
    for host in shown:
        mine = _merged(done.get(span.number, {}) for span in report.generations if host in span.hosts)
        blamed = [one for one in report.failures if host in one.culprit.replace(",", " ").split()]
        marks = [(one.time, f"{show_time(one.time)}: {one.culprit}, {one.cause}") for one in blamed]
        strip = svg(_runs(mine), _needles(marks, scale), width=COLUMNS, height=10, label=host, css="strip")
        rows.append(tag("div", tag("span", host, title=host), strip, class_="row"))
    hidden = len(hosts) - len(shown)
    more = [tag("p", f"and {hidden} more hosts", class_="soft indent")] if hidden else []
    return join(rows, scale.axis(), more)


def _merged(parts: Iterable[Columns]) -> Columns:
    found: dict[int, dict[TimeCause, float]] = defaultdict(lambda: defaultdict(float))
    for columns in parts:
        for index, column in columns.items():
            for cause, seconds in column.items():
                found[index][cause] += seconds
    return found


def _runs(columns: Columns) -> list[Markup]:
    """Columns with the same main cause as one rectangle."""
    found: list[Markup] = []
    begin, main = 0, None
    for index in range(COLUMNS + 1):
        column = columns.get(index, {})
        now = max(column, key=column.__getitem__) if column else None
        if now is not main:
            if main is not None:
                title = tag("title", str(main))
                found.append(tag("rect", title, x=begin, y=0, width=index - begin, height=10, style=color(main)))
            begin, main = index, now
    return found


def _needles(marks: Sequence[tuple[float, str]], scale: TimeScale) -> list[Markup]:
    """Upright marks with titles; of very many the newest."""
    return [
        tag("rect", tag("title", text), x=max(0.0, scale.at(time) - 0.6), y=0, width=1.2, height=10, style="--c:var(--ink)")
        for time, text in marks[-MAX_MARKS:]
    ]


def mark_rows(report: RunReport, rows: Mapping[str, Sequence[tuple[float, str]]]) -> Markup:
    """Rows of marks, each with its name; empty ones are left out."""
    scale = TimeScale(report.begin, report.end)
    found = [_mark_row(name, marks, scale) for name, marks in rows.items() if marks]
    return join(found, scale.axis()) if found else tag("p", "None yet.", class_="soft")


def _mark_row(name: str, marks: Sequence[tuple[float, str]], scale: TimeScale) -> Markup:
    drawing = svg(_needles(marks, scale), width=COLUMNS, height=10, label=name, css="ticks")
    return tag("div", tag("span", name, title=name), drawing, class_="row")


def curve(report: RunReport, values: Mapping[int, CurvePoints], *, name: str, paint: str) -> Markup:
    """Values over time, one line for each generation, with a mark at each failure. `values`: (time, value) by generation."""
    scale = TimeScale(report.begin, report.end)
    everything = sorted(value for points in values.values() for _, value in points)
    if not everything:
        return tag("p", f"No {name} yet.", class_="soft")
    # The first steps of a run must not flatten all others.
    low, high = everything[0], everything[min(len(everything) - 1, int(0.995 * len(everything)))]
    span = max(high - low, 1e-12)
    lines = []
    for points in filter(None, values.values()):
        places: dict[float, float] = {}
        for time, value in points:
            places[round(scale.at(time))] = _HEIGHT - 2 - min(1.0, (value - low) / span) * (_HEIGHT - 4)
        path = " L".join(f"{x:g} {y:.1f}" for x, y in places.items())
        dot = " h0.5" if len(places) == 1 else ""
        lines.append(tag("path", d=f"M{path}{dot}", class_="line", style=f"--c:var(--{paint})"))
    marks = []
    for one in report.failures[-MAX_MARKS:]:
        x, title = scale.at(one.time), tag("title", f"{one.culprit}: {one.cause}")
        marks.append(tag("line", title, x1=x, x2=x, y1=0, y2=_HEIGHT, class_="restart"))
    caption = tag("figcaption", f"{name}: {show_number(low)} to {show_number(high)}")
    return tag("figure", caption, svg(marks, lines, width=COLUMNS, height=_HEIGHT, label=name, css="curve"), scale.axis())


def step_values(report: RunReport) -> tuple[dict[int, CurvePoints], dict[int, CurvePoints]]:
    """Losses and speeds (tokens or samples a second) by generation. A speed is that of several steps: the figures of one may
    be taken late, which makes it seem long and the next one short."""
    losses: dict[int, CurvePoints] = {}
    speeds: dict[int, CurvePoints] = {}
    for span in report.generations:
        steps = span.events.of(StepRow)
        sizes = (one.row.samples if report.tokens is None else one.row.tokens or 0.0 for one in steps)
        done = list(accumulate(sizes))
        found = [(one.time + span.offset, one.row.loss) for one in steps]
        losses[span.number] = [(time, loss) for time, loss in found if loss is not None]
        before = [max(0, index - _SPEED_STEPS) for index in range(len(steps))]
        elapsed = [one.time - steps[index].time for one, index in zip(steps, before, strict=True)]
        speeds[span.number] = [
            (found[index][0], (done[index] - done[before[index]]) / elapsed[index])
            for index in range(1, len(steps))
            if elapsed[index] > 0
        ]
    return losses, speeds
