"""`python -m elastictrain.checkpoint`: look at the checkpoints of a run, check, delete, compare and export them.

Needs no GPU and no process group, and may be used while the run is training. URLs are paths or any fsspec URL: of a run
(`run.dir`), of its folder `checkpoints`, or of one checkpoint in it, such as `runs/llama/checkpoints/step-000000400`.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from elastictrain.entry_point import run_command

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_URL = "folder of a run, its folder checkpoints, or one checkpoint in it: a path or any fsspec URL"


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    return run_command(_parser(), arguments, _run, if_interrupted=_tell_remnants)


def _tell_remnants(parsed: argparse.Namespace) -> str:
    return f"; delete {parsed.out} before trying again" if parsed.command == "export" else ""


def _run(parsed: argparse.Namespace) -> int:
    options = vars(parsed).copy()
    module, _, function = options.pop("act").partition(".")
    del options["command"]
    # Imported on call: only some commands need torch.
    act = getattr(import_module(f"elastictrain.checkpoint.commands.{module}"), function)
    return int(act(**options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m elastictrain.checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_reading(commands)
    _add_changing(commands)
    return parser


def _add(
    commands: "_Commands", name: str, *, act: str, summary: str, details: str, as_json: bool = False
) -> argparse.ArgumentParser:
    """A command; the names of its options are those of the parameters of the function `act`."""
    command = commands.add_parser(name, help=summary, description=details)
    command.set_defaults(act=act)
    command.add_argument(
        "--key-env",
        metavar="NAME",
        default="",
        required=name == "sign",
        help="environment variable with the key (checkpoint.key_env of the run): what is not signed with it is refused",
    )
    if as_json:
        command.add_argument("--json", dest="as_json", action="store_true", help="for a script")
    return command


def _add_reading(commands: "_Commands") -> None:
    listing = _add(
        commands,
        "ls",
        act="survey.show_checkpoints",
        summary="list checkpoints, newest first",
        details="List checkpoints, newest first. valid: the manifest is whole and all files are there in their sizes; "
        "their bytes are checked by verify.",
        as_json=True,
    )
    listing.add_argument("url", metavar="URL", help=_URL)
    listing.add_argument(
        "--memory-dir",
        metavar="DIR",
        default="/dev/shm",  # noqa: S108  # the default of `checkpoint.memory_dir`
        help="checkpoint.memory_dir of the run; snapshots that this host holds there are listed, too (%(default)s)",
    )

    verifying = _add(
        commands,
        "verify",
        act="verify.verify_checkpoints",
        summary="read every byte and compare the digests",
        details="Read every byte of checkpoints and compare the digests. What reads wrong is read again before it counts. "
        "Exit code 0: all valid; 74: something is damaged, or there is nothing to verify.",
        as_json=True,
    )
    verifying.add_argument("url", metavar="URL", help=_URL)
    which = verifying.add_mutually_exclusive_group()
    which.add_argument(
        "--all", dest="every", action="store_true", help="all committed checkpoints (the newest that is not quarantined)"
    )
    which.add_argument("--step", type=_at_least(0), metavar="N", help="the checkpoint of this step")
    verifying.add_argument("--threads", type=_at_least(1), default=4, metavar="N", help="files read at once (%(default)s)")

    comparing = _add(
        commands,
        "diff",
        act="diff.diff_checkpoints",
        summary="compare two checkpoints",
        details="Compare two checkpoints, whatever world sizes saved them; of a run, the newest valid one. Exit code 0: "
        "equal; 1: different.",
        as_json=True,
    )
    comparing.add_argument("a_url", metavar="A", help=_URL)
    comparing.add_argument("b_url", metavar="B", help="the same")
    comparing.add_argument(
        "--limit", type=_at_least(0), default=20, metavar="N", help="names shown of each kind (%(default)s); 0: all"
    )


def _add_changing(commands: "_Commands") -> None:
    pruning = _add(
        commands,
        "prune",
        act="prune.prune_checkpoints",
        summary="delete old checkpoints",
        details="Delete old checkpoints by the rules that a run itself follows. Every byte of the newest one is read "
        "before anything older goes; if it is not whole, nothing is deleted.",
    )
    pruning.add_argument("url", metavar="URL", help="folder of a run, or its folder checkpoints")
    pruning.add_argument(
        "--keep-last", type=_at_least(1), required=True, metavar="N", help="valid checkpoints that stay, the newest"
    )
    pruning.add_argument(
        "--keep-every", type=_at_least(0), default=0, metavar="M", help="those at multiples of M steps stay, too"
    )
    pruning.add_argument("--dry-run", action="store_true", help="only show what would go")
    pruning.add_argument("--yes", action="store_true", help="do not ask")

    exporting = _add(
        commands,
        "export",
        act="export.export_checkpoint",
        summary="write a checkpoint in another format",
        details="Write the newest valid checkpoint in a format that other tools read. Every byte is verified; one that is "
        "damaged is passed over. hf and safetensors need memory for one tensor, torch and dcp for all of them.",
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
    exporting.add_argument("--step", type=_at_least(0), metavar="N", help="the checkpoint of this step (the newest valid one)")
    exporting.add_argument(
        "--task",
        dest="task_target",
        metavar="CLASS",
        help="for hf: the class of the task, such as recipes.llama.LlamaTask; no module that a stored run names is imported",
    )
    exporting.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="element type of the model's weights (hf: bf16; others: as stored)"
    )

    signing = _add(
        commands,
        "sign",
        act="verify.sign_checkpoints",
        summary="sign checkpoints that are there already",
        details="Read every byte of the checkpoints of a run, compare the digests, and sign their manifests: whoever "
        "calls it vouches for what is there now. Exit code 0: all are signed; 74: something is damaged, or there "
        "is nothing to sign.",
    )
    signing.add_argument("url", metavar="URL", help=_URL)
    signing.add_argument("--step", type=_at_least(0), metavar="N", help="the checkpoint of this step (all)")


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, but is {text!r}")
        return int(text)

    return parse


if __name__ == "__main__":
    sys.exit(main())
