from types import SimpleNamespace
from typing import cast

import pytest

from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.train import save_wait as module
from elastictrain.train.leaving import LeaveDecision
from elastictrain.train.save_wait import SaveWait
from elastictrain.train.saving import SavingParts


@pytest.mark.parametrize("broken", ["", "it ended 3 times within 60 s"])
def test_a_host_without_a_keeper_says_so_and_nobody_waits_for_it(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host would wait for its files until the limit of a save, a quarter of an hour."""
    monkeypatch.setattr(module, "gather_json", lambda value, *, group: [value])
    parts = SimpleNamespace(rank=1, left_s=lambda: None, group=None, say=lambda text: None)
    link = SimpleNamespace(broken=broken, sending=lambda: (False, False))
    wait = SaveWait(cast(SavingParts, parts), cast(SaverLink, link))
    (word,) = wait._hear_all(5, deadline_s=0.0, in_a_row=0)
    assert word.error == broken
    if broken:
        verdict = wait.until_safe(5, can_replicate=False, in_a_row=0, deadline_s=0.0)
        assert verdict == LeaveDecision("memory", limited=False, error=broken)
