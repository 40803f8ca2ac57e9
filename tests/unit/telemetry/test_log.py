import io
import logging
import warnings
from collections.abc import Iterator

import pytest

from elastictrain.telemetry.log import OWN_LOGGERS, LogPrefix, WorkerHandler, set_up_logging

NAMES = (None, "py.warnings", "user", *OWN_LOGGERS)


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in NAMES}
    yield
    logging.captureWarnings(False)
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, WorkerHandler):
            root.removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_the_prefix_follows_the_run() -> None:
    stream = io.StringIO()
    prefix = LogPrefix(rank=0)
    set_up_logging(prefix, stream=stream)
    logger = logging.getLogger("elastictrain.train.loop")
    logger.info("starting %d", 1)
    prefix.incarnation = "a3f"
    prefix.step = lambda: 12
    logger.warning("slow")
    first, second = stream.getvalue().splitlines()
    assert first.endswith(" INFO [- rank 0] starting 1")
    assert second.endswith(" WARNING [a3f rank 0 step 12] slow")


def test_other_ranks_and_other_libraries_only_warn() -> None:
    stream = io.StringIO()
    set_up_logging(LogPrefix(rank=0), stream=stream)
    logging.getLogger("other.library").info("chatter")
    set_up_logging(LogPrefix(rank=1), stream=stream)
    logging.getLogger("elastictrain.train").info("chatter")
    logging.getLogger("elastictrain.train").warning("heard")
    assert [line.rsplit(" ", 1)[1] for line in stream.getvalue().splitlines()] == ["heard"]


def test_setting_up_again_replaces_the_handler() -> None:
    first, second = io.StringIO(), io.StringIO()
    set_up_logging(LogPrefix(rank=0), stream=first)
    set_up_logging(LogPrefix(rank=0), stream=second)
    logging.getLogger("elastictrain").warning("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_python_warnings_come_once_from_rank_0_in_one_line(rank: int, lines: int) -> None:
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        set_up_logging(LogPrefix(rank=rank), stream=stream)
        warnings.warn("deprecated", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert len(stream.getvalue().splitlines()) == lines
    assert stream.getvalue().count("UserWarning: deprecated") == lines


def test_a_broken_record_does_not_raise(capsys: pytest.CaptureFixture[str]) -> None:
    handler = WorkerHandler(io.StringIO(), prefix=LogPrefix(rank=0))
    handler.emit(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    assert "Logging error" in capsys.readouterr().err
