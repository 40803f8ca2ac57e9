"""The report as one page of HTML: nothing is loaded, and no script runs."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from elastictrain.report.charts import bands, color, curve, host_rows, legend, mark_rows, step_values, whole_bar
from elastictrain.report.failures import FailureRecord
from elastictrain.report.markup import Markup, join, table, tag
from elastictrain.report.output import figures, show_parts, show_s, show_time
from elastictrain.report.records import EvalRow, PreflightRow, ResumeRow, SavedRow, SnapshotRow
from elastictrain.report.summary import Price, RunReport

_CSS = Path(__file__).with_name("page.css")
_MOST_ROWS = 200  # of a table: the newest


def page(reports: Sequence[RunReport], *, price: Price | None) -> str:
    """The page for one or several runs. `price` of an hour of one worker."""
    title = "elastictrain: " + ", ".join(_name(one) for one in reports)
    head = tag(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'),
        tag("title", title),
        tag("style", Markup(_CSS.read_text())),
    )
    compared = [_comparison(reports, price)] if len(reports) > 1 else []
    body = tag("body", tag("main", compared, (_run(one, price) for one in reports)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _name(report: RunReport) -> str:
    return report.url.rstrip("/").rpartition("/")[2] or report.url


def _run(report: RunReport, price: Price | None) -> Markup:
    title = tag("h1", report.url)
    if not report.worker_s:
        return tag("article", title, tag("p", "No generation has begun here yet."))
    losses, speeds = step_values(report)
    unit = report.rate[1] if report.rate is not None else "samples/s"
    span = f"{show_time(report.begin)} to {show_time(report.end)}, {show_s(report.duration_s)}, step {report.steps}"
    curves = [curve(report, losses, name="loss", paint="curve"), curve(report, speeds, name=unit, paint="other")]
    return tag(
        "article",
        title,
        tag("p", span, class_="soft"),
        _cards(report, price),
        _section("Where the time went", _causes(report)),
        _section("Over time", _soft("Shares of all workers."), bands(report), legend(report.seconds)),
        _section("Hosts", _soft(_HOSTS), host_rows(report)),
        _section("Failures", _failures(report)),
        _section("Training", _soft("Red: failures."), curves),
        _section("Checkpoints", _checkpoints(report)),
        _section("Preflight", _preflight(report)),
        *([_section("Cost", _cost(report, price))] if price is not None else []),
    )


_HOSTS = "What each host did most, in the colors above. Blank: it was in no generation. Upright marks: its failures."


def _soft(text: str) -> Markup:
    return tag("p", text, class_="soft")


def _section(title: str, *content: str | Sequence[str]) -> Markup:
    return tag("section", tag("h2", title), *content)


def _cards(report: RunReport, price: Price | None) -> Markup:
    found = figures(report, price=price)
    cards = [(name, value) for name, value in found.items() if not name.startswith("cost ")]
    shown = (tag("div", tag("b", value), tag("span", name), class_="card") for name, value in cards)
    return tag("div", shown, class_="cards")


def _causes(report: RunReport) -> Markup:
    rows = [
        (join(tag("i", style=color(cause)), str(cause)), show_s(value), f"{value / report.worker_s:.2%}")
        for cause, value in report.seconds.items()
    ]
    whole = whole_bar(report.seconds, report.worker_s)
    parts = report.first_step_s
    first = [_soft(f"To the first step of the last start: {show_parts(parts, most=len(parts))}.")] if parts else []
    return join(whole, first, table(("cause", "time of workers", "share"), rows, class_="numbers"))


def _failures(report: RunReport) -> Markup:
    if not report.failures:
        return _soft("None.")
    rungs = [
        (rung.replace("_", " "), str(one.count), show_s(one.median_s), show_s(one.worst_s))
        for rung, one in report.rungs.items()
    ]
    head = ("noticed", "culprit and evidence", "cause", "steps lost", "recovered in")
    newest = report.failures[-_MOST_ROWS:]
    more = [_soft(f"The newest {_MOST_ROWS} of {len(report.failures)}.")] if newest != report.failures else []
    return join(
        table(("recovery", "times", "usually", "at worst"), rungs, class_="numbers"),
        more,
        table(head, (_failure(one) for one in newest)),
    )


def _failure(one: FailureRecord) -> tuple[str, str, str, str, str]:
    code = "" if one.exit_code is None else f"exit code {one.exit_code}, "
    sentences = (tag("p", text[:2000]) for text in one.evidence)
    calls = table(("", "called"), one.collective.calls.items()) if one.collective is not None else ""
    evidence = tag("details", tag("summary", f"{code}generation {one.generation}"), sentences, calls)
    lost = "" if one.lost_steps is None else str(one.lost_steps)
    recovered = "not yet" if one.recover_s is None else f"{show_s(one.recover_s)} ({one.rung.replace('_', ' ')})"
    return show_time(one.time), join(tag("b", one.culprit or "nobody named"), evidence), one.cause, lost, recovered


def _checkpoints(report: RunReport) -> Markup:
    rows: dict[str, list[tuple[float, str]]] = {"storage": [], "host memory": [], "restored": [], "eval": []}
    tiers = Counter[str]()
    for span in report.generations:
        for saved in span.events.of(SavedRow):
            text = f"step {saved.row.step}: {saved.row.bytes / 1e6:,.1f} MB, {saved.row.reason}"
            rows["storage"].append((saved.time + span.offset, text))
        for snapshot in span.events.of(SnapshotRow):
            text = f"step {snapshot.row.step}, training waited {show_s(snapshot.row.stall_s)}"
            rows["host memory"].append((snapshot.time + span.offset, text))
        for resume in span.events.of(ResumeRow):
            rows["restored"].append((resume.time + span.offset, f"step {resume.row.step} from {resume.row.tier}"))
            tiers[resume.row.tier] += resume.row.tier != "none"
        for found in span.events.of(EvalRow):
            rows["eval"].append((found.time + span.offset, f"step {found.row.step}: {found.row.loss}"))
    sums = ", ".join(f"{count} from {tier}" for tier, count in sorted(tiers.items()) if count)
    counts = f"{len(rows['storage'])} saved, {len(rows['host memory'])} snapshots; restored: {sums or 'never'}."
    return join(_soft(counts), mark_rows(report, rows))


def _preflight(report: RunReport) -> Markup:
    found = [(one.time + span.offset, one.row) for span in report.generations for one in span.events.of(PreflightRow)]
    if not found:
        return _soft("None recorded.")
    rows = []
    for time, row in sorted(found, key=lambda one: one[0])[-_MOST_ROWS:]:
        counts = ", ".join(f"{number} {status}" for status, number in row.counts.items() if number)
        said = (" ".join(str(one.get(key)) for key in ("status", "check", "subject", "measured")) for one in row.findings)
        shown = join(counts, (tag("div", text[:300], class_="soft") for text in said))
        rows.append((show_time(time), f"{row.stage}, {row.level}", show_s(row.seconds), shown))
    return table(("at", "stage and level", "took", "found"), rows)


def _cost(report: RunReport, price: Price) -> Markup:
    rows = [(name, value) for name, value in figures(report, price=price).items() if name.startswith("cost")]
    told = f"at {price:g} for an hour of a worker" if isinstance(price, float | int) else "at the prices of its hosts"
    return table((told, ""), rows, class_="numbers")


def _comparison(reports: Sequence[RunReport], price: Price | None) -> Markup:
    found = [figures(one, price=price) for one in reports]
    names = dict.fromkeys(name for one in found for name in one)
    rows = [(name, *(one.get(name, "") for one in found)) for name in names]
    bars = [
        tag("div", tag("span", _name(one), title=one.url), whole_bar(one.seconds, one.worker_s), class_="row")
        for one in reports
        if one.worker_s
    ]
    causes = dict.fromkeys(cause for one in reports for cause in one.seconds)
    return _section("Compared", table(("", *map(_name, reports)), rows, class_="numbers"), bars, legend(causes))
