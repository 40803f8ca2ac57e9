"""Host memory at the start of an incarnation: who may use it, and when it may be given back."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.copier import Arena
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.checkpoint.memory.budget import Buffers, HostMemory
from elastictrain.checkpoint.memory.choice import Rounds
from elastictrain.checkpoint.memory.folder import SnapshotSet, run_folder
from elastictrain.checkpoint.memory_restore import MemoryRestore
from elastictrain.checkpoint.peers.client import OtherHosts
from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.errors import CheckpointError, SavesFailingError, StorageError
from elastictrain.identity import Identity
from elastictrain.train import snapshot_memory as module
from elastictrain.train.observing import Observer
from elastictrain.train.replica_comparison import ReplicaComparison
from elastictrain.train.saving import SynchronousSaving
from elastictrain.train.snapshot_memory import (
    SnapshotMemory,
    _agree_on_buffers,
    _agree_on_steps,
    _choose_slots,
    connect_savers,
    make_saving,
    share_arena,
)
from elastictrain.train.snapshot_saving import Saving
from elastictrain.train.state import TrainState
from tests.unit.checkpoint.memory.madeslots import RUN, facts_of, layout_of, put
from tests.unit.train.parts import FakeComparison, context_of
from tests.unit.train.test_loop import config

STEP = 7


class FakeState:
    step = STEP

    def tensors(self) -> dict[str, Tensor]:
        return {"w": torch.zeros(300, 10)}

    def scalars(self, step: int, *, global_batch: int) -> dict[str, int]:
        return {"step": step}

    def changed_by_forward(self) -> frozenset[str]:
        return frozenset()


@dataclass
class Scene:
    """A saver's link, other hosts and storage in one: what was done with them, in its order."""

    did: list[str] = field(default_factory=list)
    storage_works: bool = True
    broken: str = ""
    port: int = 4000
    silent: str = ""
    """Why it does not answer."""

    takes_no_note: str = ""
    replicates: bool = False

    def wait(self) -> None:
        if self.silent:
            raise CheckpointError(self.silent)

    def send_roster(self, roster: object) -> None:
        self.did.append("roster")
        if self.takes_no_note:
            raise CheckpointError(self.takes_no_note)

    def finish(self, timeout_s: float) -> None:
        self.did.append("finish")

    def close(self) -> None:
        self.did.append("close")

    def save(self, step: int, **_: object) -> None:
        if not self.storage_works:
            self.did.append("failed save")
            raise StorageError("the bucket is gone")
        self.did.append(f"save {step}")


def synchronous(scene: Scene, **parts: object) -> SynchronousSaving:
    return SynchronousSaving(
        context_of(config=config(steps=100, max_failed_saves=2), **parts),
        cast(Checkpointer, scene),
        cast(TrainState, FakeState()),
        cast(ReplicaComparison, FakeComparison()),
        None,
        Observer(),
    )


def saving_of(scene: Scene, folder: Path, *, in_storage: bool, **facts: object) -> Saving:
    recall = MemoryRestore(str(folder), run="a-run", host=0, lists_host_memory=True, group=None, remote=None)
    recall.look()
    memory = SnapshotMemory(cast(SaverLink, scene), recall, cast(OtherHosts, scene), **facts)  # type: ignore[arg-type]
    parts = {"generation": SimpleNamespace(name="000002-bb"), "store": None}
    return make_saving(memory, synchronous(scene, **parts), in_storage=in_storage)


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_of", lambda folder, **held: HostMemory(10**9, 0, 0))


@pytest.mark.usefixtures("no_memory")
def test_without_buffers_host_memory_is_given_back_once_storage_has_what_was_in_it(tmp_path: Path) -> None:
    scene = Scene()
    assert isinstance(saving_of(scene, tmp_path, in_storage=False), SynchronousSaving)
    # The first is what other hosts were read with.
    assert scene.did == ["close", f"save {STEP}", "finish"]
    scene = Scene()
    saving_of(scene, tmp_path, in_storage=True)
    assert scene.did == ["close", "finish"]


@pytest.mark.usefixtures("no_memory")
def test_what_cannot_be_stored_stays_in_host_memory(tmp_path: Path) -> None:
    scene = Scene(storage_works=False)
    with pytest.raises(SavesFailingError):
        saving_of(scene, tmp_path, in_storage=False)
    assert scene.did == ["close", "failed save", "failed save"]


def test_of_what_lies_in_slots_only_what_is_to_be_kept_counts(tmp_path: Path) -> None:
    put(tmp_path, facts_of(STEP, incarnation="000001-aa"), index=0)
    put(tmp_path, facts_of(STEP, incarnation="000002-bb"), index=1)
    put(tmp_path, facts_of(STEP - 1, incarnation="000002-bb"), index=2)
    recall = MemoryRestore(str(tmp_path), run=RUN, host=0, lists_host_memory=True, group=None, remote=None)
    recall.look()
    memory = SnapshotMemory(cast(SaverLink, Scene()), recall, None)

    def steps(*sets: SnapshotSet, layout: str = layout_of().digest) -> list[int | None]:
        return _agree_on_steps(memory, [0, 1, 2], synchronous(Scene()), sets=sets, layout=layout)

    best, _, older = recall.whole()
    assert steps(best) == [None, STEP, None]
    assert steps(best, older) == [None, STEP, STEP - 1]
    assert steps(best, layout="another") == [None] * 3
    assert steps() == [None] * 3


def test_what_is_restored_from_memory_alone_stays_until_replicas_have_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, facts_of(STEP, incarnation="000001-aa"), index=0)
    given: list[Rounds | None] = []
    monkeypatch.setattr(module, "SnapshotSaving", lambda *_, rounds, **__: given.append(rounds) or SimpleNamespace(arena=None))
    for in_storage in (False, True):
        saving_of(Scene(), tmp_path, in_storage=in_storage)
    kept, none = given
    assert kept is not None
    assert kept.safe == ("000001-aa", STEP)
    assert none is not None
    assert none.safe is None


def savers_connected(scene: Scene | None, folder: Path, monkeypatch: pytest.MonkeyPatch, *, others: str = "") -> SnapshotMemory:
    """With another host whose saver has a port, and says `others` to every question of what is wrong."""

    def gather(value: JsonValue, *, group: object) -> list[JsonValue]:
        if isinstance(value, list):
            return [value, [others, "there", "10.0.0.2", 4001, 0]]
        return [value, others]

    monkeypatch.setattr(module, "gather_json", gather)
    monkeypatch.setattr(module, "_address", lambda identity: "10.0.0.1")
    plain = config(steps=100)
    of_run = replace(
        plain, run=replace(plain.run, dir=str(folder / "run")), checkpoint=replace(plain.checkpoint, memory_dir=str(folder))
    )
    context = context_of(config=of_run, identity=Identity(0, 2, 0, 1, "here", launched=True))
    memory = connect_savers(context, cast(SaverLink, scene))
    assert memory is not None
    return memory


def test_savers_of_two_hosts_are_connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = savers_connected(scene := Scene(), tmp_path, monkeypatch)
    assert (memory.trouble, memory.kept, scene.did) == ("", (1,), ["roster"])
    assert memory.others is not None


@pytest.mark.parametrize(
    ("scene", "others", "said"),
    [
        (Scene(silent="it ended 3 times"), "", "it ended 3 times"),
        (Scene(), "it does not answer", "it does not answer"),
        (None, "", "a host keeps nothing in memory"),
        (Scene(takes_no_note="no answer within 30 s"), "", "no answer within 30 s"),
        (Scene(broken="it ended 3 times"), "", "it ended 3 times"),
    ],
)
def test_without_a_saver_memory_can_be_read_and_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: Scene | None, others: str, said: str
) -> None:
    memory = savers_connected(scene, tmp_path, monkeypatch, others=others)
    assert memory.trouble == said
    Path(memory.folder).mkdir(parents=True)
    put(Path(memory.folder), facts_of(STEP, run=memory.restore.run))
    memory.restore.look()
    assert (memory.restore.best() is not None) == (scene is not None)


def test_without_a_saver_memory_stays_until_storage_has_what_was_in_it(tmp_path: Path) -> None:
    for in_storage, did in ((False, ["close", f"save {STEP}", "finish"]), (True, ["close", "close"])):
        scene = Scene()
        assert isinstance(saving_of(scene, tmp_path, in_storage=in_storage, trouble="no saver"), SynchronousSaving)
        assert scene.did == did


def test_slots_of_a_generation_before_that_are_of_no_use_are_given_back(tmp_path: Path) -> None:
    recall = MemoryRestore(str(tmp_path), run=RUN, host=0, lists_host_memory=True, group=None, remote=None)
    for memory in (None, SnapshotMemory(cast(SaverLink, Scene()), recall, None, trouble="no saver")):
        scene = Scene()
        make_saving(memory, synchronous(Scene()), in_storage=True, arena=cast(Arena, scene))
        assert scene.did == ["close"]


def test_what_a_start_before_has_taken_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, size_bytes = layout_of(), layout_of().file_bytes
    names = ["own-r00000-s0", "own-r00000-s1", "own-r00000-s2", "replica-r00001-s0", "replica-r00001-s1"]
    # The last one is of a rank whose replicas another host keeps now.
    for name in (*names, "replica-r00002-s0"):
        (tmp_path / name).write_bytes(bytes(size_bytes))

    def gather(value: JsonValue, *, group: object) -> list[JsonValue]:
        assert isinstance(value, list)
        return [value, [1, *value[1:]], [2, *value[1:]]] if value[0] == 0 else [value]

    asked: list[HostMemory] = []

    def memory_of(folder: str, **held: int) -> HostMemory:
        asked.append(HostMemory(10 * size_bytes, size_bytes, 0, **held))
        return asked[-1]

    monkeypatch.setattr(module, "gather_json", gather)
    monkeypatch.setattr(module, "memory_of", memory_of)
    recall = MemoryRestore(str(tmp_path), run=RUN, host=0, lists_host_memory=True, group=None, remote=None)
    memory = SnapshotMemory(None, recall, cast(OtherHosts, Scene()), kept=(1,))
    context = context_of(config=config(steps=100), identity=Identity(0, 3, 0, 1, "here", launched=True))
    found = _agree_on_buffers(memory, layout, context, allocating=False)
    assert (asked[0].held_bytes, asked[0].held_replica_bytes) == (3 * size_bytes, 2 * size_bytes)
    assert found == Buffers(3, True)


def test_all_ranks_have_as_many_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recall = MemoryRestore(str(tmp_path), run=RUN, host=0, lists_host_memory=True, group=None, remote=None)
    memory = SnapshotMemory(None, recall, None)
    for index in range(10):
        put(tmp_path, facts_of(STEP - index), index=index)
    layout = layout_of(rows=600)
    assert _choose_slots(memory, layout, context_of(), wanted=2, kept_steps=[STEP], allocating=False) == [8, 9]
    assert (tmp_path / "own-r00000-s0").exists()
    monkeypatch.setattr(module, "gather_json", lambda value, *, group: [value, 1])
    assert _choose_slots(memory, layout, context_of(), wanted=2, kept_steps=[STEP], allocating=False) == [8]


def test_a_standby_maps_the_slots_of_its_rank_also_while_one_is_being_allocated(tmp_path: Path) -> None:
    plain = config(steps=100)
    options = replace(plain.checkpoint, memory_dir=str(tmp_path), buffers=3, replicate=False)
    context = context_of(config=replace(plain, checkpoint=options))
    folder = Path(run_folder(str(tmp_path), context.config.run.dir))
    folder.mkdir(parents=True)
    (folder / "own-r00000-s0").touch()
    arena = share_arena(context, cast(TrainState, FakeState()))
    assert arena is not None
    arena.close()
    assert [name.index for name in arena.names] == [0, 1, 2]
