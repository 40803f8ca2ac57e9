"""Whether all ranks have metrics of the same names: their sums are added up by place."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from elastictrain.checkpoint.exchange import gather_json
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.errors import ConfigError


def describe_difference(names_of_ranks: Sequence[object]) -> str:
    """Which rank has other names than rank 0, and which; empty if none has. Pure."""
    first = names_of_ranks[0]
    different = next((rank for rank, names in enumerate(names_of_ranks) if names != first), None)
    return "" if different is None else f"{first} on rank 0 and {names_of_ranks[different]} on rank {different}"


@dataclass(slots=True)
class MetricNames:
    """Compares the names of all ranks once, and later ones with these."""

    group: dist.ProcessGroup | None
    _agreed: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False)

    def check(self, method: str, names: tuple[str, ...]) -> None:
        """Before the sums of metrics are reduced. `method`: which one has returned them, for messages. Collective: yes, at the
        first call for it. Raises: ConfigError."""
        agreed = self._agreed.get(method)
        if agreed is None:
            own: list[JsonValue] = [*names]
            if found := describe_difference(gather_json(own, group=self.group)):
                raise ConfigError(f"the task's {method} must return the same metrics on all ranks, but returned {found}")
            self._agreed[method] = names
        elif agreed != names:
            raise ConfigError(f"the task's {method} must return the same metrics each time, but now {names} after {agreed}")
