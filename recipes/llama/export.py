"""Writes the weights of a run's checkpoint as Hugging Face safetensors: `python -m recipes.llama.export RUN_DIR OUT`.

The same as `python -m elastictrain.checkpoint export RUN_DIR OUT --to hf --task recipes.llama.LlamaTask`.
"""

import argparse
import sys
from collections.abc import Sequence

from elastictrain.checkpoint.commands.export import DTYPES, export_checkpoint, read_run_config
from elastictrain.errors import EXIT_OK, EXIT_USAGE, ConfigError, ElasticTrainError, Problem
from elastictrain.storage.opening import open_store

_TASKS = ("recipes.llama.LlamaTask", "recipes.llama.task.LlamaTask")
_EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        parsed = _parser().parse_args(arguments)
    except SystemExit as stop:
        # argparse ends with 2 for a wrong command line, and with 0 after --help.
        return EXIT_USAGE if stop.code else EXIT_OK
    try:
        check_task(parsed.run_dir)
        return export_checkpoint(
            parsed.run_dir, to="hf", out=parsed.out, step=parsed.step, dtype=parsed.dtype, task_target=_TASKS[0]
        )
    except ElasticTrainError as error:
        _say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say(f"interrupted; delete {parsed.out} before trying again")
        return _EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.llama.export",
        description="Write the weights of a run's checkpoint as a folder that transformers reads.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's folder (run.dir): a path or any fsspec URL")
    parser.add_argument("out", metavar="OUT", help="folder for the weights, which must be empty: a path or any fsspec URL")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (the newest valid one)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="element type of the weights (bf16)")
    return parser


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def check_task(run_url: str) -> None:
    """Raises: ConfigError if the run trains something else than a llama; StorageError."""
    run = open_store(run_url)
    task = read_run_config(run).get("task")
    target = task.get("_target_") if isinstance(task, dict) else None
    if str(target).removeprefix("elastictrain.") not in _TASKS:
        message = f"must be {_TASKS[0]} in {run.url}/config.yaml for this export, but is {target!r}"
        raise ConfigError([Problem("task._target_", message)])


if __name__ == "__main__":
    sys.exit(main())
