"""`prepare`, killed at any point and started again, yields the same bytes."""

import json
import os
import random
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import psutil
import pytest


def command(source: Path | str, out: Path | str, *options: str) -> list[str]:
    program = [sys.executable, "-m", "elastictrain.data", "prepare"]
    return [*program, str(source), "--out", str(out), "--shard-tokens", "20000", *options]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    dice = random.Random(5)
    for number in range(30):
        words = (dice.choice(("one", "two", "three", "wörter\n")) for _ in range(dice.randrange(20_000)))
        (folder / f"{number:02d}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="module")
def lines(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    texts = [file.read_text() for file in sorted(source.iterdir())]
    for number in range(2):
        pieces = [text[begin : begin + 3000] for text in texts[number::2] for begin in range(0, len(text), 3000)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"body": piece}) + "\n" for piece in pieces))
    return folder


@pytest.mark.parametrize("options", [(), ("--field", "body", "--workers", "2")], ids=["text", "lines"])
def test_killed_at_random_points(source: Path, lines: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    given = lines if options else source
    started = time.monotonic()
    subprocess.run(command(given, tmp_path / "whole", *options), check=True, capture_output=True, env=environment())
    duration_s = time.monotonic() - started
    whole = contents(tmp_path / "whole")
    assert len(whole) > 50
    if options:
        # As many processes as one likes: the files are the same.
        subprocess.run(command(given, tmp_path / "alone", *options[:2]), check=True, capture_output=True, env=environment())
        assert contents(tmp_path / "alone") == whole
    dice = random.Random(1)
    unfinished = 0
    for attempt in range(2):
        out = tmp_path / f"out-{attempt}"
        for _ in range(3):
            process = subprocess.Popen(
                command(given, out, *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
            )
            time.sleep(dice.uniform(0.2, 1.0) * duration_s)
            process.kill()
            unfinished += process.wait() != 0 and out.exists() and not (out / "index.json").exists()
        subprocess.run(command(given, out, *options), check=True, capture_output=True, env=environment())
        assert contents(out) == whole
    assert unfinished


def test_no_process_outlives_the_command(lines: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(lines, tmp_path / "out", "--field", "body", "--workers", "2"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    family: list[psutil.Process] = []
    for _ in range(1000):
        family = psutil.Process(process.pid).children(recursive=True)
        if (tmp_path / "out/tokens-00000.bin").exists():
            break
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert len(family) >= 2
    assert not psutil.wait_procs(family, timeout=20)[1]


def test_a_worker_that_is_killed_is_named(lines: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(lines, tmp_path / "out", "--field", "body", "--workers", "2"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    for _ in range(1000):
        workers = [one for one in psutil.Process(process.pid).children() if "spawn_main" in " ".join(one.cmdline())]
        if len(workers) == 2:
            break
        time.sleep(0.01)
    workers[0].kill()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 70
    assert error.count("\n") == 1
    assert "--workers" in error


class _Whole(BaseHTTPRequestHandler):
    """A web server that ignores ranges, as that of the standard library does."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_HEAD(self) -> None:
        self.send_response(200 if self.path in self.files else 404)
        self.send_header("Content-Length", str(len(self.files.get(self.path, b""))))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.files.get(self.path, b""))

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_from_the_web(lines: Path, tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Whole)
    _Whole.files = {f"/{file.name}": file.read_bytes() for file in lines.iterdir()}
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        arguments = command(f"{url}/0.jsonl", tmp_path / "web", "--field", "body")
        arguments.insert(5, f"{url}/1.jsonl")
        subprocess.run(arguments, check=True, capture_output=True, env=environment())
        subprocess.run(command(lines, tmp_path / "disk", "--field", "body"), check=True, capture_output=True, env=environment())
        names = [name for name in contents(tmp_path / "disk") if name != "prepare.json"]
        assert {name: contents(tmp_path / "web")[name] for name in names} == {
            name: contents(tmp_path / "disk")[name] for name in names
        }
        missing = subprocess.run(
            command(f"{url}/2.jsonl", tmp_path / "none"), capture_output=True, text=True, env=environment(), check=False
        )
        assert missing.returncode == 78
        assert missing.stderr.count("\n") == 1
    finally:
        server.shutdown()
        server.server_close()


def test_what_datasets_saves_and_its_parquet_hold_the_same(lines: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for file in sorted(lines.iterdir()) for line in file.read_text().splitlines()]
    dataset = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": dataset, "test": dataset.select(range(3))}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "hub/data").mkdir(parents=True)
    dataset.to_parquet(str(tmp_path / "hub/data/train-00000-of-00001.parquet"))
    dataset.select(range(3)).to_parquet(str(tmp_path / "hub/data/test-00000-of-00001.parquet"))
    found = []
    for given in (tmp_path / "saved", tmp_path / "hub", lines):
        split = () if given == lines else ("--split", "train")
        out = tmp_path / f"out-{given.name}"
        subprocess.run(command(given, out, "--field", "body", *split), check=True, capture_output=True, env=environment())
        found.append({name: data for name, data in contents(out).items() if name != "prepare.json"})
    assert found[0] == found[1] == found[2]


def test_two_at_once_on_one_folder(source: Path, tmp_path: Path) -> None:
    both = [subprocess.Popen(command(source, tmp_path / "out"), stdout=subprocess.DEVNULL, env=environment()) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    subprocess.run(command(source, tmp_path / "whole"), check=True, capture_output=True, env=environment())
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_ends_with_one_line_and_no_traceback(tmp_path: Path) -> None:
    result = subprocess.run(
        command(tmp_path / "missing", "out"), capture_output=True, text=True, env=environment(), check=False
    )
    assert result.returncode == 78
    assert result.stderr.startswith("elastictrain: input ")
    assert result.stderr.count("\n") == 1
