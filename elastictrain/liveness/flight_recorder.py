"""Torch's flight recorder, compared over ranks: at which collective they part, how, and whose call differs.

A dump is read as JSON from the recorder of this very process, so nothing is unpickled. Source of what is compared:
`torch.distributed.flight_recorder`, which takes the first rank for the one that is right; here the majority is.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal
from zlib import crc32

import msgspec

from elastictrain.events import CollectiveFaultFound

Kind = Literal["op", "size", "dtype", "order", "extra", "skipped", "missing", "not_started"]
Text = Annotated[str, msgspec.Meta(max_length=200)]

_TEXT_LENGTH = 80
_BEFORE, _KEPT = 4, 24  # calls of a group that are published: those before the oldest that is not done, and in all
_MOST_GROUPS = 16
COMPARED_WORLD = 64  # ranks: each reads the calls of all, so what the store sends grows with the square
_NAMED_AT_MOST = 8
# Where a rank may give its own size: the inputs, the outputs, or (with `_v` or `all_to_all`) both.
_OWN_INPUT, _OWN_OUTPUT = ("scatter",), ("gather",)


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective that a rank has entered. `sequence` counts those of its process group, equal on all ranks."""

    group: Text
    sequence: int
    op: Text
    inputs: Text = ""
    outputs: Text = ""
    dtypes: Text = ""
    state: Literal["done", "started", "waiting"] = "waiting"

    def __str__(self) -> str:
        sizes = self.inputs if self.inputs == self.outputs else f"{self.inputs} -> {self.outputs}"
        return f"{self.op} of {sizes} {self.dtypes}".rstrip()

    @property
    def signature(self) -> tuple[str, str, str, str]:
        """What all ranks of a group must call alike."""
        uneven = self.op.endswith("_v") or self.op.startswith("all_to_all")
        inputs = "" if uneven or self.op in _OWN_INPUT else self.inputs
        outputs = "" if uneven or self.op in _OWN_OUTPUT else self.outputs
        return self.op, inputs, outputs, "" if self.op in (*_OWN_INPUT, *_OWN_OUTPUT) else self.dtypes


@dataclass(frozen=True, slots=True)
class Entered:
    """The last collectives that a rank has entered; empty if unknown."""

    sequences: Mapping[Text, int] = field(default_factory=dict)  # process group -> number of its last one
    calls: Annotated[tuple[CollectiveCall, ...], msgspec.Meta(max_length=_KEPT * _MOST_GROUPS)] = ()  # see `shortened`
    members: Mapping[Text, tuple[int, ...]] = field(default_factory=dict)  # of groups whose ranks the recorder tells
    last: Text = ""  # the newest of all, for messages

    def shortened(self, world_size: int) -> "Entered":
        """Only what others need: a few calls of each group, from shortly before the oldest that is not done. In a world of more
        than `COMPARED_WORLD` ranks only the last call, as text."""
        if world_size > COMPARED_WORLD:
            return Entered(last=self.last)
        kept: list[CollectiveCall] = []
        for group in list(self.sequences)[-_MOST_GROUPS:]:
            calls = [call for call in self.calls if call.group == group]
            first = next((place for place, call in enumerate(calls) if call.state != "done"), len(calls))
            kept += calls[max(0, min(first - _BEFORE, len(calls) - _BEFORE)) :][:_KEPT]
        return replace(self, calls=tuple(kept))


@dataclass(frozen=True, slots=True)
class CollectiveFault:
    """The first collective of a group that its ranks do not call alike, or not all of them."""

    kind: Kind
    group: str
    sequence: int
    culprits: tuple[int, ...]  # all that take part where none is the minority
    others: tuple[int, ...]
    calls: Mapping[int, CollectiveCall]  # by rank: what it called; without those that did not

    def event(self, name: Callable[[int], str]) -> CollectiveFaultFound:
        """With the calls of the first 32 ranks alone. `name`: of a rank."""
        calls = {name(rank): str(call) for rank, call in sorted(self.calls.items())[: 4 * _NAMED_AT_MOST]}
        return CollectiveFaultFound(
            kind=self.kind,
            group=self.group,
            sequence=self.sequence,
            culprits=tuple(map(name, self.culprits)),
            others=tuple(map(name, self.others)),
            calls=calls,
            text=self.sentence(name),
        )

    def sentence(self, name: Callable[[int], str]) -> str:
        """One sentence for a person. `name`: of a rank."""
        culprits, others = _names(self.culprits, name), _names(self.others, name)
        where = f"collective no. {self.sequence} of group {self.group}"
        own = next((str(self.calls[rank]) for rank in self.culprits if rank in self.calls), None)
        theirs = next((str(self.calls[rank]) for rank in self.others if rank in self.calls), None)
        if self.kind == "not_started":
            return f"{culprits} has not started {theirs}, {where}, on its device; {others} has"
        if not self.others:
            called = (f"{name(rank)} called {self.calls.get(rank, 'nothing')}" for rank in self.culprits[:_NAMED_AT_MOST])
            return f"the ranks do not agree on {where}: {', '.join(called)}"
        if own is None:
            never = "has left out" if self.kind == "skipped" else "has not come to"
            return f"{culprits} {never} {theirs}, {where}, in which {others} waits"
        return f"{culprits} called {own} as {where}, where {others} called {theirs or 'nothing'}: {_MEANING[self.kind]}"


_MEANING = {
    "op": "another operation",
    "size": "another size",
    "dtype": "another dtype",
    "order": "another order",
    "extra": "a call too many",
    "skipped": "a call was left out",
}


def parse_trace(trace: str, *, since_ns: int = 0) -> Entered:
    """Parse the recorder's dump of this process; empty if its form is unknown. Calls before `since_ns` (unix time) are of an
    earlier generation: its groups have the same names, and their numbers begin again."""
    try:
        dump = json.loads(trace)
        entries = [one for one in dump["entries"] if not one["is_p2p"] and one.get("time_created_ns", since_ns) >= since_ns]
        entries.sort(key=lambda one: int(one["record_id"]))
        calls = tuple(_call(one) for one in entries)
        members = {
            _short(name): tuple(map(int, ranks))
            for name, group in dump.get("pg_config", {}).items()
            if name and (ranks := json.loads(group["ranks"]))
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return Entered()
    if not calls:
        return Entered()
    newest = calls[-1]
    sequences = {call.group: call.sequence for call in calls}
    last = _short(f"{newest.op} no. {newest.sequence} of group {newest.group}, sizes {newest.inputs}", length=200)
    return Entered(sequences, calls, {name: ranks for name, ranks in members.items() if name in sequences}, last)


def _call(entry: Mapping[str, object]) -> CollectiveCall:
    group, sequence = entry["process_group"], entry["collective_seq_id"]
    if not (isinstance(group, list) and isinstance(sequence, int)):
        raise TypeError("another form of entries")
    dtypes = sorted({str(one) for key in ("input_dtypes", "output_dtypes") for one in entry.get(key, ())})  # type: ignore[attr-defined]
    done = bool(entry.get("retired")) or entry.get("state") == "completed"
    return CollectiveCall(
        group=_short(group[0]),
        sequence=sequence,
        op=_short(str(entry.get("profiling_name")).rpartition(":")[2]),
        inputs=_short(entry.get("input_sizes")),
        outputs=_short(entry.get("output_sizes")),
        dtypes=_short("/".join(dtypes)),
        state="done" if done else "started" if entry.get("state") == "started" else "waiting",
    )


def find_collective_fault(traces: Mapping[int, Entered]) -> CollectiveFault | None:
    """Compare what ranks have entered. A rank whose trace is empty is not accused of anything."""
    faults = [fault for group, members in _groups(traces) if (fault := _compare(group, members, traces)) is not None]
    absences = [fault for fault in faults if fault.kind == "missing"]
    different = [fault for fault in faults if fault.kind not in ("missing", "not_started")]
    if different:
        return different[0]
    waiting = {rank for fault in absences for rank in fault.others}
    for fault in absences:
        # A missing rank that waits elsewhere is held up by another one.
        if roots := tuple(rank for rank in fault.culprits if rank not in waiting):
            return replace(fault, culprits=roots)
    if absences:
        return _crossed(absences)
    return faults[0] if faults else None


def _groups(traces: Mapping[int, Entered]) -> list[tuple[str, tuple[int, ...]]]:
    """Process groups and those of their ranks that are heard. Disjoint groups may have one name."""
    told = {(name, ranks) for entered in traces.values() for name, ranks in entered.members.items()}
    groups = [(name, tuple(rank for rank in ranks if traces.get(rank, Entered()).sequences)) for name, ranks in sorted(told)]
    seen: dict[str, list[int]] = defaultdict(list)
    for rank, entered in sorted(traces.items()):
        for name in entered.sequences:
            if name not in entered.members:
                seen[name].append(rank)
    return groups + [(name, tuple(ranks)) for name, ranks in sorted(seen.items())]


def _compare(group: str, members: tuple[int, ...], traces: Mapping[int, Entered]) -> CollectiveFault | None:
    own = {rank: _by_sequence(group, traces[rank].calls) for rank in members}
    entered = {rank: traces[rank].sequences.get(group, 0) for rank in members}
    for sequence in sorted({sequence for calls in own.values() for sequence in calls}):
        calls = {rank: own[rank][sequence] for rank in members if sequence in own[rank]}
        waiting = tuple(rank for rank, call in calls.items() if call.state != "done")
        if not waiting:
            continue
        ranks = Counter(call.signature for call in calls.values()).most_common()
        if len(ranks) > 1:
            usual = ranks[0][0] if ranks[0][1] > ranks[1][1] else None
            culprits = tuple(rank for rank, call in calls.items() if call.signature != usual)
            others = tuple(rank for rank in calls if rank not in culprits)
            first, second = culprits[0], others[0] if others else culprits[-1]
            kind = _difference(own[first], own[second], sequence)
            return CollectiveFault(kind, group, sequence, culprits, others, calls)
        if absent := tuple(rank for rank in members if entered[rank] < sequence and rank not in calls):
            return CollectiveFault("missing", group, sequence, absent, waiting, calls)
        started = tuple(rank for rank, call in calls.items() if call.state == "started")
        held = tuple(rank for rank in waiting if rank not in started)
        if started and held:
            return CollectiveFault("not_started", group, sequence, held, started, calls)
    return None


def _by_sequence(group: str, calls: Iterable[CollectiveCall]) -> dict[int, CollectiveCall]:
    # Of collectives that are one call (coalesced ones) the last entry closes it.
    return {call.sequence: call for call in calls if call.group == group}


def _difference(own: Mapping[int, CollectiveCall], usual: Mapping[int, CollectiveCall], sequence: int) -> Kind:
    """How the calls of a rank depart from the usual ones at `sequence`."""
    here, there = own[sequence].signature, usual[sequence].signature
    later = own[sequence + 1].signature if sequence + 1 in own else None
    later_there = usual[sequence + 1].signature if sequence + 1 in usual else None
    if later == there and later_there == here:
        return "order"
    # Where calls repeat, the next one being alike shows nothing.
    if later == there != later_there:
        return "extra"
    if later_there == here != later:
        return "skipped"
    if here[0] != there[0]:
        return "op"
    return "size" if here[1:3] != there[1:3] else "dtype"


def _crossed(absences: list[CollectiveFault]) -> CollectiveFault:
    """Each rank waits in one group for those that wait for it in another one: the fewest called in another order."""
    fewest, *rest = sorted(absences, key=lambda fault: len(fault.others))
    calls = {rank: fault.calls[rank] for fault in reversed([fewest, *rest]) for rank in fault.others}
    single = all(len(fault.others) > len(fewest.others) for fault in rest)
    culprits = fewest.others if single else tuple(sorted(calls))
    others = tuple(sorted(calls.keys() - set(culprits)))
    return CollectiveFault("order", fewest.group, fewest.sequence, culprits, others, calls)


def _short(value: object, *, length: int = _TEXT_LENGTH) -> str:
    text = str(value)
    return text if len(text) <= length else f"{text[: length - 12]}...{crc32(text.encode()):08x}"


def _names(ranks: tuple[int, ...], name: Callable[[int], str]) -> str:
    more = len(ranks) - _NAMED_AT_MOST
    return ", ".join(map(name, ranks[:_NAMED_AT_MOST])) + (f" and {more} more" if more > 0 else "")
