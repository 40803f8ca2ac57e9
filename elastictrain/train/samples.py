"""Training and held-out samples: the task's own, or token files."""

from dataclasses import dataclass

from elastictrain.config.composed import RunConfig
from elastictrain.data.dataset import Dataset
from elastictrain.data.opening import open_datasets
from elastictrain.errors import ConfigError, DataError, Problem, StorageError
from elastictrain.train.task import BringsDatasets, ChecksTokens, Task


@dataclass(frozen=True, slots=True)
class Samples:
    """What is trained on and what is evaluated."""

    train: Dataset
    held_out: Dataset | None
    digest: str
    """Names the content of token files; empty for a task's own datasets."""


def open_samples(task: Task, config: RunConfig) -> Samples:
    """Training samples and, if there are any, held-out ones. Raises: DataError, StorageError."""
    digest = ""
    if isinstance(task, BringsDatasets):
        train, held_out = task.train_dataset(), task.eval_dataset()
    else:
        try:
            opened = open_datasets(config.data, seq_len=config.train.seq_len)
        except StorageError as error:
            raise type(error)(f"`data.path` cannot be used: {error}") from error
        train, held_out, digest = opened.train, opened.holdout, opened.index.digest
        if isinstance(task, ChecksTokens):
            vocab_size = opened.index.tokenizer.vocab_size
            if problems := task.check_tokens(seq_len=config.train.seq_len, vocab_size=vocab_size):
                raise ConfigError(problems)
    if len(train) == 0:
        raise DataError([Problem("data.path", "must have at least one training sample, but has none")])
    if config.train.eval_every_steps and not held_out:
        raise DataError([Problem("train.eval_every_steps", "needs held-out samples, but there are none; set it to 0")])
    return Samples(train, held_out, digest)
