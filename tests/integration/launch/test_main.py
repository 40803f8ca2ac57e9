import errno
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import elastictrain.launch.__main__ as launching
from elastictrain.config.composed import RunConfig
from elastictrain.config.digest import from_yaml
from elastictrain.config.load import load
from elastictrain.errors import RunHeldError, TransientStorageError
from elastictrain.fault.stop import StopRequest
from elastictrain.launch.__main__ import main
from elastictrain.launch.cluster.place import ClusterPlace
from elastictrain.launch.locks import lock_run
from elastictrain.launch.membership.records import HostState
from elastictrain.launch.membership.store import MembershipStore

TINY = "recipe=llama_tiny"
RUN = [TINY, "preflight=off", "launch.notices=false", "run.dir=run"]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load(RUN, with_task=False)


@pytest.fixture
def loaded(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the configuration takes half a second each time."""
    monkeypatch.setattr(launching, "load", lambda arguments, with_task: config)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, another one for temporary files, and an environment without a cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    prefixes = ("SLURM", "PET_", "RUNAI", "KUBERNETES", "VAST", "CONTAINER_", "JOB_", "TORCHELASTIC")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
    for name in list(os.environ):
        if name.startswith(prefixes) or name in names:
            monkeypatch.delenv(name)


@dataclass
class Launch:
    """What would have been launched."""

    parts: list[SimpleNamespace] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    code: int = 0
    request: StopRequest | None = None
    error: Exception | None = None
    """Raised once."""


@pytest.fixture(autouse=True)
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """No process is started and no signal is listened to."""
    done = Launch()

    class WorkerGroup:
        def __init__(self, arguments: Sequence[str], *, server: object) -> None:
            assert server is None
            self.arguments = arguments

        def wait(self, limit_s: float) -> None:
            done.calls.append(f"wait {limit_s:g}")

        def wake(self) -> None:
            done.calls.append("wake")

        def prepare(self) -> None:
            done.calls.append("prepare")

        def close(self) -> None:
            done.calls.append("close")

    class Listener:
        @property
        def request(self) -> StopRequest | None:
            return done.request

        def __init__(self, *, notice_s: float) -> None:
            done.calls.append(f"notice {notice_s:g}")

        def start(self) -> None:
            done.calls.append("listen")

        def ask(self, reason: str, *, deadline: float | None = None) -> None:
            done.calls.append(f"ask {reason}")

    class Supervisor(SimpleNamespace):
        def __init__(self, **parts: object) -> None:
            super().__init__(**parts)
            done.parts.append(self)

        def run(self) -> int:
            done.calls.append(f"run {done.parts[0].folder.is_dir()}")
            error, done.error = done.error, None
            if error is not None:
                raise error
            return done.code

    monkeypatch.setattr(launching, "WorkerGroup", WorkerGroup)
    monkeypatch.setattr(launching, "StopListener", Listener)
    monkeypatch.setattr(launching, "Supervisor", Supervisor)
    yield done
    for parts in done.parts:
        parts.registry.close(limit_s=10.0)
        parts.heartbeat.close()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([TINY, "launch.min_host=2"], 78, ["`launch.min_host` is not a key; did you mean `launch.min_hosts`?"]),
        ([TINY, "launch.min_hosts=0"], 78, ["`launch.min_hosts` must be a whole number >= 1, but is 0"]),
        (
            [TINY, "launch.min_hosts=3", "launch.max_hosts=2", "train.steps=0"],
            78,
            ["2 problems", "`launch.max_hosts` must be >= `launch.min_hosts` = 3", "`train.steps`"],
        ),
        (["recipe=lama_tiny"], 78, ["`recipe` must be one of", "did you mean llama_tiny?"]),
        ([], 78, ["`recipe` is not chosen"]),
        ([TINY, "run.dir=nowhere://x"], 78, ["'nowhere://x' has the unknown protocol 'nowhere'"]),
        (["--hepl"], 64, ["unknown option --hepl; did you mean --help?"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_what_is_wrong_is_said_in_one_message(
    arguments: list[str], code: int, says: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, launch: Launch
) -> None:
    assert main([*arguments, "preflight=off"] if arguments[1:] else arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    for text in says:
        assert text in captured.err
    assert list(tmp_path.iterdir()) == []
    assert launch.parts == []


def test_an_environment_that_contradicts_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launch: Launch
) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "five")
    assert main(RUN) == 78
    error = capsys.readouterr().err
    assert "`PET_NODE_RANK`" in error
    assert "'five'" in error
    assert launch.calls == []


@pytest.mark.parametrize("arguments", [["--help"], ["--help", "launch"], [TINY, "--cfg", "job"]])
def test_questions_are_answered_and_nothing_is_done(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, launch: Launch
) -> None:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "min_hosts" in captured.out or "elastictrain.launch" in captured.out
    assert captured.err == ""
    assert list(tmp_path.iterdir()) == []
    assert launch.calls == []


def test_a_folder_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str], launch: Launch) -> None:
    (tmp_path / "file").write_text("I am no folder")
    assert main([*RUN[:-1], "run.dir=file/run"]) == 74
    error = capsys.readouterr().err
    assert "`run.dir` cannot" in error
    assert "file/run" in error
    assert "Traceback" not in error
    assert launch.parts == []
    assert launch.calls[-1] == "close"


def test_a_host_that_is_unfit_does_not_take_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, launch: Launch
) -> None:
    monkeypatch.setattr(launching, "why_unfit", lambda config, surroundings, processes: f"too small for {processes}")
    assert main([*RUN, "launch.processes=3"]) == 69
    assert "for 3" in capsys.readouterr().err
    assert launch.calls == ["notice 30", "listen", "prepare", "close"]
    assert not (tmp_path / "run").exists()


def test_what_is_put_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    place = ClusterPlace("plain", order=3, num_hosts=4, address="10.9.9.9", conclusions=("no cluster",), warnings=("alone",))
    monkeypatch.setattr(launching, "detect", lambda *_, **__: place)
    arguments = [*RUN, "launch.processes=2", "launch.address=10.1.2.3"]
    launch.code = 75
    assert main(arguments) == 75
    (parts,) = launch.parts
    assert launch.calls == ["notice 30", "listen", "prepare", "run True", "close"]
    assert not parts.folder.exists()
    assert parts.workers.arguments == tuple(arguments)
    # Between two turns it listens to its workers.
    parts.sleep(0.25)
    assert launch.calls.pop() == "wait 0.25"
    assert parts.expected_hosts == 4
    assert parts.stop_request() is None
    assert (parts.check_host(), parts.committed_step()) == ("", 0)
    me = parts.registry.record
    assert (me.address, me.processes, me.order, me.state, me.ended) == ("10.1.2.3", 2, 3, HostState.READY, 0)
    assert me.watch_port == parts.heartbeat.port
    assert 0 < me.master_port < 1 << 16
    assert re.fullmatch(r"[A-Za-z0-9.-]+-[0-9a-f]{8}", me.host)
    assert (tmp_path / "run/launch/token").stat().st_size >= 16
    assert [path.name for path in (tmp_path / "run/events").iterdir()] == [f"launcher-{me.host}.jsonl"]
    error = capsys.readouterr().err
    assert [part in error for part in ("no cluster", "warning: alone")] == [True, True]


@pytest.mark.usefixtures("loaded")
def test_two_launchers_of_one_host_are_two(launch: Launch) -> None:
    for _ in range(2):
        main(RUN)
    first, second = launch.parts
    assert first.registry.record.host != second.registry.record.host
    assert first.registry.record.watch_port != second.registry.record.watch_port


@pytest.mark.usefixtures("loaded")
def test_a_second_launcher_of_a_run_is_refused_while_the_first_one_lives(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, launch: Launch
) -> None:
    lock = lock_run(str(tmp_path / "run"))
    assert main(RUN) == 64
    error = capsys.readouterr().err
    assert "another run.dir" in error
    assert "Traceback" not in error
    assert launch.calls == []
    lock.close()
    assert main(RUN) == 0


@pytest.mark.usefixtures("loaded")
def test_where_another_run_was_faster_it_begins_anew_once_that_has_ended(launch: Launch) -> None:
    launch.error = RunHeldError("another run trains here")
    launch.code = 7
    assert main(RUN) == 7
    first, second = launch.parts
    assert first.registry.record.host != second.registry.record.host
    assert launch.calls == ["notice 30", "listen", "prepare", "run True", "run True", "close"]


@pytest.mark.usefixtures("loaded")
def test_whatever_ends_it_nothing_is_left_behind(launch: Launch) -> None:
    launch.error = TransientStorageError("away")
    assert main(RUN) == 74
    assert launch.calls[-1] == "close"
    assert not launch.parts[0].folder.exists()


@pytest.mark.usefixtures("loaded")
def test_a_host_without_room_for_temporary_files_is_unfit(
    monkeypatch: pytest.MonkeyPatch, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(prefix: str, dir: Path) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    assert main(RUN) == 69
    error = capsys.readouterr().err
    assert tempfile.gettempdir() in error
    assert os.strerror(errno.ENOSPC) in error
    # The next one may claim the run.
    lock_run("run").close()


def test_ctrl_c_before_anything_listens_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object, with_task: bool) -> RunConfig:
        raise KeyboardInterrupt

    monkeypatch.setattr(launching, "load", interrupted)
    assert main(RUN) == 75


@pytest.mark.usefixtures("loaded")
def test_ends_of_children_are_heard_of_whatever_the_parent_ignores() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        main(RUN)
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("loaded")
def test_a_task_beside_the_launcher_waits_for_it(monkeypatch: pytest.MonkeyPatch, launch: Launch) -> None:
    monkeypatch.setattr(launching, "detect", lambda *_, **__: ClusterPlace("slurm", role="idle", job="17"))
    monkeypatch.setattr(launching, "wait_for_launcher", lambda job: launch.calls.append(f"wait {job}") or 0)
    assert main(RUN) == 0
    assert launch.calls == ["wait 17"]


@pytest.mark.parametrize(
    ("error", "role", "code", "said"),
    [
        (None, "launcher", 0, ["begin", 0]),
        (RuntimeError("a bug"), "launcher", 70, ["begin", 70]),
        (TransientStorageError("away"), "launcher", 74, ["begin", 74]),
        (KeyboardInterrupt(), "launcher", 75, ["begin", 75]),
        # It prints nothing that is worth a process and a file of its own.
        (None, "idle", 0, []),
    ],
    ids=repr,
)
def test_the_file_of_what_is_printed_has_the_exit_code_however_the_launcher_ends(
    error: BaseException | None,
    role: Any,
    code: int,
    said: list[str | int],
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[str | int] = []
    log = SimpleNamespace(close=calls.append)

    def launched(*_: object) -> int:
        if error is not None:
            raise error
        return 0

    kept = replace(config, launch=replace(config.launch, log_dir="logs"))
    monkeypatch.setattr(launching, "load", lambda arguments, with_task: kept)
    monkeypatch.setattr(launching, "detect", lambda *_, **__: ClusterPlace("slurm", role=role, job="17"))
    monkeypatch.setattr(launching, "wait_for_launcher", lambda job: 0)
    monkeypatch.setattr(launching, "acquire_task_lock", lambda job, print_line: None)
    monkeypatch.setattr(launching, "HostLog", SimpleNamespace(begin=lambda folder, host: calls.append("begin") or log))
    monkeypatch.setattr(launching, "_launch", launched)
    assert main(RUN) == code
    assert calls == said
    assert ("Traceback" in capsys.readouterr().err) is (code == 70)


@pytest.mark.parametrize(
    ("backend", "given", "place", "gpus", "workers"),
    [
        ("auto", 0, 0, 0, 1),
        ("auto", 0, 0, 4, 4),
        ("auto", 0, 2, 4, 2),
        ("auto", 3, 2, 4, 3),
        ("gloo", 0, 0, 4, 1),
        ("gloo", 0, 2, 4, 2),
        ("gloo", 3, 2, 4, 3),
        ("nccl", 0, 0, 4, 4),
        ("gloo cuda", 0, 0, 4, 4),
        ("auto cpu", 0, 0, 4, 1),
    ],
)
def test_how_many_workers_a_host_has(
    backend: str,
    given: int,
    place: int,
    gpus: int,
    workers: int,
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    launch: Launch,
) -> None:
    backend, _, device = backend.partition(" ")
    parallel = replace(config.parallel, backend=cast(Any, backend), device=cast(Any, device or "auto"))
    options = replace(config.launch, processes=given)
    changed = replace(config, parallel=parallel, launch=options)
    monkeypatch.setattr(launching, "load", lambda arguments, with_task: changed)
    monkeypatch.setattr(launching, "count_gpus", lambda environment: gpus)
    monkeypatch.setattr(launching, "why_unfit", lambda config, surroundings, processes: "")
    monkeypatch.setattr(launching, "detect", lambda *_, **__: ClusterPlace("plain", processes=place))
    main(RUN)
    assert launch.parts[0].registry.record.processes == workers


def test_the_configuration_that_is_shown_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TINY, "launch.min_hosts=2", "--cfg", "job"]) == 0
    shown = from_yaml(capsys.readouterr().out, source="--cfg")
    assert shown["launch"]["min_hosts"] == 2


@pytest.mark.usefixtures("loaded")
def test_the_launcher_of_a_slurm_job_holds_its_turn_and_others_need_none(
    monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    monkeypatch.setattr(launching, "acquire_task_lock", lambda job, *, print_line: launch.calls.append(f"take {job}"))
    for kind in ("slurm", "plain"):
        monkeypatch.setattr(launching, "detect", lambda *_, kind=kind, **__: ClusterPlace(kind, job="17"))
        main(RUN)
    assert launch.calls[0] == "take 17"
    assert [call for call in launch.calls if call.startswith("take")] == ["take 17"]


@pytest.mark.usefixtures("loaded")
def test_who_has_seen_the_wrong_address_does_not_wait_until_storage_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launch: Launch
) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow(self: MembershipStore) -> bytes:
        asked.set()
        answer.wait(10)
        return b"late"

    def press() -> None:
        asked.wait(10)
        launch.request = StopRequest("SIGINT", 0.0)

    monkeypatch.setattr(MembershipStore, "token", slow)
    threading.Thread(target=press, daemon=True).start()
    assert main(RUN) == 75
    answer.set()
    assert "SIGINT" in capsys.readouterr().err
    assert launch.parts == []


@pytest.mark.usefixtures("loaded")
def test_what_storage_refuses_is_handed_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(self: MembershipStore) -> bytes:
        raise TransientStorageError("503")

    monkeypatch.setattr(MembershipStore, "token", refuse)
    assert main(RUN) == 74
    assert "503" in capsys.readouterr().err
