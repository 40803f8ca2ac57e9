"""The counters of a run in the `state` of a manifest. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from elastictrain.checkpoint.manifest import JsonValue

_MOST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class StateCounters:
    """What a run goes on from besides its tensors. A state that lacks one of them was saved without it: it is 0 then."""

    step: int
    skipped_in_a_row: int
    skipped_total: int
    data_digest: str | None
    """Names the data that the run was trained on; None if the state does not say."""


def counters_of(state: Mapping[str, JsonValue], *, step: int) -> StateCounters:
    """The counters in the state of a checkpoint of `step`.

    Raises: ValueError naming the one that is wrong.
    """
    stated = _count(state, "step", default=step)
    if stated != step:
        raise ValueError(f"`state.step` must be {step}, as the checkpoint's, but is {stated}")
    _count(state, "positions", default=0)
    data_digest = state.get("data_digest")
    if not isinstance(data_digest, str | None):
        raise ValueError(f"`state.data_digest` must be a text, but is {data_digest!r}")
    return StateCounters(
        step, _count(state, "skipped_in_a_row", default=0), _count(state, "skipped_total", default=0), data_digest
    )


def _count(state: Mapping[str, JsonValue], name: str, *, default: int) -> int:
    value = state.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError(f"`state.{name}` must be a whole number from 0 to {_MOST}, but is {value!r}")
    return value
