"""What workers and their saver tell each other: one JSON object per line over a Unix socket."""

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, fields
from typing import TypeAlias

from elastictrain.bounded_json import parse_json
from elastictrain.checkpoint.lineage import number_of
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.checkpoint.memory.records import read_file, write_file
from elastictrain.errors import InvalidCheckpointError

Message: TypeAlias = dict[str, JsonValue]

LONGEST_BYTES = 1 << 20
_MOST = 1 << 63
SOCKET_NAME = "keeper.sock"
LOCK_NAME = "keeper.lock"
FACTS_NAME = "run.json"
LOG_NAME = "keeper.log"


class MalformedError(ValueError):
    """The other side does not speak our language."""


def encode(message: Message) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class MessageLines:
    """Puts messages together from what a socket gives."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are whole now. Raises: MalformedError."""
        self._waiting += data
        while (end := self._waiting.find(b"\n")) >= 0:
            line = bytes(self._waiting[:end])
            del self._waiting[: end + 1]
            yield _message(line)
        if len(self._waiting) > LONGEST_BYTES:
            raise MalformedError(f"a message has more than {LONGEST_BYTES} bytes")


def _message(line: bytes) -> Message:
    try:
        message = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"a message is no JSON: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise MalformedError("a message must be an object with the text `op`")
    return message


def count(message: Message, name: str) -> int:
    """A field that must be a whole number >= 0, and below 2^63. Raises: MalformedError."""
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
        raise MalformedError(f"`{name}` of {message.get('op')!r} must be a count, but is {value!r}")
    return value


def text(message: Message, name: str) -> str:
    """A field that must be a text. Raises: MalformedError."""
    value = message.get(name)
    if not isinstance(value, str):
        raise MalformedError(f"`{name}` of {message.get('op')!r} must be a text, but is {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The same for all incarnations that use one configuration."""

    run_dir: str
    run: str
    """Name of the run in host memory."""

    keep_last: int
    keep_every: int
    save_timeout_s: float
    flush_s: float
    grace_s: float
    versions: dict[str, str]

    key_env: str = ""
    """The environment variable with the key that signs checkpoints; empty for none."""


def store_facts(folder: str, facts: RunFacts) -> None:
    """Raises: OSError."""
    write_file(f"{folder}/{FACTS_NAME}", json.dumps(asdict(facts)).encode())


def load_facts(folder: str) -> RunFacts:
    """Raises: InvalidCheckpointError naming the file."""
    path = f"{folder}/{FACTS_NAME}"
    try:
        document = parse_json(read_file(path, most_bytes=1 << 20))
        if document.keys() != {field.name for field in fields(RunFacts)}:
            raise TypeError(f"its fields are {sorted(document)}")
        return RunFacts(**document)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidCheckpointError(f"{path} does not say what to keep ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, slots=True)
class HostRanks:
    """The ranks of this host in one incarnation."""

    incarnation: str
    world_size: int
    ranks: tuple[int, ...]
    heard: bool = True
    """Whether one of its workers has spoken to this saver; else only what lies in memory tells of it."""

    @property
    def leader(self) -> bool:
        """Whether this host commits checkpoints."""
        return 0 in self.ranks


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """One worker, and the group that it belongs to."""

    rank: int
    host_ranks: HostRanks
    agent: int
    """The process that would start the worker again."""

    address: str
    """Where other hosts reach this one; empty where there are none."""

    port: int
    """To be taken over from a saver that is gone; 0 for any."""


def is_past(incarnation: str, *, present: str, left: Collection[str], connected: bool) -> bool:
    """Whether a worker of `incarnation` comes too late, where `present` is the one at work.

    Two lives have the same number if the first ended before a trace of it was stored. Then the one that came later is the
    younger, unless it was `left` before, or workers of the present one are still `connected`.
    """
    its, ours = number_of(incarnation), number_of(present)
    return incarnation != present and (incarnation in left or its < ours or (its == ours and connected))


def read_hello(message: Message) -> WorkerHello:
    """Raises: MalformedError."""
    ranks = message.get("ranks")
    if not isinstance(ranks, list) or not all(isinstance(rank, int) and rank >= 0 for rank in ranks) or not ranks:
        raise MalformedError(f"`ranks` must be a list of ranks, but is {ranks!r}")
    host_ranks = HostRanks(
        text(message, "incarnation"),
        count(message, "world_size"),
        tuple(sorted(rank for rank in ranks if isinstance(rank, int))),
    )
    rank = count(message, "rank")
    if rank not in host_ranks.ranks or max(host_ranks.ranks) >= host_ranks.world_size:
        raise MalformedError(f"rank {rank} of {host_ranks.world_size} is not among {host_ranks.ranks}")
    return WorkerHello(rank, host_ranks, count(message, "agent"), text(message, "address"), count(message, "port"))
