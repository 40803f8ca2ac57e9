from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def group_of_one() -> Iterator[dist.HashStore]:
    """A default process group of this process alone, without a socket."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()
