"""One worker's life: start, agree, build, restore, train, end; and what it says when it cannot go on."""

import faulthandler
import logging
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping

import torch

from elastictrain.config.composed import RunConfig
from elastictrain.distributed.board import Board
from elastictrain.distributed.group import flight_recorder, leave
from elastictrain.errors import EXIT_OK, EXIT_STOPPED, EXIT_TRANSPORT, ElasticTrainError, StopRequestedError
from elastictrain.events import Failure, Journal, Stop
from elastictrain.fault.meaning import Meaning, describe_heard, meaning
from elastictrain.fault.parent import follow_parent
from elastictrain.fault.stop import StopListener
from elastictrain.fault.watchdog import Overdue, Watchdog
from elastictrain.fault.whereabouts import Phase, Whereabouts
from elastictrain.identity import Identity
from elastictrain.storage.store import Store
from elastictrain.telemetry.log import LogPrefix, set_up_logging
from elastictrain.train.build import Built, bring_up, build
from elastictrain.train.loop import Loop

logger = logging.getLogger(__name__)


class Worker:
    """Runs one configuration in this process. All that is global to a process is touched here and in run.py."""

    def __init__(self, config: RunConfig, identity: Identity) -> None:
        self._config = config
        self._identity = identity
        self._began_s = time.monotonic()
        self._whereabouts = Whereabouts()
        self._stop = StopListener()
        self._watchdog = Watchdog(
            config.fault,
            mark=lambda: self._whereabouts.mark,
            stop=lambda: self._stop.request,
            end=self._end_overdue,
        )
        self._prefix = LogPrefix(identity.rank, step=lambda: self._whereabouts.mark.step)
        self._ending = threading.Lock()
        self._journal: Journal | None = None
        self._board: Board | None = None
        self._store: Store | None = None
        self._incarnation = "none"

    def run(self) -> int:
        """Train to the end; returns the exit code."""
        set_up_logging(self._prefix)
        torch.set_num_threads(self._config.run.num_threads)
        if self._config.run.deterministic:
            # cuBLAS picks among algorithms at run time unless its workspace has a fixed size; read when CUDA starts.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self._stop.start()
        if self._identity.launched and not follow_parent(os.getppid()):
            return EXIT_STOPPED
        self._watchdog.start()
        try:
            return self._train()
        except BaseException as error:  # noqa: BLE001  # the edge of the process: everything that ends it is accounted for
            return self._end_failed(error)
        finally:
            self._watchdog.close()
            self._stop.close()

    def _train(self) -> int:
        config, identity = self._config, self._identity
        started = bring_up(config, identity, whereabouts=self._whereabouts, stop_request=lambda: self._stop.request)
        self._incarnation, self._store = started.incarnation.name, started.store
        self._prefix.incarnation = self._incarnation
        self._journal, self._board = started.journal, started.board
        built = build(config, identity, started, whereabouts=self._whereabouts, stop_request=lambda: self._stop.request)
        code, reason = EXIT_OK, "done"
        try:
            Loop(built.loop).run()
        except StopRequestedError as error:
            code, reason = EXIT_STOPPED, str(error)
        self._whereabouts.enter(Phase.END)
        self._say_goodbye(built, code=code, reason=reason)
        leave(started.group)
        return code

    def _say_goodbye(self, built: Built, *, code: int, reason: str) -> None:
        step = built.loop.state.step
        if code == EXIT_OK:
            built.show_sample()
        built.close()
        if self._identity.speaks and self._journal is not None:
            seconds = time.monotonic() - self._began_s
            self._journal.record(Stop(step=step, reason=reason, exit_code=code, seconds=seconds))
        if self._board is not None:
            self._board.close()
        if self._journal is not None:
            self._journal.close()
        if self._identity.speaks and code == EXIT_STOPPED:
            sys.stderr.write(
                f"elastictrain: stopped on request ({reason}) after step {step}, which is saved in {self._config.run.dir}; "
                "the same command continues from there\n"
            )

    def _end_failed(self, error: BaseException) -> int:
        heard = self._last_heard()
        what = meaning(error, mark=self._whereabouts.mark, last_heard=heard)
        stack = "".join(traceback.format_exception(error)) if what.show_stack else ""
        self._report(what, stack=stack, heard=heard)
        return what.exit_code

    def _end_overdue(self, overdue: Overdue) -> None:
        """From the watchdog's thread, while the main thread is stuck: say why, and end the process."""
        heard = self._last_heard()
        sentence = overdue.reason + describe_heard(heard)
        self._report(Meaning(overdue.exit_code, sentence, show_stack=True), stack=_all_stacks(), heard=heard)
        os._exit(overdue.exit_code)

    def _report(self, what: Meaning, *, stack: str, heard: Mapping[str, str]) -> None:
        with self._ending:
            # Reporting goes through a store that may be what failed: it must not keep a dead worker alive.
            limit = threading.Timer(self._config.fault.shutdown_grace_s, os._exit, args=(what.exit_code,))
            limit.daemon = True
            limit.start()
            if self._identity.local_rank == 0 or what.exit_code == EXIT_TRANSPORT:
                sys.stderr.write(f"elastictrain: rank {self._identity.rank} on {self._identity.host}: {what.sentence}\n{stack}")
                sys.stderr.flush()
            if self._journal is None:
                return
            mark = self._whereabouts.mark
            try:
                self._journal.record(
                    Failure(
                        exit_code=what.exit_code,
                        error=what.sentence,
                        phase=str(mark.phase),
                        step=mark.step,
                        last_heard=heard,
                        flight_recorder=self._store_flight_recorder(),
                    )
                )
                self._journal.close()
            except (ElasticTrainError, OSError, RuntimeError) as error:
                logger.warning("the failure could not be recorded: %s", error)

    def _store_flight_recorder(self) -> str | None:
        trace = flight_recorder()
        if trace is None or self._store is None:
            return None
        key = f"flight/{self._incarnation}-r{self._identity.rank:05d}.json"
        self._store.write(key, trace.encode())
        return key

    def _last_heard(self) -> dict[str, str]:
        return self._board.last_heard() if self._board is not None else {}


def _all_stacks() -> str:
    """The Python stacks of all threads."""
    # faulthandler writes to a descriptor only, so a file has to stand in between.
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
