from pathlib import Path

import pytest

from elastictrain.checkpoint.keeper.pins import Pins
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.errors import InvalidCheckpointError
from tests.unit.checkpoint.memory.madeslots import facts_of, fill, layout_of, put


def writer_of(folder: Path, name: str) -> Slot:
    return Slot.make(f"{folder}/{name}", size_bytes=layout_of().size_bytes)


def test_a_pinned_snapshot_cannot_be_written_until_the_last_pin_goes(tmp_path: Path) -> None:
    name = put(tmp_path, facts_of(3))
    pins, writer = Pins(str(tmp_path)), writer_of(tmp_path, name)
    first, second = pins.pin(name), pins.pin(name)
    assert first is not None
    assert second is not None
    assert first.facts == facts_of(3)
    assert first.layout == layout_of()
    pins.release(first)
    assert not writer.lock(shared=False)
    pins.release(second)
    assert writer.lock(shared=False)
    assert pins.pin(name) is None
    writer.begin()
    writer.unlock()
    assert pins.pin(name) is None, "it is torn"
    assert writer.lock(shared=False), "and not held for that"
    writer.close()
    pins.close()


def test_a_slot_made_anew_under_the_same_name_is_another(tmp_path: Path) -> None:
    name = put(tmp_path, facts_of(3))
    pins = Pins(str(tmp_path))
    old = pins.pin(name)
    assert old is not None
    (tmp_path / name).unlink()
    put(tmp_path, facts_of(8))
    new, again = pins.pin(name), pins.pin(name)
    assert new is not None
    assert again is not None
    assert (old.slot.facts, new.facts) == (facts_of(3), facts_of(8))
    # Letting go of the old one lets go of nothing else.
    pins.release(old)
    with pytest.raises(OSError, match="Bad file descriptor"):
        old.slot.lock(shared=True)
    pins.release(again)
    writer = writer_of(tmp_path, name)
    assert not writer.lock(shared=False)
    pins.release(new)
    assert writer.lock(shared=False)
    writer.close()
    pins.close()


def test_what_cannot_be_pinned(tmp_path: Path) -> None:
    pins = Pins(str(tmp_path))
    with pytest.raises(OSError):
        pins.pin("own-r00000-s0")
    name = put(tmp_path, facts_of(3))
    for layout in tmp_path.glob("layout-*"):
        layout.unlink()
    with pytest.raises(InvalidCheckpointError, match="layout-"):
        pins.pin(name)
    writer = writer_of(tmp_path, name)
    assert writer.lock(shared=False), "a failure holds nothing"
    fill(writer, facts_of(4), layout_of())
    writer.close()
    pins.close()
