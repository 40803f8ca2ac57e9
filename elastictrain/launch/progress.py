"""How far the run has come, as one host can know it: in storage, and in its own memory."""

from elastictrain.checkpoint.folders import ROOT, read_listing
from elastictrain.checkpoint.lineage import Lineage
from elastictrain.checkpoint.memory.folder import is_private, look, run_folder, run_name
from elastictrain.config.composed import RunConfig
from elastictrain.distributed.bounded import within
from elastictrain.storage.store import Store

_LISTING_S = 5.0


def committed_step(store: Store) -> int | None:
    """The step in storage that a start would go on from; 0 if there is none, None if storage does not answer in time."""

    def newest() -> int:
        listed = read_listing(store.list(ROOT)).folders
        committed = tuple(folder for folder in listed if folder.has_manifest and not folder.quarantined)
        if len(committed) > 1:
            # A generation that was given up may have committed a later step since, which nobody goes on from.
            committed, _ = Lineage(store).line_first(committed)
        return committed[0].step if committed else 0

    return within(_LISTING_S, newest)


def remembered_step(config: RunConfig) -> int:
    """The newest step that all workers of this host have in its memory; 0 if there is none."""
    run = run_name(config.run.dir)
    newest: dict[int, int] = {}
    folder = run_folder(config.checkpoint.memory_dir, config.run.dir)
    for held in look(folder, host=0) if is_private(folder) else ():
        if not held.replica and held.facts.run == run:
            newest[held.facts.rank] = max(held.facts.step, newest.get(held.facts.rank, 0))
    return min(newest.values(), default=0)
