"""How many workers a host gets for the GPUs that a cluster says it has."""

from collections.abc import Mapping

_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The variable that hides GPUs from processes, and how many it leaves; None where no GPU is hidden."""
    for name in _MASKS:
        if name in environment:
            items = [item.strip() for item in environment[name].split(",")]
            return name, sum(item not in ("", "-1", "NoDevFiles") for item in items)
    return None


def workers_for(promised: int, *, source: str, environment: Mapping[str, str]) -> tuple[int, str]:
    """One worker for each GPU that is promised and not hidden (0: the GPUs are to be asked), and a sentence about it."""
    mask = visible_gpus(environment)
    if mask is not None and mask[1] < promised:
        shown = f"{mask[0]}={environment[mask[0]]}"
        return mask[1], f"{count(mask[1], 'worker')}: of {count(promised, 'GPU')} ({source}) the rest is hidden by {shown}"
    return promised, f"{count(promised, 'worker')}, one for each GPU ({source})"


def count(number: int, noun: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
