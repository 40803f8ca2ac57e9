"""The monitor process of a host, `python -m elastictrain.liveness FOLDER FACTS`. A worker starts it where no launcher runs."""

import json
import logging
import os
import signal
import sys
from functools import partial
from typing import NoReturn

import msgspec

from elastictrain.bounded_json import as_record
from elastictrain.errors import EXIT_OK
from elastictrain.events import Hang, Journal
from elastictrain.liveness.monitor_client import MonitoredHost, clear_if_unlocked
from elastictrain.liveness.rank_monitor import RankMonitor
from elastictrain.storage.private import clear_folder, sweep_folders


def main(folder: str, facts: MonitoredHost) -> NoReturn:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    # It ends with its last worker, whatever signal it or a worker receives.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    watch(RankMonitor(folder, facts, record=partial(keep, facts=facts)))
    # No orderly exit: a thread may hang in storage.
    os._exit(EXIT_OK)


def watch(monitor: RankMonitor) -> None:
    """Watch the workers of one generation on this host, until the last one has ended or left it."""
    sweep_folders(os.path.dirname(monitor.folder), clear=clear_if_unlocked)  # noqa: PTH120
    monitor.run()
    clear_folder(monitor.folder)


def keep(hang: Hang, stacks: str, *, facts: MonitoredHost) -> None:
    """Record a hang in the run's folder. Runs in a thread of its own, because storage may hang."""
    # Imported here because it takes long, and most monitors never record a hang.
    from elastictrain.storage.appendlog import open_append_log
    from elastictrain.storage.opening import open_store

    store = open_store(facts.run_dir)
    name = f"{facts.generation}-w{facts.ranks[0]:05d}"
    log = open_append_log(store, f"events/{name}.jsonl", flush_s=facts.flush_s, close_s=facts.close_s)
    journal = Journal(log, incarnation=facts.generation, rank=facts.ranks[0])
    key = f"stacks/{name}.txt"
    journal.record(msgspec.structs.replace(hang, stacks=key))
    journal.close()
    store.write(key, stacks.encode())


if __name__ == "__main__":
    # json.loads keeps paths that are not UTF-8; `parse_record` would refuse them.
    main(sys.argv[1], as_record(json.loads(sys.argv[2]), MonitoredHost))
