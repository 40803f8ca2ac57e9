import os
from dataclasses import replace

import pytest

from elastictrain.storage.temporaries import Writer, is_abandoned, start_of, temporary_name, this_writer

HERE = Writer("boot", "4026", 100, "5000")


@pytest.mark.parametrize(
    ("writer", "running", "abandoned"),
    [
        (Writer("boot", "4026", 7, "300"), {}, True),
        (Writer("boot", "4026", 7, "300"), {7: "300"}, False),
        (Writer("boot", "4026", 7, "300"), {7: "301"}, True),
        (Writer("other-boot", "4026", 7, "300"), {}, False),
        (Writer("boot", "4027", 7, "300"), {}, False),
        (None, {}, False),
    ],
    ids=["gone", "alive", "pid used again", "another machine", "another container", "unknown"],
)
def test_is_abandoned(writer: Writer | None, running: dict[int, str], abandoned: bool) -> None:
    assert is_abandoned(temporary_name(writer), here=HERE, start_of=running.get) is abandoned
    assert not is_abandoned(temporary_name(writer), here=None, start_of=running.get)


@pytest.mark.parametrize("name", ["object", ".tmp-", ".tmp-a.b.c.d.e", ".tmp-boot.4026.7.300", "boot.4026.7.300.x"])
def test_other_names_are_spared(name: str) -> None:
    assert not is_abandoned(name, here=HERE, start_of=lambda _: None)


def test_names_are_unique() -> None:
    assert len({temporary_name(HERE) for _ in range(100)}) == 100


def test_this_process_lives() -> None:
    here = this_writer()
    assert here is not None
    assert here.pid == os.getpid()
    assert not is_abandoned(temporary_name(here), here=here, start_of=start_of)
    assert is_abandoned(temporary_name(replace(here, started="1")), here=here, start_of=start_of)
