"""Becomes, in forks, any Python program that a test starts: what each of them would import is imported here once.

One order a line of JSON comes in on standard input; who was started, and who has ended, goes out on standard output.
"""

import atexit
import builtins
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import tests.process.paced  # noqa: F401


def print_line(word: dict[str, Any]) -> None:
    """To the test."""
    os.write(1, json.dumps(word).encode() + b"\n")


def become(order: dict[str, Any]) -> None:
    """The program that is asked for, in its environment, folder and streams; an exception that leaves here ends it as usual."""
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    for category in order["errors"]:
        warnings.simplefilter("error", getattr(builtins, category))
    if "torch.distributed.run" in order["arguments"][:2]:
        subprocess_handler.Popen = ForkedWorker  # type: ignore[misc]
    start_program(order["arguments"])


def start_program(arguments: list[str]) -> None:
    """`python ARGUMENTS`."""
    first, *rest = arguments
    sys.orig_argv = [sys.executable, *arguments]
    if first == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = rest
        # Imported for others; run as a program it begins anew, and runpy would warn of it.
        sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(first).parent)
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


class ForkedWorker(subprocess.Popen[bytes]):
    """A worker of torchrun: its child as ever and in a session of its own, but a fork, named by its rank."""

    def _execute_child(self, *given: Any) -> None:
        # args, executable, preexec_fn, close_fds, pass_fds, cwd, env, ..., and the ends of pipes.
        command, environment, stdout, stderr = given[0], given[6], given[13], given[15]
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            return
        code = 1
        try:
            os.setsid()
            for number in {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN if number in (signal.SIGPIPE, signal.SIGXFSZ) else signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for descriptor, opened in ((1, stdout), (2, stderr)):
                if opened != -1:
                    os.dup2(opened, descriptor)
            Path("/proc/self/comm").write_text(f"rank {environment['RANK']}")
            os.environ.clear()
            os.environ.update(environment)
            start_program([one for one in command[1:] if one != "-u"])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001  # the stack of the one that forked must not go on
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def serve() -> dict[str, Any] | None:
    """Starts and buries children until the test closes our input; returns in a child, with its order."""
    hear, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    living: set[int] = set()
    with selectors.DefaultSelector() as selector, hear, wake:
        selector.register(0, selectors.EVENT_READ)
        selector.register(hear, selectors.EVENT_READ)
        text = b""
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if hear.fileno() in ready:
                hear.recv(4096)
                while living and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    living.discard(ended[0])
                    print_line({"ended": ended[0], "code": os.waitstatus_to_exitcode(ended[1])})
            if 0 not in ready:
                continue
            piece = os.read(0, 1 << 20)
            if not piece:
                break
            *lines, text = (text + piece).split(b"\n")
            for line in lines:
                child = os.fork()
                if child == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return dict(json.loads(line))
                living.add(child)
                print_line({"started": child})
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    return None


# A fork has the thread that forked only: there must be no other.
assert len(list(Path("/proc/self/task").iterdir())) == 1
gc.freeze()
if asked := serve():
    become(asked)
