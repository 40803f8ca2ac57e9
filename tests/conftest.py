"""What holds for all tests: how many examples are tried, compiled bytecode, and which tests stay together on one worker."""

import gc
import os
import sys
from typing import Any

import pytest
from hypothesis import settings

# A busy machine is no failure: a time limit holds for the test, not for an example. See tests/unit/examples.py.
settings.register_profile("usual", max_examples=100, deadline=None)
settings.register_profile("thorough", max_examples=5000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))

# Many containers set this. Then the tests, and our package in each process that they start, would be compiled anew every time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

TOGETHER = ("tests/process/s3/", "tests/network/")
"""Folders whose files share what takes long to set up, or measure rates that they would spoil for each other."""


def work_unit(nodeid: str) -> str:
    """What one process does at one go with `-n 2`: a file, all of such a folder."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    # Marks of pytest-xdist for this (`xdist_group`) have no effect: its 3.8 does not know how pytest 9.2 names tests.
    from xdist.scheduler import LoadScopeScheduling

    class ByWorkUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return work_unit(nodeid)

    return ByWorkUnit(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    # All that imports and collection have made lives to the end: the garbage collector need not go through it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
