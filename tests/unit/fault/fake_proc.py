"""What the kernel shows of processes, in a folder."""

from collections.abc import Mapping
from pathlib import Path

RUNNING, EXITING = 4194304, 4228364


def make_process(
    proc: Path,
    pid: int,
    *,
    name: str = "python",
    state: str = "S",
    parent: int = 1,
    flags: int = RUNNING,
    started: int = 100,
    status: int = 0,
    threads: Mapping[int, tuple[str, int]] = {},
    unlisted: int = 0,
) -> None:
    """A process; `threads` are more of it than the first one, by their number, with state and flags; and `unlisted` others."""
    for number, (its_state, its_flags) in {pid: (state, flags), **threads}.items():
        folder = proc / str(pid) / "task" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, f"{number} ({name}) {its_state} {parent} 1 1 0 -1 {its_flags}", 1 + len(threads), started, status)
    folder = proc / str(pid)
    _write(folder, f"{pid} ({name}) {state} {parent} 1 1 0 -1 {flags}", 1 + len(threads) + unlisted, started, status)
    for wchan in (folder, folder / "task" / str(pid)):
        (wchan / "wchan").write_text("0" if state == "R" else "do_nanosleep")


def _write(folder: Path, head: str, num_threads: int, started: int, status: int) -> None:
    """Of proc(5), `stat`: the first nine fields, then nothing of interest but the 20th, the 22nd and the 52nd."""
    (folder / "stat").write_text(f"{head} {'0 ' * 10}{num_threads} 0 {started} {'0 ' * 29}{status}\n")
