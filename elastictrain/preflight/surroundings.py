"""What checks of a host look at: files of the kernel, tools of vendors. Handed in, so that a test can make a host up."""

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a tool printed, and how it ended. `timed_out`: it was killed, and `returncode` means nothing."""

    returncode: int
    stdout: str
    stderr: str
    timed_out: bool = False


class Tools(Protocol):
    """Runs other people's programs."""

    def run(self, arguments: Sequence[str], *, limit_s: float) -> ToolOutput | None:
        """None if there is no such program. Never raises for what the program does."""


class SystemTools:
    """Those of this host."""

    def run(self, arguments: Sequence[str], *, limit_s: float) -> ToolOutput | None:
        program = shutil.which(arguments[0])
        if program is None:
            return None
        try:
            # Their words are parsed, so they must not be translated.
            done = subprocess.run(  # noqa: S603
                [program, *arguments[1:]],
                capture_output=True,
                timeout=limit_s,
                check=False,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "LC_ALL": "C"},
                # What asks this process to stop may be sent to its group, and is not for the tool.
                process_group=0,
            )
        except subprocess.TimeoutExpired:
            return ToolOutput(-1, "", "", timed_out=True)
        except OSError as error:
            return ToolOutput(-1, "", str(error))
        return ToolOutput(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """This host, as checks see it. `root` stands for `/`: below it are `sys`, `proc` and `etc`."""

    host: str = field(default_factory=socket.gethostname)
    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    tools: Tools = field(default_factory=SystemTools)

    def read(self, path: str) -> str | None:
        """The text of a file below `root`, stripped; None if it cannot be read, for whatever reason."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """What is in a folder below `root`, sorted; nothing if it cannot be read."""
        try:
            return sorted(entry.name for entry in (self.root / path.lstrip("/")).iterdir())
        except OSError:
            return []
