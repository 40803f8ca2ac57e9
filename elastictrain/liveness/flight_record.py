"""Which collectives a rank has entered, by its flight recorder. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entered:
    """The last collectives of one rank."""

    sequences: Mapping[str, int] = field(default_factory=dict)
    """By process group: the number of the last one, counted alike on all of its ranks."""

    last: str = ""
    """The newest of all, for a person."""


def last_entered(trace: str) -> Entered:
    """From a dump of the flight recorder; empty where that says nothing that we understand."""
    try:
        entries = [entry for entry in json.loads(trace)["entries"] if not entry["is_p2p"]]
        entries.sort(key=lambda entry: int(entry["record_id"]))
        sequences = {str(entry["process_group"][0]): int(entry["collective_seq_id"]) for entry in entries}
    except (ValueError, KeyError, TypeError, IndexError):
        return Entered()
    return Entered(sequences, _describe(entries[-1])) if entries else Entered()


def _describe(entry: Mapping[str, object]) -> str:
    group = entry["process_group"]
    name = f"group {group[0]}" if isinstance(group, list) else "its group"
    return f"{entry.get('profiling_name')} no. {entry['collective_seq_id']} of {name}, sizes {entry.get('input_sizes')}"[:200]
