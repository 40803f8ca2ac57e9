"""Becomes, in forks, any Python program that a test starts: what each of them would import is imported here once.

One order a line of JSON comes in on standard input; who was started, and who has ended, goes out on standard output.
"""

import atexit
import builtins
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import tests.process.paced  # noqa: F401
from elastictrain.config import compose
from elastictrain.launch import fork_server
from recipes.llama import task as llama
from tests.composed import composed_once

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_MM, PR_SET_MM_ARG_END = 35, 9
POPEN = subprocess.Popen
REPLACED: list[object] = []
"""Modules that were imported anew; what they hold open must not be closed."""


def print_line(word: dict[str, Any]) -> None:
    """To the test."""
    os.write(1, json.dumps(word).encode() + b"\n")


def become(order: dict[str, Any]) -> None:
    """The program that is asked for, on its host and in its environment, folder and streams; an exception that leaves here ends
    it as usual."""
    for path in order["namespaces"]:
        with Path(path).open("rb") as namespace:
            if LIBC.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    if order["errors_log"]:
        sys.stderr.flush()
        opened = os.open(order["errors_log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(opened, 2)
        os.close(opened)
    else:
        os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    for category in order["errors"]:
        warnings.simplefilter("error", getattr(builtins, category))
    start_program(order["arguments"])


def start_program(arguments: list[str]) -> None:
    """`python ARGUMENTS`."""
    first, *rest = arguments
    subprocess.Popen = POPEN  # type: ignore[misc]
    if "torch.distributed.run" in arguments[:2]:
        subprocess_handler.Popen = Forked  # type: ignore[misc]
    elif "elastictrain.launch" in arguments[:2]:
        subprocess.Popen = ForkedServer  # type: ignore[misc]
    elif "scripts" in Path(first).parts:
        subprocess.Popen = ForkedProgram  # type: ignore[misc]
    sys.orig_argv = [sys.executable, *arguments]
    show_command_line(sys.orig_argv)
    tempfile.tempdir = None  # TMPDIR may be another one
    customize()
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


def customize() -> None:
    """What Python does at its start with a `sitecustomize` on the path; it may change our modules while they are imported."""
    for folder in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if folder not in sys.path:
            sys.path.insert(1, folder)
        if (Path(folder) / "sitecustomize.py").is_file():
            replaced = ("elastictrain", "recipes", "sitecustomize", "tests")
            for name in [name for name in sys.modules if name.partition(".")[0] in replaced]:
                REPLACED.append(sys.modules.pop(name))
            importlib.import_module("sitecustomize")
            if "torch.distributed.run" not in sys.orig_argv:
                importlib.import_module("elastictrain.config.compose").hydra_compose = compose.hydra_compose


def compose_ahead(arguments: list[str]) -> None:
    """Lets Hydra compose what it was not asked for before, so that no fork has to."""
    with suppress(Exception):
        own = compose.own_conf()
        if "--config-dir" not in arguments:
            compose.compose([word for word in arguments if "=" in word and (own / word.partition("=")[0]).is_dir()])


def show_command_line(words: list[str]) -> None:
    """In /proc, where others look for it; the host of forks has a long command line of its own to make room."""
    text = b"".join(word.encode() + b"\0" for word in words)
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    if len(text) > end - begin:
        raise RuntimeError(f"the command line must have at most {end - begin} bytes, but has {len(text)}")
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))
    # Only root may; otherwise there are empty words at its end.
    LIBC.prctl(PR_SET_MM, PR_SET_MM_ARG_END, begin + len(text), 0, 0)


class Forked(subprocess.Popen[bytes]):
    """A Python program that torchrun or a launcher starts: their child as ever, but a fork; a worker is named by its rank."""

    def _execute_child(self, *given: Any) -> None:
        # args, executable, preexec_fn, close_fds, pass_fds, cwd, env, ..., and the ends of pipes.
        command, cwd, environment, stdin, stdout, stderr, new_session = (given[place] for place in (0, 5, 6, 10, 13, 15, 21))
        environment = {**os.environ} if environment is None else environment
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            # Who reads what the child prints must not hold the other end.
            self._close_pipe_fds(*given[10:16])  # type: ignore[attr-defined]
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            if new_session or "RANK" in environment:
                os.setsid()
            for number in {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN if number in (signal.SIGPIPE, signal.SIGXFSZ) else signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for descriptor, opened in ((0, stdin), (1, stdout), (2, stderr)):
                if opened != -1:
                    os.dup2(opened, descriptor)
            # Locks on files, too. Nothing closes these numbers once more: the frames that use them never end.
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            atexit._clear()
            logging.root.handlers.clear()
            if "RANK" in environment:
                Path("/proc/self/comm").write_text(f"rank {environment['RANK']}")
            os.environ.clear()
            os.environ.update(environment)
            if cwd is not None:
                os.chdir(cwd)
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


class ForkedServer(Forked):
    """The fork server of a launcher; every other program is started."""

    def _forks(self, command: Any) -> bool:
        return "elastictrain.launch.fork_server" in command

    def _execute_child(self, *given: Any) -> None:
        if self._forks(given[0]):
            super()._execute_child(*given)
        else:
            super(Forked, self)._execute_child(*given)


class ForkedProgram(ForkedServer):
    """Launchers, workers and torchruns that a script of ours starts."""

    def _forks(self, command: Any) -> bool:
        return list(command[:2]) == [sys.executable, "-m"] and command[2].startswith(("elastictrain.", "torch.distributed.run"))


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
                order = dict(json.loads(line))
                compose_ahead(order["arguments"])
                child = os.fork()
                if child == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return order
                living.add(child)
                print_line({"started": child})
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    return None


# A fork has the thread that forked only: there must be no other.
fork_server.import_ahead()
for module in os.environ["AHEAD"].split():
    importlib.import_module(module)
compose.hydra_compose = composed_once(compose.hydra_compose)
llama._SHOWN_TOKENS = 10  # a twelfth of what each rank shows at the end
assert len(list(Path("/proc/self/task").iterdir())) == 1
gc.freeze()
if asked := serve():
    become(asked)
