"""How far the run has come, as one host can know it: in storage, and in its own memory."""

from elastictrain.checkpoint.folders import ROOT, read_listing
from elastictrain.checkpoint.memory.inventory import look
from elastictrain.checkpoint.memory.place import run_folder, run_name
from elastictrain.config.composed import RunConfig
from elastictrain.distributed.bounded import within
from elastictrain.storage.store import Store

_LISTING_S = 5.0


def committed_step(store: Store) -> int:
    """The newest step in storage; 0 if there is none, or storage does not answer in time."""

    def newest() -> int:
        folders = read_listing(store.list(ROOT)).folders
        return max((folder.step for folder in folders if folder.has_manifest and not folder.quarantined), default=0)

    return within(_LISTING_S, newest) or 0


def remembered_step(config: RunConfig) -> int:
    """The newest step that all workers of this host have in its memory; 0 if there is none."""
    run = run_name(config.run.dir)
    newest: dict[int, int] = {}
    for held in look(run_folder(config.checkpoint.memory_dir, config.run.dir), host=0):
        if not held.replica and held.facts.run == run:
            newest[held.facts.rank] = max(held.facts.step, newest.get(held.facts.rank, 0))
    return min(newest.values(), default=0)
