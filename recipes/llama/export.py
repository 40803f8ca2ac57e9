"""Writes the weights of a run's checkpoint as Hugging Face safetensors: `python -m recipes.llama.export RUN_DIR OUT`.

The run may still be training, anywhere: its folder is only read, every byte is verified, and no process group is made.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from elastictrain.checkpoint.choose import FreshStart, Refuse, Reject, decide
from elastictrain.checkpoint.folders import ROOT, Listing, key_of, read_listing
from elastictrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from elastictrain.checkpoint.restore import load_tensors
from elastictrain.checkpoint.second_look import find_missing, read_twice
from elastictrain.checkpoint.tensor_bytes import dtype_named
from elastictrain.checkpoint.verified_read import DamagedFileError, Folder
from elastictrain.config.digest import from_yaml
from elastictrain.config.validate import check_dataclass
from elastictrain.errors import (
    EXIT_OK,
    EXIT_USAGE,
    ConfigError,
    ElasticTrainError,
    InvalidCheckpointError,
    NoValidCheckpointError,
    ObjectNotFoundError,
    Problem,
    UsageError,
)
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from recipes.llama.config import LlamaConfig
from recipes.llama.huggingface import parameter_shapes
from recipes.llama.weights import export_weights

_TASKS = ("recipes.llama.LlamaTask", "recipes.llama.task.LlamaTask")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_CONFIG = "config.yaml"
_EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint whose manifest is valid and whose files are all there; their bytes are verified as they are read."""

    folder: str
    manifest: Manifest


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        parsed = _parser().parse_args(arguments)
    except SystemExit as stop:
        # argparse ends with 2 for a wrong command line, and with 0 after --help.
        return EXIT_USAGE if stop.code else EXIT_OK
    try:
        export_run(open_store(parsed.run_dir), out=open_store(parsed.out), step=parsed.step, dtype=_DTYPES[parsed.dtype])
    except ElasticTrainError as error:
        say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say(f"interrupted; delete {parsed.out} before trying again")
        return _EXIT_INTERRUPTED
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.llama.export",
        description="Write the weights of a run's checkpoint as a folder that transformers reads.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's folder (run.dir): a path or any fsspec URL")
    parser.add_argument("out", metavar="OUT", help="folder for the weights, which must be empty: a path or any fsspec URL")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (the newest valid one)")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="element type of the weights (bf16)")
    return parser


def say(text: str) -> None:
    """A line for the person."""
    print(text, file=sys.stderr)  # noqa: T201


def export_run(run: Store, *, out: Store, step: int | None, dtype: torch.dtype) -> None:
    """Export the newest valid checkpoint of `run`, or that of `step`; goes back from one that turns out to be damaged.

    Raises: ConfigError if the run trained something else; NoValidCheckpointError; UsageError if `out` is not empty;
        StorageError.
    """
    config = read_model_config(run)
    # A file of an earlier export could be taken for a part of this one.
    if (present := next(iter(out.list()), None)) is not None:
        raise UsageError(f"{out.url} must be empty, but holds {present.key}; choose another folder, or delete it")
    rejected: list[Reject] = []
    while True:
        found = find_checkpoint(run, step=step, rejected=rejected)
        folder = Folder(run, f"{ROOT}/{found.folder}/")
        check_fit(found.manifest, config, where=folder.url("").rstrip("/"))
        count = len(parameter_shapes(config))
        say(f"exporting {folder.url('').rstrip('/')} ({count} tensors) as {str(dtype).removeprefix('torch.')} to {out.url}")
        try:
            with _progress(count) as advance:
                export_weights(
                    reader(folder, found.manifest, advance=advance),
                    config=config,
                    store=out,
                    dtype=dtype,
                )
        except DamagedFileError as error:
            # What was written so far is written over: the same model has the same files.
            rejected.append(Reject(found.folder, error.file, str(error)))
            say(f"damaged, going back: {error}")
            continue
        say(f"done: step {found.manifest.step}; transformers.AutoModelForCausalLM.from_pretrained reads it from a local folder")
        return


def read_model_config(run: Store) -> LlamaConfig:
    """The model in the run's config.yaml. Raises: ConfigError; StorageError."""
    url = f"{run.url}/{_CONFIG}"
    try:
        text = run.read(_CONFIG).decode("utf-8", errors="replace")
    except ObjectNotFoundError as error:
        raise ConfigError(f"{run.url} must be the folder of a run, but has no {_CONFIG}") from error
    tree = from_yaml(text, source=url)
    task, model = (value if isinstance(value := tree.get(name), dict) else {} for name in ("task", "model"))
    if task.get("_target_") not in _TASKS:
        message = f"must be {_TASKS[0]} in {url} for this export, but is {task.get('_target_')!r}"
        raise ConfigError([Problem("task._target_", message)])
    config, problems = check_dataclass(LlamaConfig, values=model, path="model")
    if config is None:
        raise ConfigError([replace(problem, message=f"{problem.message} ({url})") for problem in problems])
    return config


def find_checkpoint(run: Store, *, step: int | None, rejected: list[Reject]) -> Found:
    """The newest checkpoint, or that of `step`, with a valid manifest and all its files; what is not is added to `rejected`.

    Raises: NoValidCheckpointError; StorageError.
    """
    while True:
        # Listed anew each time: a run that is still training saves and prunes meanwhile.
        listing = read_listing(run.list(ROOT))
        wanted = tuple(folder for folder in listing.folders if step is None or folder.step == step)
        decision = decide(Listing(wanted, begun=False), rejected=rejected, on_invalid="stop")
        which = "" if step is None else f" of step {step}"
        if isinstance(decision, FreshStart):
            steps = sorted({folder.step for folder in listing.folders if folder.has_manifest})
            there = f"; there is step {', '.join(map(str, steps))}" if steps else ""
            raise NoValidCheckpointError(f"{run.url}/{ROOT} must hold a checkpoint{which}, but does not{there}")
        if isinstance(decision, Refuse):
            lines = "\n".join(f"  - {reject}" for reject in decision.rejects)
            raise NoValidCheckpointError(f"{run.url}/{ROOT} has no valid checkpoint{which}:\n{lines}")
        folder = decision.folder
        try:
            key = key_of(folder.name, MANIFEST_NAME)
            _, manifest = read_twice(run, key, where=f"{run.url}/{key}")
        except (InvalidCheckpointError, ObjectNotFoundError) as error:
            rejected.append(Reject(folder.name, MANIFEST_NAME, str(error)))
            continue
        reject = find_missing(run, manifest, folder=folder)
        if reject is None:
            return Found(folder.name, manifest)
        rejected.append(reject)


def check_fit(manifest: Manifest, config: LlamaConfig, *, where: str) -> None:
    """Raises: ConfigError naming a tensor if the checkpoint is of another model than config.yaml says."""
    for name, shape in parameter_shapes(config).items():
        stored = manifest.tensors.get(f"model.{name}")
        if stored is None or stored.shape != shape:
            found = "is not in it" if stored is None else f"has the shape {list(stored.shape)} in it"
            raise ConfigError(
                f"{where} must hold the model of {_CONFIG}, whose {name} has the shape {list(shape)}, but {name} {found}"
            )


def reader(folder: Folder, manifest: Manifest, *, advance: Callable[[], object]) -> Callable[[str], Tensor]:
    """Reads one whole parameter by our name, whatever it was sharded over, and calls `advance`."""

    def read(name: str) -> Tensor:
        stored = manifest.tensors[f"model.{name}"]
        tensor = torch.empty(stored.shape, dtype=dtype_named(stored.dtype))
        load_tensors(folder, manifest, tensors={f"model.{name}": tensor})
        advance()
        return tensor

    return read


@contextmanager
def _progress(count: int) -> Iterator[Callable[[], object]]:
    """A bar on a terminal, and a line for every tenth of the tensors elsewhere."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(desc="exporting", total=count, unit="tensor") as bar:
            yield bar.update
        return
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done == count or done % math.ceil(count / 10) == 0:
            say(f"{done}/{count} tensors")

    yield advance


if __name__ == "__main__":
    sys.exit(main())
