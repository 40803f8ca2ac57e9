"""`python -m elastictrain.launch recipe=...`: one launcher per host. It finds the other hosts and trains with those that exist.
After `--` comes a program with a loop of its own, in the place of a recipe.

Exit codes: 0 done; 75 stopped on request, the same command resumes; 69 this host is unfit; 78 configuration error;
70 the run fails repeatedly; 74 storage.
"""

import os
import signal
import sys

from elastictrain.events import share_event_clock
from elastictrain.launch.fork_server_link import ForkServerLink, start_ahead

AHEAD = None
if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C while the rest is imported, a third of a second, has nothing to stop and needs no traceback: 75, as below.
        signal.signal(signal.SIGINT, lambda *_: os._exit(75))
    share_event_clock()
    AHEAD = start_ahead(sys.argv[1:])

import logging
import re
import secrets
import shutil
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

from elastictrain import errors
from elastictrain.config.composed import RunConfig
from elastictrain.config.help import requested_help
from elastictrain.config.load import load
from elastictrain.distributed.bounded import call_until
from elastictrain.entry_point import split_program
from elastictrain.fault.stop import StopListener
from elastictrain.launch.cluster.detect import detect
from elastictrain.launch.cluster.place import ClusterPlace
from elastictrain.launch.final_save import ask_to_flush, committed_step, remembered_step
from elastictrain.launch.heartbeat import HeartbeatMesh
from elastictrain.launch.host_log import HostLog
from elastictrain.launch.host_registry import HostRegistry
from elastictrain.launch.locks import HostLock, acquire_task_lock, lock_run, wait_for_launcher
from elastictrain.launch.membership.records import HostRecord, HostState
from elastictrain.launch.membership.store import MembershipStore
from elastictrain.launch.own_host import (
    OwnAddress,
    count_gpus,
    default_interface,
    own_names,
    watch_notices,
    why_unfit,
)
from elastictrain.launch.records import LauncherStarted, Recorder
from elastictrain.launch.run_summary import print_summary
from elastictrain.launch.supervisor import Supervisor
from elastictrain.launch.worker_group import WorkerGroup
from elastictrain.lease.chain import LAUNCHER, Chain
from elastictrain.lease.holder import Waiting, wait_until_free
from elastictrain.net.interfaces import own_address, usable_interfaces
from elastictrain.net.listening import bind_everywhere
from elastictrain.own_loop.options import launcher_config
from elastictrain.storage.appendlog import open_append_log
from elastictrain.storage.failures import reason_of
from elastictrain.storage.opening import open_store, without_sync
from elastictrain.storage.store import Store
from elastictrain.storage.writers import process_name
from elastictrain.surroundings import Surroundings

_PURPOSE = "Train on this host, with whatever other hosts there are; start again after anything that can be overcome."

_CLOSE_S = 5.0

_NOT_IN_A_KEY = re.compile(r"[^A-Za-z0-9.-]")


def main(arguments: Sequence[str] | None = None, *, ahead: ForkServerLink | None = None) -> int:
    """`ahead`: a fork server for these arguments, which is ended here."""
    # If a parent ignores SIGCHLD, this process inherits that, and the exit codes of its children are lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    logging.basicConfig(level=logging.WARNING, format="elastictrain: %(message)s", stream=sys.stderr)
    arguments = sys.argv[1:] if arguments is None else arguments
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _exit_code(partial(_start, tuple(arguments), ahead))
    finally:
        if ahead is not None:
            ahead.close(_CLOSE_S)


def _exit_code(act: Callable[[], int]) -> int:
    """That of `act`, or of its error, which is printed."""
    try:
        return act()
    except errors.ElasticTrainError as error:
        print_line(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        # Until a listener is installed there is nothing to stop.
        return errors.EXIT_STOPPED
    except Exception:  # noqa: BLE001  # the edge of the process: the file of what it prints has this, too
        traceback.print_exc()
        return errors.EXIT_BUG


def _start(arguments: tuple[str, ...], ahead: ForkServerLink | None) -> int:
    overrides, program = split_program(arguments)
    text = requested_help(overrides, program="python -m elastictrain.launch", purpose=_PURPOSE)
    if text is not None:
        sys.stdout.write(f"{text}\n")
        return errors.EXIT_OK
    if program and program[0] != "-m" and not Path(program[0]).is_file():
        raise errors.UsageError(f"`--` must be followed by a Python file, or -m and a module, but {program[0]} is no file")
    config = launcher_config(overrides) if program else load(overrides, with_task=False)
    surroundings = Surroundings()
    place = _find_place(config, surroundings)
    if ahead is not None and (place.role == "idle" or config.launch.log_dir):
        # What it prints would not be in the file of the host.
        ahead.close(_CLOSE_S)
    if place.role == "idle":
        _print_findings(place)
        return wait_for_launcher(place.job)
    log = HostLog.begin(config.launch.log_dir, host=socket.gethostname()) if config.launch.log_dir else None
    workers = WorkerGroup(arguments, server=ahead)
    code = _exit_code(partial(_launch, config, workers, place, surroundings))
    if log is not None:
        log.close(code)
    return code


def print_line(text: str) -> None:
    sys.stderr.write(f"elastictrain: {text}\n")
    sys.stderr.flush()


def _find_place(config: RunConfig, surroundings: Surroundings) -> ClusterPlace:
    interfaces = usable_interfaces(surroundings)
    return detect(
        os.environ,
        hosts=config.launch.hosts,
        names=(*own_names(), *(address for interface in interfaces for address in interface.addresses)),
        interfaces={interface.name: interface.addresses for interface in interfaces},
        default_interface=default_interface(surroundings),
    )


def _print_findings(place: ClusterPlace) -> None:
    for sentence in place.conclusions:
        print_line(sentence)
    for sentence in place.warnings:
        print_line(f"warning: {sentence}")


def _launch(config: RunConfig, workers: WorkerGroup, place: ClusterPlace, surroundings: Surroundings) -> int:
    """Raises: UsageError, HostUnfitError; as `HostAgent.put_together`."""
    _print_findings(place)
    if place.kind == "slurm":
        acquire_task_lock(place.job, print_line=print_line)
    with ExitStack() as ending:
        lock = lock_run(config.run.dir)
        ending.callback(lock.close)
        listener = StopListener(notice_s=config.fault.notice_s)
        listener.start()
        try:
            folder = lock.make_folder()
        except OSError as error:
            raise errors.HostUnfitError(f"no folder can be made in {tempfile.gettempdir()}: {reason_of(error)}") from error
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
        ending.callback(workers.close)
        workers.prepare()
        agent = HostAgent(config, place, surroundings, lock, listener, folder, workers)
        if unfit := why_unfit(config, surroundings, processes=_processes(config, place)):
            print_line(f"this host is unfit: {unfit}")
            return errors.EXIT_UNFIT
        while True:
            supervisor = agent.put_together()
            recorder = supervisor.recorder
            with (
                closing(recorder),
                closing(watch_notices(config, place, listener=listener, recorder=recorder, print_line=print_line)),
                # If another run took the folder first, this launcher waits for that run and begins anew.
                suppress(errors.RunHeldError),
            ):
                code = supervisor.run()
                break
        print_summary(open_store(config.run.dir), listener.request, print_line=print_line)
        return code


@dataclass(frozen=True, slots=True)
class HostAgent:
    config: RunConfig
    place: ClusterPlace
    surroundings: Surroundings
    lock: HostLock
    listener: StopListener
    folder: Path
    workers: WorkerGroup

    def put_together(self) -> Supervisor:
        """Raises: RunHeldError, StorageError if the run folder cannot be used; StopRequestedError."""
        config, place = self.config, self.place
        store = open_store(config.run.dir)
        token, free_after = self._first_answers(store)
        name, options = socket.gethostname(), config.launch
        host = f"{_NOT_IN_A_KEY.sub('-', name)}-{secrets.token_hex(4)}"
        heartbeat = HeartbeatMesh(host, token=token, lost_s=options.lost_s)
        find_address = partial(own_address, place.peers, surroundings=self.surroundings)

        def own_addresses() -> set[str]:
            return {address for one in usable_interfaces(self.surroundings) for address in one.addresses}

        record = HostRecord(
            host=host,
            name=name,
            address=options.address or place.address or find_address(),
            watch_port=heartbeat.port,
            master_port=bind_everywhere(0),
            processes=_processes(config, place),
            order=place.order,
            state=HostState.READY,
            reason="",
            beat=0,
            ended=0,
            writers=tuple(filter(None, [process_name()])),
        )
        membership = MembershipStore(store, volatile=without_sync(store))
        if self.lock.before:
            # The previous launcher was killed before it could mark its own record.
            membership.mark_dead(self.lock.before)
        self.lock.sign(host)
        # Once its record is visible the others count on this host: all that can fail comes before.
        log = open_append_log(store, f"events/launcher-{host}.jsonl", flush_s=config.telemetry.flush_s)
        look = None if options.address else OwnAddress(record.address, own=own_addresses, find=find_address).look
        registry = HostRegistry(
            membership, record, poll_s=options.poll_s, lost_s=options.lost_s, find_address=look, on_generation=self.workers.wake
        )
        heartbeat.start()
        registry.start()
        recorder = Recorder(log)
        recorder.record(0, LauncherStarted(launcher=host, host=name, processes=record.processes))
        return Supervisor(
            config=config,
            registry=registry,
            heartbeat=heartbeat,
            workers=self.workers,
            recorder=recorder,
            folder=self.folder,
            expected_hosts=place.num_hosts,
            free_after=free_after,
            stop_request=lambda: self.listener.request,
            check_host=partial(why_unfit, config, self.surroundings, processes=record.processes),
            committed_step=partial(committed_step, store),
            remembered_step=partial(remembered_step, config),
            ask_to_flush=partial(ask_to_flush, config),
            print_line=print_line,
            uses_gpus=_count_gpus(config) > 0,
            sleep=self.workers.wait,
        )

    def _first_answers(self, store: Store) -> tuple[bytes, int]:
        """Return the run's token, and the newest generation once no torchrun trains in its folder.
        Storage is retried for up to a minute; a stop request ends the wait at once."""
        run = self.config.run

        def poll(waits_for: str) -> None:
            if (request := self.listener.request) is not None:
                raise errors.StopRequestedError(f"asked to stop ({request.reason}) {waits_for}")

        def ask() -> tuple[bytes, int]:
            token, chain = MembershipStore(store).token(), Chain(store)
            waiting = Waiting(run.on_held, run.dir, print_line, partial(poll, "while another run trains"))
            newest = wait_until_free(chain, LAUNCHER, waiting)
            chain.remove_signs(newest)
            return token, chain.ensure_last_number(newest)

        try:
            return call_until(ask, left_s=lambda: inf, poll=partial(poll, "before storage has answered"))
        except errors.StorageError as error:
            raise type(error)(f"`run.dir` cannot be used: {error}. Set run.dir to another place, or mend this one.") from error


def _processes(config: RunConfig, place: ClusterPlace) -> int:
    return config.launch.processes or place.processes or _count_gpus(config) or 1


def _count_gpus(config: RunConfig) -> int:
    return 0 if config.parallel.avoids_gpu else count_gpus(os.environ)


if __name__ == "__main__":
    sys.exit(main(ahead=AHEAD))
