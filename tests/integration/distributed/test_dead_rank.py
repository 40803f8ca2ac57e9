"""A rank that dies while gloo connects the ranks: the others leave at once."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from elastictrain.distributed.group import leave, make_group
from elastictrain.distributed.store import PolledStore
from elastictrain.errors import DetachedError
from elastictrain.identity import Identity
from elastictrain.torch_private_groups import forget_groups

ALONE = Identity(0, 1, 0, 1, "here", launched=False)


@pytest.fixture(scope="module", autouse=True)
def nobody_is_left() -> Iterator[None]:
    """gloo waits for 10 s at least, and would abort an interpreter that exits meanwhile."""
    yield
    for thread in [one for one in threading.enumerate() if one.name == "bounded"]:
        thread.join(20)


class _Dying(PolledStore):
    """The store of a rank that leaves its address there, and does nothing any more."""

    def __init__(self, store: dist.Store, over: threading.Event) -> None:
        super().__init__(store, limit_s=60.0, poll=lambda: None)
        self._over = over

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._over.wait(60)
        raise DetachedError("it is dead")


@pytest.mark.parametrize("attempt", range(4))
def test_a_group_that_waits_for_the_connection_of_a_dead_rank_is_left(attempt: int) -> None:
    """Which side connects follows from the addresses: the other one waits for a socket that never comes. In one of several
    attempts that is us."""
    store, over = dist.HashStore(), threading.Event()
    its_store = _Dying(store, over)  # torch does not keep it
    began_s = time.monotonic()

    def poll() -> None:
        if time.monotonic() > began_s + 0.3:
            raise DetachedError("rank 1 is gone")

    def die() -> None:
        with suppress(RuntimeError, DetachedError):
            dist.ProcessGroupGloo(dist.PrefixStore("0//cpu/", its_store), 1, 2, timedelta(seconds=60))

    dead = threading.Thread(target=die, daemon=True)
    dead.start()
    try:
        two = Identity(0, 2, 0, 2, "here", launched=True)
        with pytest.raises(DetachedError):
            make_group(store, two, backend="gloo", init_timeout_s=2.0, save_timeout_s=2.0, poll=poll)
        assert time.monotonic() - began_s < 1.5
        assert store.check(["0//cpu//0/0", "0//cpu//0/1"]), "both have left their addresses where the other one looks"
        # The next generation does not wait for what was left behind.
        forget_groups()
        group = make_group(dist.HashStore(), ALONE, backend="gloo", init_timeout_s=20.0, save_timeout_s=20.0)
        leave(group)
    finally:
        over.set()
        dead.join(20)
        forget_groups()
