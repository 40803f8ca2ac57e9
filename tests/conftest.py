"""What holds for all tests: how many examples are tried, compiled bytecode, and which tests stay together on one worker."""

import gc
import logging
import os
import sys
from typing import Any

import pytest
from hypothesis import settings

# A busy machine is no failure: a time limit holds for the test, not for an example. See tests/unit/examples.py.
settings.register_profile("usual", max_examples=100, deadline=None)
settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("thorough", max_examples=5000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))

# Many containers set this. Then the tests, and our package in each process that they start, would be compiled anew every time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# All that imports and collection make lives to the end: the garbage collector need not go through it. See below.
gc.disable()

TOGETHER = ("tests/process/s3/", "tests/unit/test_")
"""Beginnings of files that share what takes long to set up: a server, our sources as syntax trees."""

APART = ("tests/process/test_scripts.py",)
"""Files whose tests share nothing and take long."""

LONGEST_FIRST = (
    "tests/process/s3/",
    "tests/process/test_adapters.py",
    "tests/process/test_own_training.py",
    "tests/process/test_launch.py",
    "tests/network/test_launch.py",
    "tests/process/test_two_runs.py",
    "tests/network/test_partitions.py",
    "tests/process/saver/test_memory_damage.py",
    "tests/network/test_slurm.py",
    "tests/network/test_chaos.py",
    "tests/network/test_replica_kills.py",
    "tests/network/test_stragglers.py",
    "tests/process/test_reattach.py",
    "tests/process/test_recipes_llama.py",
    "tests/process/test_float8.py",
    "tests/process/test_own_loop.py",
    "tests/process/test_data_workers.py",
    "tests/process/test_own_task.py",
    "tests/process/clouds/",
    "tests/process/test_hangs.py",
    "tests/process/test_scripts.py",
    "tests/process/test_frozen_store.py",
    "tests/process/test_stop.py",
    "tests/process/test_loggers.py",
    "tests/process/test_recovery.py",
    "tests/process/test_kill.py",
    "tests/process/saver/",
    "tests/process/preflight/test_command.py",
    "tests/process/test_deadlines.py",
    "tests/process/test_examples.py",
    "tests/process/test_augmentation.py",
    "tests/process/test_damage.py",
    "tests/process/test_fork_server.py",
)
"""After the unit tests: what is begun last should end soon, or one process works while the others have nothing left to do."""


def work_unit(nodeid: str) -> str:
    """What one process does at one go with `-n 2`: all of such a folder, a file, or one of such tests."""
    file = nodeid.partition("::")[0]
    if file in APART:
        return nodeid
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        if item.nodeid.startswith("tests/unit/"):
            return -1
        places = (place for place, start in enumerate(LONGEST_FIRST) if item.nodeid.startswith(start))
        return next(places, len(LONGEST_FIRST))

    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    # Marks of pytest-xdist for this (`xdist_group`) have no effect: its 3.8 does not know how pytest 9.2 names tests.
    from xdist.scheduler import LoadScopeScheduling

    class ByWorkUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return work_unit(nodeid)

    return ByWorkUnit(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    # pytest puts its handlers on each logger that does not propagate, six times a test; PyTorch has dozens of those.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()
