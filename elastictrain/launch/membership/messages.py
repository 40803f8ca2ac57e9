"""Sentences about generations, for people."""

from collections.abc import Iterable, Sequence

from elastictrain.launch.membership.records import GenerationFailure, HostRecord

_LISTED = 8


def listed(names: Iterable[str]) -> str:
    """`a, b and c`; of many only the first ones."""
    all_names = list(names)
    if len(all_names) > _LISTED:
        return f"{', '.join(all_names[:_LISTED])} and {len(all_names) - _LISTED} more"
    return " and ".join([", ".join(all_names[:-1]), all_names[-1]] if len(all_names) > 1 else all_names)


def headline(reason: str) -> str:
    """The first line of a reason; whoever it happened to has printed all of it."""
    return next(iter(reason.splitlines()), "").rstrip(":")


def unconnected(pairs: Sequence[tuple[str, str]]) -> str:
    """Which hosts do not receive each other's heartbeats."""
    return f"UDP between the launchers' ports does not get through: {listed(f'{one} - {other}' for one, other in pairs)}"


def too_few(
    ready: Sequence[HostRecord],
    others: Sequence[HostRecord],
    *,
    min_hosts: int,
    unconnected_pairs: Sequence[tuple[str, str]] = (),
) -> str:
    """What a group below its minimum waits for. `others` are alive and cannot take part for now."""
    here = f"ready: {listed(record.name for record in ready)}" if ready else "none is ready"
    because = [f"{record.name} is {record.state}{f' ({record.reason})' if record.reason else ''}" for record in others]
    missing = f"; {listed(because)}" if because else ""
    if unconnected_pairs:
        missing += f"; {unconnected(unconnected_pairs)}"
    hosts = "1 host" if min_hosts == 1 else f"{min_hosts} hosts"
    return f"{hosts} (`launch.min_hosts`), of which {len(ready)} {'is' if len(ready) == 1 else 'are'} there ({here}{missing})"


def give_up(failures: Sequence[GenerationFailure]) -> str:
    """Why no further start is tried: what happened, and what the failures have in common."""
    times = "once" if len(failures) == 1 else f"{len(failures)} times in a row"
    lines = "".join(f"\n  generation {one.generation}: {headline(one.reason)} ({_where(one)})" for one in failures)
    common = _in_common(failures)
    return f"failed {times} without a newly committed step:{lines}" + (f"\n{common}" if common else "")


def _where(failure: GenerationFailure) -> str:
    place = f"step {failure.step}" if failure.step else "before the first step"
    phase = f", {failure.phase}" if failure.phase else ""
    return f"{place}{phase}, exit code {failure.exit_code}, committed: step {failure.committed_step}"


def _in_common(failures: Sequence[GenerationFailure]) -> str:
    if len(failures) < 2:
        return ""
    steps, phases = {one.step for one in failures}, {one.phase for one in failures}
    step, phase = failures[-1].step, failures[-1].phase
    sentences = []
    if len(steps) == 1 and step:
        sentences.append(_same_step(step, len(failures), committed_step=failures[-1].committed_step))
    elif len(steps) == 1 and len(phases) == 1 and phase:
        sentences.append(f"Each time it was before the first step, in the same phase ({phase}): trying again does not help.")
    blamed = set(failures[0].hosts).intersection(*(one.hosts for one in failures))
    if blamed:
        sentences.append(f"Each time host {listed(sorted(blamed))} was to blame: replace it, or start without it.")
    return "\n".join(sentences)


def _same_step(step: int, times: int, *, committed_step: int) -> str:
    sentence = (
        f"step {step} failed {times} times: a poisoned batch or checkpoint, or a bug that this step always meets. "
        "With `data.ledger=true` the ledger tells which samples it takes."
    )
    if not committed_step:
        return sentence
    return (
        f"{sentence} `python -m elastictrain.checkpoint verify` tells whether that of step {committed_step} is whole; to go on "
        "from the one before it, move its folder out of the run's `checkpoints/` first."
    )
