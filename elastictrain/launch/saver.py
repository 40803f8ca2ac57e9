"""The launcher's connection to the saver of this host, for the end of a run."""

import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from elastictrain.checkpoint.keeper.messages import Lines, MalformedError, encode
from elastictrain.checkpoint.keeper.process import knock
from elastictrain.checkpoint.memory.place import run_folder
from elastictrain.config.composed import RunConfig
from elastictrain.distributed.bounded import within
from elastictrain.fault.wait_notice import WaitNotice, describe_process

_PEER = struct.Struct("3i")
_CONNECT_S = 2.0
_TURN_S = 0.1


class SaverProcess(Protocol):
    """A saver that was asked to write what only host memory has."""

    pid: int

    def writes(self) -> bool:
        """Whether it may still bring something to storage."""

    def close(self) -> None:
        """Nobody waits for it any more; it goes on with what it has begun."""


@dataclass(frozen=True, slots=True)
class FinalSave:
    """What a launcher knows at its end."""

    committed_step: int | None
    """The newest step in storage that a start would go on from; 0 if there is none, None if storage does not answer."""

    unsaved_step: int = 0
    """A newer one that only host memory has; 0 if there is none."""

    saver: int = 0
    """The process that still writes it; 0 if none does."""


class SaverConnection:
    """Asks the saver to write what only host memory has."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = Lines()
        self._writes = True
        self.pid = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]
        connection.setblocking(False)
        with suppress(OSError):
            connection.send(encode({"op": "flush"}))

    def writes(self) -> bool:
        """Whether it may still bring something to storage."""
        try:
            while self._writes:
                data = self._connection.recv(65536)
                told = [message["op"] for message in self._lines.feed(data)]
                self._writes = bool(data) and not {"flushed", "refused"}.intersection(map(str, told))
        except BlockingIOError:
            pass
        except (OSError, MalformedError):
            self._writes = False
        return self._writes

    def close(self) -> None:
        """Nobody waits for it any more; it goes on with what it has begun."""
        self._connection.close()


def ask_to_flush(config: RunConfig) -> SaverConnection | None:
    """Tell the saver of this host that nobody starts workers again; None if there is no saver."""
    folder = run_folder(config.checkpoint.memory_dir, config.run.dir)
    connection = within(_CONNECT_S, lambda: knock(folder))
    return None if connection is None else SaverConnection(connection)


def await_final_save(
    wanted_step: int,
    *,
    until_s: float,
    committed_step: Callable[[], int | None],
    ask: Callable[[], SaverProcess | None],
    say: Callable[[str], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> FinalSave:
    """Until storage has a step that host memory has, until nobody writes it any more, or until `until_s` of the clock."""
    committed = committed_step()
    if wanted_step <= (committed or 0):
        return FinalSave(committed)
    saver = ask()
    if saver is None:
        return FinalSave(committed, wanted_step)
    notice = WaitNotice(say, clock=clock)
    try:
        # Asked before storage: what the saver has written by then is seen.
        while writes := saver.writes():
            committed = committed_step()
            if wanted_step <= (committed or 0) or clock() >= until_s:
                break
            notice.tell(partial(_describe, saver, wanted_step), until_s=until_s)
            sleep(_TURN_S)
    finally:
        saver.close()
    committed = committed if writes else committed_step()
    if wanted_step <= (committed or 0):
        return FinalSave(committed)
    return FinalSave(committed, wanted_step, saver.pid if writes else 0)


def _describe(saver: SaverProcess, step: int) -> str:
    return f"the saver ({describe_process(saver.pid)}) to write step {step} from host memory to storage"
