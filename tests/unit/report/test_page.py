"""The page: whole, self-contained, and not broken by any name."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from elastictrain.report.__main__ import main
from elastictrain.report.charts import TimeScale, by_column, step_values
from elastictrain.report.ledger import Segment, TimeCause
from elastictrain.report.markup import Markup, join, tag
from elastictrain.report.page import page
from elastictrain.report.summary import summarize
from tests.unit.report.events import COLLECTIVE, Written, killed, lost_host, mismatch, undisturbed

EVIL = "<script>alert(1)</script>&\"'`</title><img src=http://evil/x>"
VOID = {"meta"}


class Reader(HTMLParser):
    """Collects what a browser would see, and checks that elements end in the order in which they began."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(*runs: Written, url: str = "run", price: float | None = 2.0) -> tuple[Reader, str]:
    text = page([summarize(run.history(), url=url) for run in runs], price=price)
    return Reader(text), text


def many_failures(count: int) -> Written:
    run, host = Written(), f"a{EVIL}"
    for number in range(1, count + 1):
        begin = 100.0 * number
        run.begin(begin, "a-1", number, 2, (host,))
        run.start(begin + 1, number, 2, (host,))
        run.rank(begin + 1, number, "resume", step=20 * number - 20, tier="memory")
        run.rank(begin + 1, number, "preflight", stage="hosts", level="full", seconds=0.5, counts={EVIL: 1}, findings=[{}])
        for step in range(20 * number - 9, 20 * number + 1):
            run.step(begin + 2 + step % 25, number, step)
            run.rank(begin + 2 + step % 25, number, "snapshot", step=step, stall_s=0.01)
        run.rank(begin + 50, number, "hang", guilty=[f"rank 1 on {host}"], hosts=[host], reason="frozen", text=30 * EVIL)
        run.end(begin + 60, "a-1", number, "failed", reason=EVIL, died=[f"rank 1 on {host}"])
    return run


@pytest.mark.parametrize("run", [killed(), lost_host(), undisturbed(), Written(), many_failures(50)])
def test_the_page_is_whole_and_needs_nothing_else(run: Written) -> None:
    reader, text = read(run, url=f"s3://bucket/{EVIL}")
    assert reader.open == []
    assert not {"script", "link", "img", "iframe", "object", "use"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name in ("src", "href", "srcset") or name.startswith("on")]
    assert not re.findall(r"url\(|@import", text)
    assert len(text.encode()) < 2_000_000


def test_the_page_names_each_culprit_and_its_evidence() -> None:
    reader, _ = read(killed())
    assert "rank 1 on a" in reader.text
    assert "local rank 1 was ended by SIGKILL" in reader.text
    assert "killed by SIGKILL" in reader.text


def test_the_page_shows_what_each_rank_called() -> None:
    reader, _ = read(mismatch("rank 1 on a"))
    assert COLLECTIVE["text"] in reader.text
    assert "rank 0 on aall_reduce([4])" in reader.text


def test_names_are_text() -> None:
    reader, _ = read(many_failures(2), url=EVIL)
    assert EVIL in reader.text
    assert tag("p", "<b>", Markup("<br>"), title='"<') == '<p title="&quot;&lt;">&lt;b&gt;<br></p>'
    assert join(["<", Markup("<i>")]) == "&lt;<i>"


def test_several_runs_are_compared() -> None:
    reader, _ = read(killed(), lost_host())
    assert reader.tags.count("article") == 2
    assert "Compared" in reader.text


def test_without_a_price_the_page_has_no_cost() -> None:
    assert "hour of a worker" in read(killed())[0].text
    assert "hour of a worker" not in read(killed(), price=None)[0].text


def test_columns_share_what_spans_several_of_them() -> None:
    scale = TimeScale(0.0, 10.0, 5)
    columns = by_column([Segment(1.0, 5.0, TimeCause.USEFUL, 2), Segment(5.0, 10.0, TimeCause.DRAIN, 1)], scale)
    assert [columns[index].get(TimeCause.USEFUL, 0.0) for index in range(5)] == pytest.approx([2.0, 4.0, 2.0, 0.0, 0.0])
    assert sum(sum(one.values()) for one in columns.values()) == pytest.approx(13.0)


def test_a_speed_is_that_of_several_steps() -> None:
    run = undisturbed()
    # The figures of step 4 come late, just before those of step 5.
    key = "events/000001-0a1b2c3d-r00000.jsonl"
    run.lines[key] = [line.replace(b"1790000020.0", b"1790000022.999") for line in run.lines[key]]
    losses, speeds = step_values(summarize(run.history(), url="run"))
    assert [value for _, value in losses[1]] == [1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    # 40 tokens a step: the last four took 8 s.
    assert [round(value, 2) for _, value in speeds[1]] == [40.0, 40.0, 15.0, 20.0]


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed().save(tmp_path)
    assert main([str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert Reader((tmp_path / "page.html").read_text()).open == []
    assert main([str(tmp_path), "--html", str(tmp_path / "missing" / "page.html")]) == 64
    assert "--html" in capsys.readouterr().err
