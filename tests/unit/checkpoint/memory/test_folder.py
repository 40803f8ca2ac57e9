import os
from itertools import chain
from pathlib import Path

import pytest

from elastictrain.checkpoint.memory.folder import (
    Held,
    SlotName,
    is_private,
    look,
    make_private,
    run_folder,
    run_name,
    sets_to_keep,
    slot_names,
    whole_sets,
)
from elastictrain.checkpoint.memory.slot import Slot, SnapshotFacts
from elastictrain.errors import ConfigError
from tests.unit.checkpoint.memory.madeslots import RUN, facts_of, flip, layout_of, put


def held(facts: SnapshotFacts, *, host: int = 0, kind: str = "own", index: int = 0) -> Held:
    return Held(host, str(SlotName(kind, facts.rank, index)), facts)


def steps(*found: Held) -> list[tuple[int, str]]:
    return [(one.step, one.incarnation) for one in whole_sets(found, run=RUN)]


def test_a_step_is_whole_when_all_ranks_of_one_incarnation_have_it() -> None:
    a, b = (facts_of(5, rank=rank, world_size=2) for rank in range(2))
    later = facts_of(6, rank=1, world_size=2)
    assert steps(held(a), held(b), held(later)) == [(5, "000001-aa")]
    assert steps(held(a)) == []
    assert steps(held(a), held(facts_of(5, rank=1, world_size=2, incarnation="000002-bb"))) == []
    assert steps(held(a), held(facts_of(5, rank=1, world_size=3))) == []
    assert steps(held(a), held(facts_of(5, rank=1, world_size=2, run="another"))) == []


def test_the_newest_comes_first_and_own_snapshots_before_replicas() -> None:
    first = [facts_of(5, rank=rank, world_size=2) for rank in range(2)]
    again = [facts_of(5, rank=rank, world_size=2, incarnation="000002-bb") for rank in range(2)]
    newest = [facts_of(9, rank=0)]
    everything = [
        *(held(one) for one in (*first, *again, *newest)),
        held(first[1], kind="replica", host=0),
        held(first[1], host=2),
    ]
    sets = whole_sets(everything, run=RUN)
    assert [(one.step, one.incarnation, one.world_size) for one in sets] == [
        (9, "000001-aa", 1),
        (5, "000002-bb", 2),
        (5, "000001-aa", 2),
    ]
    assert [(one.host, one.replica) for one in sets[2].sources[1]] == [(0, False), (2, False), (0, True)]


def test_beside_the_restored_step_the_newest_one_on_two_hosts_is_kept() -> None:
    def on(*steps: int, host: int, kind: str = "own", rank: int, incarnation: str = "000001-aa") -> list[Held]:
        all_facts = (facts_of(step, rank=rank, world_size=2, incarnation=incarnation) for step in steps)
        return [held(facts, host=host, kind=kind) for facts in all_facts]

    def kept(*found: list[Held], off_lineage: tuple[tuple[str, int], ...] = ()) -> list[int]:
        return [one.step for one in sets_to_keep(whole_sets(chain(*found), run=RUN, off_lineage=off_lineage))]

    own = on(7, 9, 12, host=0, rank=0), on(7, 9, 12, host=1, rank=1)
    assert kept(*own) == [12]
    assert kept(*own, on(5, 7, host=1, kind="replica", rank=0), on(7, 9, host=0, kind="replica", rank=1)) == [12, 7]
    everywhere = on(7, 12, host=1, kind="replica", rank=0), on(7, 12, host=0, kind="replica", rank=1)
    assert kept(*own, *everywhere) == [12]
    # The run has left this one's history behind.
    assert kept(*own, on(7, host=1, rank=0), on(7, host=0, rank=1), off_lineage=(("000001-aa", 7),)) == [12]
    # Another snapshot of the restored step does not count.
    twice = (on(12, host=host, rank=rank, incarnation="000000-aa") for host in (0, 1) for rank in (0, 1))
    assert kept(*own, *twice) == [12]
    assert kept() == []


def test_only_whole_snapshots_in_their_own_slots_are_seen(tmp_path: Path) -> None:
    for index, step in enumerate((3, 4, 5)):
        put(tmp_path, facts_of(step), index=index)
    torn = Slot.make(f"{tmp_path}/own-r00000-s1", size_bytes=layout_of().size_bytes)
    torn.begin()
    torn.close()
    flip(tmp_path, "own-r00000-s2", at=60)
    (tmp_path / "own-r00001-s0").write_bytes((tmp_path / "own-r00000-s0").read_bytes())
    (tmp_path / "own-r00000-s4").write_bytes(b"")
    (tmp_path / "keeper.log").write_text("words")
    found = look(str(tmp_path), host=3)
    assert [(one.host, one.slot, one.facts) for one in found] == [(3, "own-r00000-s0", facts_of(3))]
    assert look(f"{tmp_path}/gone", host=0) == []


def test_names_of_slots(tmp_path: Path) -> None:
    replica = SlotName("replica", 123456, 1)
    for name in (str(replica), "own-r00000-s0.digests", "own-r0-s0", "x-own-r00000-s0", "own-r00000-s10"):
        (tmp_path / name).touch()
    assert slot_names(str(tmp_path)) == [replica]


def test_one_run_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert run_name("run") == run_name(f"{tmp_path}/run/") == run_name(f"{tmp_path}/link")
    assert run_name("s3://bucket/run/") == run_name("s3://bucket/run") != run_name("run")
    assert run_folder("/dev/shm/", "run") == f"/dev/shm/elastictrain-{os.getuid()}/{run_name('run')}"


def refused(folder: str) -> str:
    """The path that keeps a folder from being used."""
    with pytest.raises(ConfigError) as caught:
        make_private(folder)
    (problem,) = caught.value.problems
    assert problem.key == "checkpoint.memory_dir"
    return next(word for word in problem.message.split() if word.startswith("/"))


def test_private_folders(tmp_path: Path) -> None:
    folder = f"{tmp_path}/user/run"
    make_private(folder)
    make_private(folder)
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    Path(folder).chmod(0o750)
    assert refused(folder) == folder


def test_a_link_is_no_private_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "user").symlink_to(tmp_path / "elsewhere")
    assert refused(f"{tmp_path}/user/run") == f"{tmp_path}/user"
    assert refused(f"{tmp_path}/not/there/run") == f"{tmp_path}/not/there"


def test_the_last_run_of_a_user_may_end_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its saver removes the user's folder when it is empty: between our making it, and our making one in it."""
    really_mkdir, taken_away = os.mkdir, []

    def mkdir(path: str, mode: int = 0o777) -> None:
        if path.endswith("/run") and not taken_away:
            taken_away.append(path)
            Path(path).parent.rmdir()
        really_mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    make_private(f"{tmp_path}/user/run")
    assert taken_away
    assert (tmp_path / "user/run").is_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders to somebody else")
@pytest.mark.parametrize("of_others", ["user", "user/run"])
def test_a_folder_of_somebody_else_is_neither_used_nor_read(tmp_path: Path, of_others: str) -> None:
    make_private(f"{tmp_path}/user/run")
    assert is_private(f"{tmp_path}/user/run")
    assert is_private(f"{tmp_path}/none/run")
    os.chown(tmp_path / of_others, 54_321, 54_321)
    assert refused(f"{tmp_path}/user/run") == f"{tmp_path}/{of_others}"
    assert not is_private(f"{tmp_path}/user/run")
