import os
from pathlib import Path

import pytest

from elastictrain.storage.posix import is_abandoned, temporary_name
from elastictrain.storage.writers import is_dead, process_name

HERE = "boot.4026.100.5000"


def running(proc: Path, processes: dict[int, str]) -> Path:
    """A folder like /proc with processes that began at these times."""
    for pid, started in processes.items():
        (proc / str(pid)).mkdir()
        (proc / str(pid) / "stat").write_text(f"{pid} (a) b) R {'0 ' * 16}1 0 {started} 0 0")
    return proc


@pytest.mark.parametrize(
    ("writer", "processes", "abandoned"),
    [
        ("boot.4026.7.300", {}, True),
        ("boot.4026.7.300", {7: "300"}, False),
        ("boot.4026.7.300", {7: "301"}, True),
        ("other-boot.4026.7.300", {}, False),
        ("boot.4027.7.300", {}, False),
        ("", {}, False),
    ],
    ids=["gone", "alive", "pid used again", "another machine", "another container", "unknown"],
)
def test_is_abandoned(writer: str, processes: dict[int, str], abandoned: bool, tmp_path: Path) -> None:
    proc = running(tmp_path, processes)
    assert is_abandoned(temporary_name(writer), here=HERE, proc=proc) is abandoned
    assert not is_abandoned(temporary_name(writer), here="", proc=proc)


@pytest.mark.parametrize("name", ["object", ".tmp-", ".tmp-a.b.c.d.e", ".tmp-boot.4026.7.300", "boot.4026.7.300.x"])
def test_other_names_are_spared(name: str, tmp_path: Path) -> None:
    assert not is_abandoned(name, here=HERE, proc=tmp_path)


def test_names_are_unique() -> None:
    assert len({temporary_name(HERE) for _ in range(100)}) == 100


def test_this_process_lives() -> None:
    here = process_name()
    assert here.split(".")[2] == str(os.getpid())
    assert not is_abandoned(temporary_name(here), here=here)
    assert is_abandoned(temporary_name(f"{here.rpartition('.')[0]}.1"), here=here)


def test_a_process_that_is_gone_has_the_name_of_a_dead_one() -> None:
    gone = process_name(2**22 + 1)
    assert gone.endswith(f".{2**22 + 1}.0")
    assert is_dead(gone, here=process_name())


def test_a_process_that_waits_for_its_parent_to_ask_is_dead(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    rest = "0 " * 16
    for state, threads, dead in (("R", 1, False), ("Z", 1, True), ("Z", 2, False)):
        (tmp_path / "5" / "stat").write_text(f"5 (a) b) {state} {rest}{threads} 0 77 0 0")
        assert is_dead("boot.4026.5.77", here=HERE, proc=tmp_path) is dead
        assert is_dead("boot.4026.5.78", here=HERE, proc=tmp_path)
    assert not is_dead("nonsense", here=HERE)


def test_a_process_that_proc_does_not_show_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("sys/kernel/random/boot_id", "boot\n"), ("self/ns/other", "")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026]")
    monkeypatch.setattr("elastictrain.storage.writers._PROC", tmp_path)
    assert process_name() == ""
    assert process_name(os.getpid() + 1) == f"boot.4026.{os.getpid() + 1}.0"
