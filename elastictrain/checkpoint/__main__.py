"""`python -m elastictrain.checkpoint`: look at the checkpoints of a run, check, delete, compare and export them.

Needs no GPU and no process group, and may be used while the run is training. URLs are paths or any fsspec URL: of a run
(`run.dir`), of its folder `checkpoints`, or of one checkpoint in it, such as `runs/llama/checkpoints/step-000000400`.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial

from elastictrain.errors import EXIT_OK, EXIT_USAGE, ElasticTrainError, UsageError

_EXIT_INTERRUPTED = 130
_EXIT_PIPE = 141
_THREADS = 4
_DEFAULT_MEMORY_DIR = "/dev/shm"  # noqa: S108  # the default of `checkpoint.memory_dir`
_URL = "folder of a run, its folder checkpoints, or one checkpoint in it: a path or any fsspec URL"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        parsed = _parser().parse_args(arguments)
    except SystemExit as stop:
        # argparse ends with 2 for a wrong command line, and with 0 after --help.
        return EXIT_USAGE if stop.code else EXIT_OK
    try:
        code = _dispatch(parsed)
        sys.stdout.flush()
    except ElasticTrainError as error:
        sys.stderr.write(f"elastictrain: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        remnants = f"; delete {parsed.out} before trying again" if parsed.command == "export" else ""
        sys.stderr.write(f"elastictrain: interrupted{remnants}\n")
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output, `head` for one, has seen enough; the interpreter must not try to write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_PIPE
    return code


def _dispatch(parsed: argparse.Namespace) -> int:
    # Each imports what it needs: only some wait for torch.
    if parsed.command == "ls":
        from elastictrain.checkpoint.commands.ls import find_in_memory, list_checkpoints

        find = partial(find_in_memory, memory_dir=parsed.memory_dir)
        return list_checkpoints(parsed.url, as_json=parsed.json, find_snapshots=find, key_env=parsed.key_env)
    if parsed.command == "verify":
        from elastictrain.checkpoint.commands.verify import verify_checkpoints

        return verify_checkpoints(
            parsed.url,
            every=parsed.all,
            step=parsed.step,
            threads=parsed.threads,
            as_json=parsed.json,
            key_env=parsed.key_env,
        )
    if parsed.command == "sign":
        from elastictrain.checkpoint.commands.sign import sign_checkpoints

        return sign_checkpoints(parsed.url, step=parsed.step, threads=_THREADS, key_env=parsed.key_env)
    if parsed.command == "prune":
        return _prune(parsed)
    if parsed.command == "diff":
        from elastictrain.checkpoint.commands.diff import diff_checkpoints

        return diff_checkpoints(parsed.a, parsed.b, limit=parsed.limit, as_json=parsed.json, key_env=parsed.key_env)
    from elastictrain.checkpoint.commands.export import export_checkpoint

    return export_checkpoint(
        parsed.url,
        to=parsed.to,
        out=parsed.out,
        step=parsed.step,
        dtype=parsed.dtype,
        task_target=parsed.task,
        key_env=parsed.key_env,
    )


def _prune(parsed: argparse.Namespace) -> int:
    from elastictrain.checkpoint.commands.output import ask, can_ask
    from elastictrain.checkpoint.commands.prune import KeepOptions, prune_checkpoints

    if not (parsed.yes or parsed.dry_run or can_ask()):
        raise UsageError("prune asks before it deletes, and there is no terminal to ask on; give --yes, or --dry-run")
    return prune_checkpoints(
        parsed.url,
        keep=KeepOptions(parsed.keep_last, parsed.keep_every),
        dry_run=parsed.dry_run,
        ask=(lambda _: True) if parsed.yes else ask,
        threads=_THREADS,
        key_env=parsed.key_env,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m elastictrain.checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_ls(commands)
    _add_verify(commands)
    _add_prune(commands)
    _add_diff(commands)
    _add_export(commands)
    _add_sign(commands)
    for name, command in commands.choices.items():
        command.add_argument(
            "--key-env",
            metavar="NAME",
            default="",
            required=name == "sign",
            help="environment variable with the key (checkpoint.key_env of the run): what is not signed with it is refused",
        )
    return parser


def _add_ls(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    listing = commands.add_parser(
        "ls",
        help="list checkpoints, newest first",
        description="List checkpoints, newest first. valid: the manifest is whole and all files are there in their sizes; "
        "their bytes are checked by verify.",
    )
    listing.add_argument("url", metavar="URL", help=_URL)
    listing.add_argument(
        "--memory-dir",
        metavar="DIR",
        default=_DEFAULT_MEMORY_DIR,
        help="checkpoint.memory_dir of the run; snapshots that this host holds there are listed, too (%(default)s)",
    )
    listing.add_argument("--json", action="store_true", help="for a script")


def _add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verifying = commands.add_parser(
        "verify",
        help="read every byte and compare the digests",
        description="Read every byte of checkpoints and compare the digests. What reads wrong is read again before it counts. "
        "Exit code 0: all valid; 74: something is damaged, or there is nothing to verify.",
    )
    verifying.add_argument("url", metavar="URL", help=_URL)
    which = verifying.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="all committed checkpoints (the newest that is not quarantined)")
    which.add_argument("--step", type=_count, metavar="N", help="the checkpoint of this step")
    verifying.add_argument("--threads", type=_positive, default=_THREADS, metavar="N", help=f"files read at once ({_THREADS})")
    verifying.add_argument("--json", action="store_true", help="for a script")


def _add_prune(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    pruning = commands.add_parser(
        "prune",
        help="delete old checkpoints",
        description="Delete old checkpoints by the rules that a run itself follows. Every byte of the newest one is read "
        "before anything older goes; if it is not whole, nothing is deleted.",
    )
    pruning.add_argument("url", metavar="URL", help="folder of a run, or its folder checkpoints")
    pruning.add_argument(
        "--keep-last", type=_positive, required=True, metavar="N", help="valid checkpoints that stay, the newest"
    )
    pruning.add_argument("--keep-every", type=_count, default=0, metavar="M", help="those at multiples of M steps stay, too")
    pruning.add_argument("--dry-run", action="store_true", help="only show what would go")
    pruning.add_argument("--yes", action="store_true", help="do not ask")


def _add_diff(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    comparing = commands.add_parser(
        "diff",
        help="compare two checkpoints",
        description="Compare two checkpoints, whatever world sizes saved them; of a run, the newest valid one. "
        "Exit code 0: equal; 1: different.",
    )
    comparing.add_argument("a", metavar="A", help=_URL)
    comparing.add_argument("b", metavar="B", help="the same")
    comparing.add_argument("--json", action="store_true", help="for a script")
    comparing.add_argument("--limit", type=_count, default=20, metavar="N", help="names shown of each kind (20); 0: all")


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    exporting = commands.add_parser(
        "export",
        help="write a checkpoint in another format",
        description="Write the newest valid checkpoint in a format that other tools read. Every byte is verified; one that "
        "is damaged is passed over. hf and safetensors need memory for one tensor, torch and dcp for all of them.",
    )
    exporting.add_argument("url", metavar="URL", help=_URL)
    exporting.add_argument(
        "out", metavar="OUT", help="empty folder to write to; for torch, a new file: a path or any fsspec URL"
    )
    exporting.add_argument(
        "--to",
        required=True,
        choices=("hf", "torch", "safetensors", "dcp"),
        help="hf: weights for from_pretrained, if the task can; torch: a file for torch.load; safetensors: whole tensors; "
        "dcp: a folder of torch.distributed.checkpoint",
    )
    exporting.add_argument("--step", type=_count, metavar="N", help="the checkpoint of this step (the newest valid one)")
    exporting.add_argument(
        "--task",
        metavar="CLASS",
        help="for hf: the class of the task, such as recipes.llama.LlamaTask; no module that a stored run names is imported",
    )
    exporting.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="element type of the model's weights (hf: bf16; others: as stored)"
    )


def _add_sign(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    signing = commands.add_parser(
        "sign",
        help="sign checkpoints that are there already",
        description="Read every byte of the checkpoints of a run, compare the digests, and sign their manifests: whoever calls "
        "it vouches for what is there now. Exit code 0: all are signed; 74: something is damaged, or there is nothing to sign.",
    )
    signing.add_argument("url", metavar="URL", help=_URL)
    signing.add_argument("--step", type=_count, metavar="N", help="the checkpoint of this step (all)")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, but is {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, but is {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
