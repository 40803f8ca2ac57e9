"""`python -m elastictrain.preflight speed`: how fast bytes go from one host to another, and back."""

import argparse
import secrets
import sys
import threading

from elastictrain.preflight.links.speedtest import PORT, Listener, Transfer, measure_speed, parse_size


def add_speed(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    speed = commands.add_parser(
        "speed",
        help="bandwidth between two hosts",
        description="Bandwidth between two hosts. Begin with --listen on one of them; it tells what to type on the other.",
    )
    side = speed.add_mutually_exclusive_group(required=True)
    side.add_argument("--listen", metavar="ADDRESS", help="an address of this host, to which the other one connects")
    side.add_argument("--to", metavar="HOST", help="the host that listens")
    speed.add_argument("--size", default="64M", metavar="SIZE", help="bytes each way, such as 64M or 10G (%(default)s)")
    speed.add_argument("--port", type=int, default=PORT, metavar="N", help="TCP port of the listener (%(default)s)")
    speed.add_argument("--token", metavar="TEXT", help="the same on both sides; made up by --listen")


def run_speed(parsed: argparse.Namespace) -> int:
    """Returns the exit code. Raises: UsageError; HostUnfitError; TransportError naming the address."""
    if parsed.listen:
        return _listen(parsed)
    size_bytes = parse_size(parsed.size)
    speeds = measure_speed(parsed.to, port=parsed.port, token=parsed.token or "", size_bytes=size_bytes)
    rows = (
        (f"to {parsed.to}", speeds.there),
        (f"from {parsed.to}", speeds.back),
        (f"to {parsed.to}, both ways at once", speeds.both_there),
        (f"from {parsed.to}, both ways at once", speeds.both_back),
    )
    sys.stdout.write("".join(f"{_row(what, transfer)}\n" for what, transfer in rows))
    return 0


def _listen(parsed: argparse.Namespace) -> int:
    token = parsed.token or secrets.token_hex(8)
    listener = Listener(parsed.listen, port=parsed.port, token=token)
    try:
        port = listener.start()
        command = (
            f"python -m elastictrain.preflight speed --to {parsed.listen} --port {port} --token {token} --size {parsed.size}"
        )
        sys.stdout.write(f"listening; on the other host type\n\n    {command}\n\nCtrl-C ends it.\n")
        sys.stdout.flush()
        threading.Event().wait()
    finally:
        listener.close()
    return 0


def _row(what: str, transfer: Transfer) -> str:
    return f"{what:<48} {transfer.gbps:8.2f} Gbit/s  ({transfer.num_bytes / 2**20:.0f} MiB in {transfer.seconds:.2f} s)"
