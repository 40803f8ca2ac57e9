"""Python loads this in every process of a faulty run: what the faults in the environment name is done at their places.

FAULTS is a JSON list. One fault at a time is armed: the first that has not happened yet. Each is

    at      module:function or module:Class.method
    when    before or after that call, or `middle` (of a copy into a slot)
    nth     how many times the place is reached, in one process, while the fault is armed
    what    SIGKILL of oneself (self), of the saver, or of both, that is of it and all workers; exit: SystemExit;
            pause: a second and a half passes; hold: until there is a file `go` in FAULTS_FOLDER, a minute at most
    always  it stays armed, and the ones after it never are

FAULTS_FOLDER holds a mark for each fault that has happened, and what the first rank of each incarnation found at its start.
"""

import importlib.abc
import importlib.machinery
import json
import os
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(os.environ.get("FAULTS_FOLDER", "."))
FAULTS: list[dict[str, Any]] = json.loads(os.environ.get("FAULTS", "[]"))
COPY = "elastictrain.checkpoint.copier:copy_on_host"
RESTORE = "elastictrain.checkpoint.checkpointer:Checkpointer.restore"

_reached: Counter[int] = Counter()


def memory_folder() -> str:
    """Of this run: a worker has it among its arguments, and the saver's only one lies in it."""
    for argument in sys.argv:
        if argument.startswith("checkpoint.memory_dir="):
            return argument.partition("=")[2]
    return str(Path(sys.argv[-1]).parents[1])


def armed() -> int:
    """Index of the fault whose turn it is."""
    for index, fault in enumerate(FAULTS):
        if fault.get("always") or not (FOLDER / f"fired-{index}").exists():
            return index
    return -1


def is_due(place: str, when: str) -> dict[str, Any] | None:
    """The fault that happens here and now; it is marked as done."""
    index = armed()
    if index < 0 or (FAULTS[index]["at"], FAULTS[index].get("when", "before")) != (place, when):
        return None
    _reached[index] += 1
    if _reached[index] != FAULTS[index].get("nth", 1) and not FAULTS[index].get("always"):
        return None
    try:
        (FOLDER / f"fired-{index}").touch(exist_ok=bool(FAULTS[index].get("always")))
    except FileExistsError:
        return None
    return FAULTS[index]


def processes(mark: str, argument: str) -> list[int]:
    """All with both texts among their arguments, this one last."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if mark in words and "torch.distributed.run" not in words and any(argument in word for word in words):
                found.append(int(entry.name))
    return sorted(found, key=lambda pid: pid == os.getpid())


def act(fault: dict[str, Any]) -> None:
    """Let it happen."""
    what, memory = fault["what"], memory_folder()
    if what == "exit":
        sys.exit("broken on purpose")
    if what == "pause":
        time.sleep(1.5)
        return
    if what == "hold":
        deadline = time.monotonic() + 60
        while not (FOLDER / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return
    victims = [os.getpid()] if what == "self" else []
    if what == "both":
        victims += processes("elastictrain.run", f"checkpoint.memory_dir={memory}")
    if what in ("saver", "both"):
        victims += processes("elastictrain.checkpoint.saver", f"{memory}/")
    for pid in sorted(victims, key=lambda pid: pid == os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def reach(place: str, when: str) -> None:
    """A place is reached."""
    if fault := is_due(place, when):
        act(fault)


def replace(module: ModuleType, place: str) -> None:
    """Put ourselves around a function of a module that has just been loaded."""
    owner: Any = module
    *path, name = place.partition(":")[2].split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    @wraps(original)
    def replaced(*arguments: Any, **options: Any) -> Any:
        if place == RESTORE:
            look_around(arguments[0].incarnation)
        if place == COPY and (fault := is_due(place, "middle")):
            _, sources, target = arguments
            for source in sources[: len(sources) // 2]:
                target[4096 : 4096 + source.numel()] = source
            act(fault)
        reach(place, "before")
        result = original(*arguments, **options)
        reach(place, "after")
        return result

    setattr(owner, name, replaced)


def look_around(incarnation: str) -> None:
    """Write down, before anything is restored, what is whole in memory and in storage, by looking at the files alone."""
    if os.environ.get("RANK", "0") != "0":
        return
    run_dir = next(word.partition("=")[2] for word in sys.argv if word.startswith("run.dir="))
    stored = [int(path.parent.name[5:14]) for path in Path(run_dir).glob("checkpoints/step-*/manifest.json")]
    ranks: dict[tuple[int, str, int], set[int]] = {}
    for path in Path(memory_folder()).glob("*/*/own-r*-s?"):
        page = path.read_bytes()[:16384]
        state, length = struct.unpack_from("<QI", page, 8)
        if state == 2:
            facts = json.loads(page[36 : 36 + length])
            key = (facts["step"], facts["incarnation"], facts["world_size"])
            ranks.setdefault(key, set()).add(facts["rank"])
    whole = [step for (step, _, world_size), there in ranks.items() if len(there) == world_size]
    (FOLDER / f"found-{incarnation}.json").write_text(
        json.dumps({"memory": max(whole, default=0), "stored": max(stored, default=0)})
    )


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that faults name, and changes them when they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        places = {place for place in (RESTORE, *(fault["at"] for fault in FAULTS)) if place.partition(":")[0] == fullname}
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if places else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for place in places:
                replace(module, place)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "FAULTS" in os.environ and any(word.startswith("elastictrain.") for word in sys.orig_argv):
    sys.meta_path.insert(0, Finder())
