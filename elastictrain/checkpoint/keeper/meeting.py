"""How the keepers of several hosts agree on one save: through small objects in the run's store, without the training group.

the leader      (the keeper of the host of rank 0) chooses the folder, names the attempt and writes `begin`
every keeper    writes its ranks' files into that folder, and then `host-RANK-ATTEMPT` with what a manifest must say of them
the leader      commits when every rank is covered, and removes these objects; also when the attempt has failed
a keeper that cannot write its files writes `failed-RANK-ATTEMPT` if it can, so that the leader need not wait for it

A leader that is killed and started again goes on with the attempt that it finds begun: others may have written, and do not
write twice. What is said late of an attempt that has failed bears its name, and is not heard in the next one.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastictrain.bounded_json import DOCUMENT, parse_json
from elastictrain.checkpoint.folders import ROOT
from elastictrain.checkpoint.memory.layout import (
    RankDigests,
    RankLayout,
    digests_from_json,
    digests_to_json,
    layout_from_bytes,
    written_items,
)
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.writer import WrittenItem
from elastictrain.errors import CheckpointError, InvalidCheckpointError

PENDING = f"{ROOT}/pending"

_SAID = re.compile(r"(host|failed)-(\d+)-(\w+)\.json")


def pending_folder(incarnation: str, step: int) -> str:
    """Where one save is agreed on."""
    return f"{PENDING}/{incarnation}-{step:09d}"


def begin_key(incarnation: str, step: int) -> str:
    """Says which folder the files go to."""
    return f"{pending_folder(incarnation, step)}/begin.json"


def host_key(incarnation: str, step: int, attempt: str, *, first_rank: int) -> str:
    """Says what one host has written."""
    return f"{pending_folder(incarnation, step)}/host-{first_rank:05d}-{attempt}.json"


def failed_key(incarnation: str, step: int, attempt: str, *, first_rank: int) -> str:
    """Says that one host could not write."""
    return f"{pending_folder(incarnation, step)}/failed-{first_rank:05d}-{attempt}.json"


def said_by(key: str, *, attempt: str) -> tuple[str, int] | None:
    """`host` or `failed`, and the host's first rank; None for what is said of something else."""
    match = _SAID.fullmatch(key.rpartition("/")[2])
    return (match[1], int(match[2])) if match is not None and match[3] == attempt else None


@dataclass(frozen=True, slots=True)
class Begun:
    """What the leader has chosen."""

    folder: str
    attempt: str

    def to_bytes(self) -> bytes:
        """The content of `begin`."""
        return json.dumps({"folder": self.folder, "attempt": self.attempt}).encode()


def begun_from_bytes(data: bytes, *, where: str) -> Begun:
    """The inverse of `to_bytes`. Raises: InvalidCheckpointError naming `where`."""
    try:
        document = parse_json(data, limits=DOCUMENT)
        return Begun(str(document["folder"]), str(document["attempt"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidCheckpointError(f"{where}: is garbled ({type(error).__name__}: {error})") from error


def steps_begun(keys: Iterable[str], *, incarnation: str) -> list[int]:
    """The steps of an incarnation for which `begin` is there, oldest first."""
    steps = []
    for key in keys:
        folder, _, name = key.removeprefix(f"{PENDING}/").partition("/")
        number = folder.removeprefix(f"{incarnation}-")
        if name == "begin.json" and folder != number and number.isdecimal():
            steps.append(int(number))
    return sorted(steps)


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank's files are: its layout, and the digests of what was written."""

    rank: int
    layout: RankLayout
    digests: RankDigests

    def written(self, incarnation: str) -> tuple[WrittenItem, ...]:
        """As a manifest says it."""
        return written_items(self.layout, self.digests, incarnation=incarnation, rank=self.rank)


def encode_parts(parts: Sequence[RankPart], *, key: str = "", signing: SigningKey | None = None) -> bytes:
    """The content of `host-RANK`. Equal layouts are written once. Signed for its `key` in the store if there is a secret."""
    layouts: dict[str, str] = {part.layout.digest: part.layout.to_bytes().decode() for part in parts}
    ranks = [[part.rank, part.layout.digest, digests_to_json(part.digests)] for part in parts]
    text = json.dumps({"layouts": layouts, "ranks": ranks}, separators=(",", ":")).encode()
    return text if signing is None else signing.sign(text, purpose=f"elastictrain {key}").encode() + b"\n" + text


def decode_parts(data: bytes, *, where: str, key: str = "", signing: SigningKey | None = None) -> list[RankPart]:
    """The inverse. Raises: InvalidCheckpointError naming `where`."""
    if signing is not None:
        signature, _, data = data.partition(b"\n")
        if not signing.is_signed(data, signature.decode("latin-1"), purpose=f"elastictrain {key}"):
            raise InvalidCheckpointError(f"{where}: must be signed with the key in {signing.name}, but is not")
    try:
        document = parse_json(data, limits=DOCUMENT)
        layouts = {name: layout_from_bytes(text.encode(), where=where) for name, text in document["layouts"].items()}
        return [RankPart(int(rank), layouts[name], digests_from_json(digests)) for rank, name, digests in document["ranks"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidCheckpointError(f"{where}: is garbled ({type(error).__name__}: {error})") from error


def missing_ranks(parts: Iterable[RankPart], *, world_size: int) -> tuple[int, ...]:
    """Who is not covered yet."""
    covered = {part.rank for part in parts}
    return tuple(rank for rank in range(world_size) if rank not in covered)


def late_error(ranks: Sequence[int], *, waited_s: float) -> CheckpointError:
    """The leader waited in vain."""
    named = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return CheckpointError(f"the hosts of ranks {named} did not say within {waited_s:.0f} s that their files are written")
