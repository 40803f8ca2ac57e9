"""Starts that must be refused, without paying for the import of torch each time."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchruns import TINY, environment, last_wins

START = (*TINY, "train.steps=3", "train.eval_every_steps=0")


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a start ended."""

    code: int
    output: str
    seconds: float

    def check(self, code: int, *messages: str) -> None:
        """One message on the terminal, with these texts, this exit code, and no stack."""
        assert self.code == code, self.output
        assert self.output.count("elastictrain: ") == 1, self.output
        assert "Traceback" not in self.output
        for message in messages:
            assert message in self.output, self.output


@dataclass(frozen=True, slots=True)
class RefusingHost:
    """The process whose forks are started."""

    process: "subprocess.Popen[str]"

    def start(
        self,
        *arguments: str,
        folder: Path,
        extra_environment: Mapping[str, str] = {},
        path: Sequence[Path] = (),
        patience_s: float = 0.0,
    ) -> Refusal:
        """`python -m elastictrain.run ARGUMENTS`; `path` comes first on its import path, `patience_s` replaces the time for
        which a store tries again."""
        log = folder / "refusal.txt"
        case = {
            "arguments": last_wins([*START, f"run.dir={folder}/run", *arguments]),
            "environment": dict(extra_environment),
            "path": list(map(str, path)),
            "patience_s": patience_s,
            "log": str(log),
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        result = json.loads(self.process.stdout.readline())
        return Refusal(result["code"], log.read_text(errors="replace"), result["seconds"])


@contextmanager
def running_host() -> Iterator[RefusingHost]:
    """Ends with the block."""
    command = [sys.executable, str(Path(__file__).with_name("refusing_host.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            yield RefusingHost(process)
        finally:
            process.kill()


def files_in(folder: Path) -> list[str]:
    """Every file below a folder."""
    return [f"{at}/{name}" for at, _, names in os.walk(folder) for name in names]
