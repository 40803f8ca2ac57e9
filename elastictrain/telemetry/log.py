"""Logging of worker processes: to stderr, prefixed with generation, rank and step; rank 0 speaks for the group."""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

OWN_LOGGERS = ("elastictrain", "recipes", "__main__")


@dataclass(slots=True)
class LogPrefix:
    """What stands before each message; the trainer changes it as the run goes on."""

    rank: int
    incarnation: str = "-"
    step: Callable[[], int] = int  # the step that is being worked on; 0, for none, is not shown

    def text(self) -> str:
        """`[incarnation rank 0 step 12]`"""
        step = f" step {number}" if (number := self.step()) else ""
        return f"[{self.incarnation} rank {self.rank}{step}]"


class WorkerHandler(logging.Handler):
    """Writes to a stream without tearing a progress bar that is drawn on it."""

    def __init__(self, stream: TextIO, *, prefix: LogPrefix) -> None:
        super().__init__()
        self._stream = stream
        self._prefix = prefix
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(prefix)s %(message)s", "%H:%M:%S"))

    def format(self, record: logging.LogRecord) -> str:
        if record.name == "py.warnings":
            # The text of a Python warning carries the source line below it.
            record = logging.makeLogRecord({**record.__dict__, "msg": record.getMessage().split("\n")[0], "args": ()})
        record.prefix = self._prefix.text()
        return super().format(record)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=self._stream)
            self._stream.flush()
        except Exception:  # noqa: BLE001 - logging must never end the run
            self.handleError(record)


def set_up_logging(prefix: LogPrefix, *, stream: TextIO | None = None) -> None:
    """Sends everything that is logged in this process to `stream` (stderr), and Python's warnings with it.

    Rank 0 logs what we and the recipes say; other ranks, and other libraries, only warn. Python's warnings come from rank 0
    alone: they are the same on every rank. May be called again; the handler is then replaced.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, WorkerHandler)]:
        root.removeHandler(handler)
    handler = WorkerHandler(stream if stream is not None else sys.stderr, prefix=prefix)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO if prefix.rank == 0 else logging.WARNING)
    logging.getLogger("py.warnings").setLevel(logging.WARNING if prefix.rank == 0 else logging.ERROR)
    logging.captureWarnings(True)
