"""`python -m elastictrain.preflight`: what is wrong with this host, before a run finds out.

Alone it checks this host. Under torchrun it checks the hosts, the links between them and collectives, as a run does before
its first step. Exit code 0: nothing failed; 69: this host is unfit; 71: another host, a link or the group is; 78: all hosts
fail alike.
"""

import os
import re
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the imports exits with 130 and no traceback, as `run_command` does.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import logging
import secrets
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import get_args

from elastictrain.bounded_json import as_record
from elastictrain.config.composed import CheckpointGroup
from elastictrain.config.preflight import Mode, PreflightChecks, PreflightGroup
from elastictrain.entry_point import leave_process, run_command
from elastictrain.errors import EXIT_OK, UsageError
from elastictrain.identity import pods_without_workers
from elastictrain.preflight.host_checks import HostFacts, OwnChecks, check_host
from elastictrain.preflight.policy import Level, decide
from elastictrain.preflight.verdict import show
from elastictrain.surroundings import Surroundings

MEMORY_DIR = CheckpointGroup().memory_dir
_SPEED_PORT = 29477
_SIZE = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,16})?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
_MODES = get_args(Mode)


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_command(_parser(), arguments, _run)


def _run(parsed: argparse.Namespace) -> int:
    if parsed.command == "speed":
        return _run_speed(parsed)
    under_torchrun = "RANK" in os.environ
    if under_torchrun and pods_without_workers(os.environ):
        sys.stderr.write("elastictrain: RANK and WORLD_SIZE are the cluster's and not torchrun's: this host is checked alone\n")
        under_torchrun = False
    settings = PreflightGroup(
        checks=as_record(dict(parsed.check), PreflightChecks), ports=tuple(parsed.port), strict=parsed.strict
    )
    asked = OwnChecks(level=Level(parsed.level), settings=settings, run_dir=parsed.run_dir, memory_dir=parsed.memory_dir)
    if under_torchrun:
        from elastictrain.preflight.command import check_group

        return check_group(asked, as_json=parsed.json, table=parsed.table)
    if parsed.table:
        raise UsageError("--table needs several ranks: torchrun --nproc-per-node=gpu -m elastictrain.preflight --table")
    surroundings = Surroundings()
    verdicts = check_host(HostFacts(surroundings, replace(asked, transport=True)))
    show(verdicts, as_json=parsed.json)
    error = decide(verdicts, host=surroundings.host, hosts=[surroundings.host])
    return EXIT_OK if error is None else error.exit_code


def _run_speed(parsed: argparse.Namespace) -> int:
    """Returns the exit code. Raises: UsageError; HostUnfitError; TransportError naming the address."""
    size_bytes = parse_size(parsed.size)
    # After the errors of the command line: torch takes seconds.
    from elastictrain.preflight.group.speedtest import SpeedTest

    test = SpeedTest(parsed.listen or parsed.to, parsed.port, parsed.token or secrets.token_hex(8), parsed.device)

    def on_listening(port: int) -> None:
        command = f"python -m elastictrain.preflight speed --to {parsed.listen} --port {port} --token {test.token}"
        sys.stdout.write(f"listening; on the other host type\n\n    {command} --size {parsed.size}\n\n")
        sys.stdout.flush()

    num_bytes, times = test.run(None if parsed.listen else size_bytes, on_listening=on_listening)
    ways = [f"{'from' if parsed.listen else 'to'} {test.peer}", f"{'to' if parsed.listen else 'from'} {test.peer}"]
    for what, seconds in zip((*ways, "each way, both at once"), times, strict=True):
        rate = f"{8e-9 * num_bytes / seconds:8.2f} Gbit/s {1e-9 * num_bytes / seconds:8.2f} GB/s"
        sys.stdout.write(f"{what:<48} {rate}  ({num_bytes / 2**20:.0f} MiB in {seconds:.4f} s)\n")
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m elastictrain.preflight", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", choices=("quick", "full"), default="full", help="how much is checked (%(default)s)")
    parser.add_argument("--run-dir", metavar="URL", help="run.dir of the run: a path or any fsspec URL; it is written and read")
    parser.add_argument(
        "--memory-dir", metavar="DIR", default=MEMORY_DIR, help="checkpoint.memory_dir of the run (%(default)s)"
    )
    repeatable = partial(parser.add_argument, action="append", default=[])
    modes = f"what a failure of one check means: {', '.join(_MODES)}; may be given several times"
    repeatable("--check", metavar="NAME=MODE", type=_mode, help=modes)
    ports = "TCP port on which hosts must reach each other, under torchrun; may be given several times"
    port = partial(_number, within=range(1, 1 << 16), what="a port from 1 to 65535")
    repeatable("--port", metavar="N", type=port, help=ports)
    parser.add_argument("--strict", action="store_true", help="what else is only a warning fails, too")
    parser.add_argument("--json", action="store_true", help="for a script")
    parser.add_argument("--table", action="store_true", help="under torchrun: bandwidth by size, and between all pairs of GPUs")
    speed = parser.add_subparsers(dest="command", metavar="COMMAND").add_parser(
        "speed",
        help="bandwidth between two hosts",
        description="Bandwidth between two hosts, by NCCL between GPUs, else by gloo. Begin with --listen on one of them; it "
        "prints what to type on the other.",
    )
    side = speed.add_mutually_exclusive_group(required=True)
    side.add_argument("--listen", metavar="ADDRESS", help="an address of this host, to which the other one connects")
    side.add_argument("--to", metavar="HOST", help="the host that listens")
    speed.add_argument("--size", default="64M", metavar="SIZE", help="bytes each way, such as 64M or 10G (%(default)s)")
    speed.add_argument("--port", type=int, default=_SPEED_PORT, metavar="N", help="TCP port of the listener (%(default)s)")
    index = partial(_number, within=range(10_000), what="the index of a GPU")
    speed.add_argument("--device", type=index, default=0, metavar="N", help="GPU, if both sides have one (%(default)s)")
    speed.add_argument("--token", metavar="TEXT", help="the same on both sides; made up by --listen")
    return parser


def parse_size(text: str) -> int:
    """Bytes; units are powers of 1024: `64M` is 67108864. Raises: UsageError."""
    match = _SIZE.fullmatch(text.strip())
    num_bytes = int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if not 1 <= num_bytes <= 1 << 50:
        raise UsageError(f"a size must be 1 byte to 1024T, with K, M, G or T as in 64M or 10G, but is {text!r}")
    return num_bytes


def _mode(text: str) -> tuple[str, str]:
    name, _, mode = text.partition("=")
    names = [field.name for field in fields(PreflightChecks)]
    if name not in names:
        raise argparse.ArgumentTypeError(f"{name!r} is no check; there are {', '.join(names)}")
    if mode not in _MODES:
        raise argparse.ArgumentTypeError(f"the mode must be one of {', '.join(_MODES)}, but is {mode!r}")
    return name, mode


def _number(text: str, *, within: range, what: str) -> int:
    if not text.isdecimal() or int(text) not in within:
        raise argparse.ArgumentTypeError(f"must be {what}, but is {text!r}")
    return int(text)


if __name__ == "__main__":
    leave_process(main())
