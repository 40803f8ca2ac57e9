"""The marks of each rank of a host in a small file in memory, which others can read whatever the rank holds or hangs in."""

import mmap
import os
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass

from elastictrain.liveness.progress import Phase, ProgressMark

_MAGIC = b"ETMARKS2"
_PHASES = tuple(Phase)
# Magic, pid, rank, how long it may be stopped (seconds), how long its end may take (seconds).
_FIXED = struct.Struct("<8siidd")
# Sequence number, phase, first step done, compiling, step, micro-batch, finished step, since, bound, limit; a checksum follows.
_MARK = struct.Struct("<QBBBqiqddd")
_SUM = struct.Struct("<I")
_MARK_AT = 64
_PULSE = struct.Struct("<Q")
_PULSE_AT = 192
_ENDING_AT = 200
_CLOSED_AT = 201
_SIZE = 4096
_TRIES = 100


@dataclass(frozen=True, slots=True)
class RankProgress:
    """The file of one rank. Two reads differ in `sequence` or `pulse` if the rank has made progress in between."""

    pid: int
    rank: int
    stopped_s: float  # how long a signal may stop the process
    grace_s: float  # how long the process may take to end itself
    mark: ProgressMark
    bound_s: float  # how long the phase may last by this rank's own steps
    limit_s: float  # how long the phase may last at most
    sequence: int
    pulse: int
    ending: bool  # whether it has begun to end, and reports why
    closed: bool = False  # whether it has left this generation: nothing waits for it any more


def progress_path(folder: str, rank: int) -> str:
    return f"{folder}/r{rank:05d}.marks"


class ProgressFile:
    """The writing side. One thread writes marks, another one the pulse; none of it ever waits or raises."""

    def __init__(self, folder: str, *, rank: int, stopped_s: float, grace_s: float) -> None:
        """Raises: OSError, also if the memory is full."""
        self.path = progress_path(folder, rank)
        self._sequence = 0
        self._pulse = 0
        # Created under another name, so that a reader finds a complete file.
        temporary = f"{self.path}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Allocated now: missing memory would end the process with SIGBUS at its first mark.
            os.posix_fallocate(descriptor, 0, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE)
            self.write(ProgressMark(Phase.START, 0, 0, 0.0, False), bound_s=float("inf"), limit_s=float("inf"))
            self._map[: _FIXED.size] = _FIXED.pack(_MAGIC, os.getpid(), rank, stopped_s, grace_s)
            os.rename(temporary, self.path)  # noqa: PTH104
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise
        finally:
            os.close(descriptor)

    def write(self, mark: ProgressMark, *, bound_s: float, limit_s: float) -> None:
        self._sequence += 1
        place = (_PHASES.index(mark.phase), mark.first_step_done, mark.compiling, mark.step, mark.micro_batch)
        body = _MARK.pack(self._sequence, *place, mark.finished_step, mark.since_s, bound_s, limit_s)
        with suppress(ValueError):  # closed
            self._map[_MARK_AT : _MARK_AT + _MARK.size + _SUM.size] = body + _SUM.pack(zlib.crc32(body))

    def beat(self) -> None:
        """Show that the process runs, and that any of its threads may."""
        self._pulse += 1
        with suppress(ValueError):
            self._map[_PULSE_AT : _PULSE_AT + _PULSE.size] = _PULSE.pack(self._pulse)

    def announce_ending(self) -> None:
        with suppress(ValueError):
            self._map[_ENDING_AT] = 1

    def close(self) -> None:
        with suppress(ValueError):
            self._map[_CLOSED_AT] = 1
        with suppress(OSError):
            os.unlink(self.path)  # noqa: PTH108
        self._map.close()


class ProgressFileReader:
    """The reading side; a deleted file can still be read."""

    def __init__(self, folder: str, rank: int) -> None:
        """Raises: OSError; ValueError if the file holds something else."""
        descriptor = os.open(progress_path(folder, rank), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._map = mmap.mmap(descriptor, _SIZE, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        magic, self.pid, self.rank, self._stopped_s, self._grace_s = _FIXED.unpack_from(self._map)
        if magic != _MAGIC:
            raise ValueError(f"{progress_path(folder, rank)} holds no marks")
        self._last: RankProgress | None = None

    def read(self) -> RankProgress | None:
        """The current content; the previous one if the writer was stopped in the middle of a write."""
        for _ in range(_TRIES):
            found = bytes(self._map[_MARK_AT : _MARK_AT + _MARK.size + _SUM.size])
            if zlib.crc32(found[: _MARK.size]) != _SUM.unpack_from(found, _MARK.size)[0]:
                continue
            sequence, phase, first, compiling, step, micro_batch, finished, since_s, bound_s, limit_s = _MARK.unpack_from(found)
            where = (_PHASES[phase], step, micro_batch, since_s, bool(first))
            mark = ProgressMark(*where, compiling=bool(compiling), finished_step=finished)
            (pulse,) = _PULSE.unpack_from(self._map, _PULSE_AT)
            allowed_s = (self._stopped_s, self._grace_s)
            ending, closed = self._map[_ENDING_AT] != 0, self._map[_CLOSED_AT] != 0
            self._last = RankProgress(self.pid, self.rank, *allowed_s, mark, bound_s, limit_s, sequence, pulse, ending, closed)
            break
        return self._last

    def close(self) -> None:
        self._map.close()
