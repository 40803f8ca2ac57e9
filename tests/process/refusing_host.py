"""Runs `elastictrain.run` in forks of a process that has imported torch once, for tests of starts that must be refused.

One case a line of JSON comes in, its result goes out; see `refusals.py`.
"""

import json
import os
import sys
import time
from typing import Any

import torch.distributed.checkpoint  # noqa: F401

import elastictrain.train.worker  # noqa: F401
from elastictrain.entry_point import leave_process
from elastictrain.run import main
from elastictrain.storage.failures import RetryOptions


def run_case(case: dict[str, Any]) -> None:
    with open(case["log"], "wb", buffering=0) as log:  # noqa: PTH123
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(case["environment"])
    sys.path[:0] = case["path"]
    if case["patience_s"]:
        defaults = RetryOptions.__init__.__defaults__
        RetryOptions.__init__.__defaults__ = (*defaults[:3], case["patience_s"], defaults[4])  # type: ignore[index]
    leave_process(main(case["arguments"]))


for line in sys.stdin:
    case = json.loads(line)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        run_case(case)
    status = os.waitpid(child, 0)[1]
    sys.stdout.write(json.dumps({"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - began}) + "\n")
    sys.stdout.flush()
