"""Sentences about generations, for people."""

from collections.abc import Iterable, Sequence

from elastictrain.launch.membership.records import GenerationFailure, HostRecord

_LISTED = 8


def listed(names: Iterable[str]) -> str:
    """`a, b and c`; of many names only the first 8."""
    all_names = list(names)
    if len(all_names) > _LISTED:
        return f"{', '.join(all_names[:_LISTED])} and {len(all_names) - _LISTED} more"
    return " and ".join([", ".join(all_names[:-1]), all_names[-1]] if len(all_names) > 1 else all_names)


def headline(reason: str) -> str:
    """First line of a reason; the host where it happened has printed all of it."""
    return next(iter(reason.splitlines()), "").rstrip(":")


def unconnected(pairs: Sequence[tuple[str, str]]) -> str:
    return f"UDP between the launchers' ports does not get through: {listed(f'{one} - {other}' for one, other in pairs)}"


def too_few(
    ready: Sequence[HostRecord],
    others: Sequence[HostRecord],
    *,
    min_hosts: int,
    unconnected_pairs: Sequence[tuple[str, str]] = (),
) -> str:
    """What a group below its minimum waits for. `others` are alive but cannot take part for now."""
    here = f"ready: {listed(record.name for record in ready)}" if ready else "none is ready"
    because = [f"{record.name} is {record.state}{f' ({record.reason})' if record.reason else ''}" for record in others]
    missing = f"; {listed(because)}" if because else ""
    if unconnected_pairs:
        missing += f"; {unconnected(unconnected_pairs)}"
    hosts = "1 host" if min_hosts == 1 else f"{min_hosts} hosts"
    return f"{hosts} (`launch.min_hosts`), of which {len(ready)} {'is' if len(ready) == 1 else 'are'} there ({here}{missing})"


def give_up(failures: Sequence[GenerationFailure]) -> str:
    """Why no further start is tried: the failures, and what they have in common."""
    times = "once" if len(failures) == 1 else f"{len(failures)} times in a row"
    lines = [f"failed {times} without a newly committed step:"]
    for one in failures:
        place = f"step {one.step}" if one.step else "before the first step"
        phase = f", {one.phase}" if one.phase else ""
        where = f"{place}{phase}, exit code {one.exit_code}, committed: step {one.committed_step}"
        lines.append(f"  generation {one.generation}: {headline(one.reason)} ({where})")
    return "\n".join(lines + (_in_common(failures) if len(failures) > 1 else []))


def _in_common(failures: Sequence[GenerationFailure]) -> list[str]:
    steps, phases, last = {one.step for one in failures}, {one.phase for one in failures}, failures[-1]
    sentences = []
    if len(steps) == 1 and last.step:
        sentence = (
            f"step {last.step} failed {len(failures)} times: a poisoned batch or checkpoint, or a bug that this step always "
            "meets. With `data.ledger=true` the ledger tells which samples it takes."
        )
        if last.committed_step:
            sentence += (
                f" `python -m elastictrain.checkpoint verify` tells whether that of step {last.committed_step} is whole; to go"
                " on from the one before it, move its folder out of the run's `checkpoints/` first."
            )
        sentences.append(sentence)
    elif len(steps) == 1 and len(phases) == 1 and last.phase:
        sentences.append(
            f"Each time it was before the first step, in the same phase ({last.phase}): trying again does not help."
        )
    if blamed := set(last.hosts).intersection(*(one.hosts for one in failures)):
        sentences.append(f"Each time host {listed(sorted(blamed))} was to blame: replace it, or start without it.")
    return sentences
