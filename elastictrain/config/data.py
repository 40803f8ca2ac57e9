"""The group `data`: what is read, and how it is kept at hand."""

from dataclasses import dataclass
from typing import Annotated

from elastictrain.config.constraints import NonEmpty, Range


@dataclass(frozen=True, slots=True)
class DataGroup:
    """Where training samples come from, unless the task brings datasets of its own."""

    path: Annotated[str, NonEmpty()] = "stdlib"
    """Folder of token files (a path or any fsspec URL) made by `python -m elastictrain.data prepare`, or `stdlib`: the source
    text of the Python standard library that runs the program, prepared on first use."""

    cache_dir: str | None = None
    """Local folder in which remote token files and the `stdlib` corpus are kept; null for
    $XDG_CACHE_HOME/elastictrain, or ~/.cache/elastictrain."""

    cache_gb: Annotated[float, Range(0.0, exclusive=True)] = 20.0
    """Upper bound on what `cache_dir` may hold (10^9 bytes); the least recently used files are removed first."""

    holdout_samples: Annotated[int, Range(0)] = 0
    """Samples at the end of the token files that are kept for evaluation and never trained on."""

    shuffle: bool = True
    """Visit samples in a seeded random order, another one each epoch; false for the order of the files."""

    workers: Annotated[int, Range(0, 256)] = 0
    """Processes that read ahead; 0 reads ahead in a thread of the trainer, which suffices for token files."""

    prefetch: Annotated[int, Range(1, 1024)] = 4
    """Micro-batches that are read ahead per rank."""

    ledger: bool = False
    """Write which sample each rank consumed at each step to <run.dir>/ledger/."""
