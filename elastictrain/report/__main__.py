"""`python -m elastictrain.report RUN`: what a run has spent its time on, and what its failures cost.

RUN is the folder of a run (`run.dir`): a path or any fsspec URL. It may be training. Needs no GPU and no torch.
Exit codes: 0; 74 storage, or there are no events.
"""

import argparse
import json
import logging
import re
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

from elastictrain.entry_point import run_command
from elastictrain.errors import EXIT_OK, PermanentStorageError, UsageError
from elastictrain.report.history import EventReader
from elastictrain.report.output import as_json, as_text
from elastictrain.report.page import page
from elastictrain.report.summary import Price, RunReport, summarize
from elastictrain.storage.opening import open_store

_PRICE = re.compile(r"(\d+(?:\.\d+)?)/(?:gpu|worker)-hour")


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    return run_command(_parser(), arguments, _run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m elastictrain.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run: a path or any fsspec URL")
    parser.add_argument("--json", dest="as_json", action="store_true", help="for a script; a list where there are several runs")
    parser.add_argument("--html", metavar="FILE", help="write one page that needs no network")
    price_help = "what an hour of one worker costs, for the cost; or a file with lines `host,price`, `*` for the other hosts"
    parser.add_argument("--price", metavar="2.49/gpu-hour", type=parse_price, help=price_help)
    return parser


def parse_price(text: str) -> Price:
    """Of an hour of one worker, or by host. Raises: argparse.ArgumentTypeError."""
    if (match := _PRICE.fullmatch(text)) is not None:
        return float(match[1])
    try:
        pairs = (line.split(",") for line in Path(text).read_text(encoding="utf-8").splitlines() if line.strip())
        prices = {host.strip(): float(price) for host, price in pairs}
    except (OSError, ValueError) as error:
        expected = "like 2.49/gpu-hour or 0.31/worker-hour, or a file with lines `host,price`"
        raise argparse.ArgumentTypeError(f"must be {expected}, but is {text!r}: {error}") from None
    if not prices or not all(0 <= one < inf for one in prices.values()):
        raise argparse.ArgumentTypeError(f"must have prices >= 0 of hosts, but {text} has {prices}")
    return prices


def read_report(url: str) -> RunReport:
    """The report of a run. Raises: ConfigError, StorageError; PermanentStorageError if there are no events."""
    history = EventReader(open_store(url)).update()
    if not history.generations and not history.launchers:
        raise PermanentStorageError(f"{url} must be the folder of a run, but has no events in {url.rstrip('/')}/events")
    return summarize(history, url=url)


def _run(parsed: argparse.Namespace) -> int:
    reports = [read_report(url) for url in parsed.runs]
    if parsed.html is not None:
        try:
            Path(parsed.html).write_text(page(reports, price=parsed.price), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--html must name a file that can be written, but {error}") from error
    if parsed.as_json:
        found = [as_json(one, price=parsed.price) for one in reports]
        sys.stdout.write(json.dumps(found if len(found) > 1 else found[0], indent=1, allow_nan=False) + "\n")
        return EXIT_OK
    sys.stdout.write("\n\n".join("\n".join(as_text(one, price=parsed.price)) for one in reports) + "\n")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
