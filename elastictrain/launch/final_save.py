"""The last committed step, and the final save: at its end the launcher has the saver write what only host memory has."""

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastictrain.bounded_json import JsonLines, MalformedJsonError
from elastictrain.checkpoint.folders import ROOT, read_listing
from elastictrain.checkpoint.lineage import Lineage
from elastictrain.checkpoint.memory.folder import is_private, look, run_folder, run_name
from elastictrain.checkpoint.saver.messages import Flushed, FlushRequest, ToWorker, WorkerRefused, encode
from elastictrain.checkpoint.saver.process import connect_saver, peer_pid
from elastictrain.config.composed import RunConfig
from elastictrain.distributed.bounded import within
from elastictrain.errors import EXIT_CONFIG, EXIT_OK, EXIT_STOPPED, EXIT_STORAGE, EXIT_UNFIT, EXIT_USAGE
from elastictrain.fault.exits import WaitNotice, describe_process
from elastictrain.fault.stop import StopRequest
from elastictrain.launch.membership.records import Wait
from elastictrain.storage.store import Store

_LISTING_S = 5.0
_CONNECT_S = 2.0
_TURN_S = 0.1
_WORTH_SAYING_S = 1.5  # shorter waits are not printed
_EXIT_MESSAGE_S = 1.0
_EXIT_MESSAGE_SHARE = 0.25  # share of the time before a deadline that is kept to print what is saved


def committed_step(store: Store) -> int | None:
    """Return the step in storage from which a start resumes; 0 if there is none, None if storage does not answer in 5 s."""

    def newest() -> int:
        listed = read_listing(store.list(ROOT)).folders
        committed = tuple(folder for folder in listed if folder.has_manifest and not folder.quarantined)
        if len(committed) > 1:
            # An abandoned generation may have committed a later step since; no start resumes from it.
            committed, _ = Lineage(store).lineage_first(committed)
        return committed[0].step if committed else 0

    return within(_LISTING_S, newest)


def remembered_step(config: RunConfig) -> int:
    """Return the newest step that all workers of this host have in host memory; 0 if there is none."""
    run = run_name(config.run.dir)
    newest: dict[int, int] = {}
    folder = run_folder(config.checkpoint.memory_dir, config.run.dir)
    for held in look(folder, host=0) if is_private(folder) else ():
        if not held.replica and held.facts.run == run:
            newest[held.facts.rank] = max(held.facts.step, newest.get(held.facts.rank, 0))
    return min(newest.values(), default=0)


@dataclass(frozen=True, slots=True)
class FinalSave:
    committed_step: int | None  # of `committed_step()`
    unsaved_step: int = 0  # a newer step that only host memory has; 0 if there is none
    saver: int = 0  # pid of the saver that still writes it; 0 if none does


class SaverConnection:
    """Asks the saver to write to storage what only host memory has."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines: JsonLines[ToWorker] = JsonLines(ToWorker)  # type: ignore[arg-type]
        self._writes = True
        self.pid = peer_pid(connection)
        connection.setblocking(False)
        with suppress(OSError):
            connection.send(encode(FlushRequest()))

    def writes(self) -> bool:
        """Whether the saver may still write something to storage."""
        try:
            while self._writes:
                data = self._connection.recv(65536)
                answers = list(self._lines.feed(data))
                self._writes = bool(data) and not any(isinstance(one, Flushed | WorkerRefused) for one in answers)
        except BlockingIOError:
            pass
        except (OSError, MalformedJsonError):
            self._writes = False
        return self._writes

    def close(self) -> None:
        """Close without waiting; the saver completes what it has begun."""
        self._connection.close()


def ask_to_flush(config: RunConfig) -> SaverConnection | None:
    """Ask the saver of this host for a final save; None if no saver runs."""
    folder = run_folder(config.checkpoint.memory_dir, config.run.dir)
    connection = within(_CONNECT_S, lambda: connect_saver(folder))
    return None if connection is None else SaverConnection(connection)


def final_save_until_s(request: StopRequest | None, *, now_s: float, notice_s: float) -> float:
    """How long to wait for a final save. `notice_s`: for how long if nobody has asked this host to leave."""
    if request is None:
        return now_s + notice_s
    if request.deadline_s is None:
        # This host is not being taken away, and the saver continues.
        return now_s
    return request.deadline_s - min(_EXIT_MESSAGE_S, _EXIT_MESSAGE_SHARE * max(0.0, request.deadline_s - now_s))


def await_final_save(
    wanted_step: int,
    *,
    until_s: float,
    committed_step: Callable[[], int | None],
    ask: Callable[[], SaverConnection | None],
    print_line: Callable[[str], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> FinalSave:
    """Wait until storage has the newest step of host memory, the saver has ended or finished, or the clock reads `until_s`."""
    committed = committed_step()
    if wanted_step <= (committed or 0):
        return FinalSave(committed)
    saver = ask()
    if saver is None:
        return FinalSave(committed, wanted_step)
    notice = WaitNotice(print_line, clock=clock)
    what = f"to write step {wanted_step} from host memory to storage"
    try:
        # The saver is polled before storage, so that storage shows all that it wrote before it finished.
        while writes := saver.writes():
            committed = committed_step()
            if wanted_step <= (committed or 0) or clock() >= until_s:
                break
            notice.tell(lambda: f"the saver ({describe_process(saver.pid)}) {what}", until_s=until_s)
            sleep(_TURN_S)
    finally:
        saver.close()
    committed = committed if writes else committed_step()
    if wanted_step <= (committed or 0):
        return FinalSave(committed)
    return FinalSave(committed, wanted_step, saver.pid if writes else 0)


@dataclass(slots=True)
class WaitingMessages:
    """Prints what a launcher waits for, once it takes long."""

    print_line: Callable[[str], None]
    _said: str = ""
    _waits_for: str = ""
    _since_s: float = 0.0

    def show(self, wait: Wait, *, now_s: float) -> None:
        if wait.for_what != self._waits_for:
            self._waits_for, self._since_s = wait.for_what, now_s
        if wait.for_what and wait.for_what != self._said and now_s - self._since_s >= _WORTH_SAYING_S:
            self._said = wait.for_what
            limit = "" if wait.until_s is None else f", for {max(0.0, wait.until_s - now_s):.0f} s at most"
            self.print_line(f"waiting for {wait.for_what}{limit}")

    def forget(self) -> None:
        """The same wait is printed again."""
        self._said = ""


def exit_message(code: int, reason: str, *, run_dir: str, final: FinalSave) -> str:
    """One paragraph: what happened, which step is saved, which command comes next."""
    reason = reason.removesuffix(".")
    if final.committed_step is None:
        saved = f"{run_dir} does not answer, so what is saved there is unknown"
    elif final.committed_step:
        saved = f"step {final.committed_step} is saved in {run_dir}"
    else:
        saved = f"{run_dir} holds no step to continue from"
    if final.unsaved_step:
        how = "nobody writes it to storage"
        if final.saver:
            how = f"the saver (process {final.saver}) continues writing it to storage as long as this host or container lives"
        saved += f"; step {final.unsaved_step} is in the memory of this host only, and {how}"
    if code == EXIT_OK:
        return f"done: {reason}; {saved}."
    return f"stopped with exit code {code}: {reason}; {saved}. {_ADVICE.get(code, _OTHER_ADVICE)}"


_NO_USE = "Trying again cannot help: change what the message names, then give the same command."
_ADVICE = {
    EXIT_STOPPED: "The same command continues from there.",
    EXIT_CONFIG: _NO_USE,
    EXIT_USAGE: _NO_USE,
    EXIT_UNFIT: "Mend or replace this host; the same command on another one continues from there.",
    EXIT_STORAGE: "Mend what the messages name, and give the same command again.",
}
_OTHER_ADVICE = "The events of the run and the output above tell more; the same command tries again from there."
