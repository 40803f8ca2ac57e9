"""Hosts made up from recorded answers of tools and trees of files. Formats are real, values are not."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from elastictrain.surroundings import Surroundings, ToolOutput

HostMaker = Callable[[Mapping[str, str]], Surroundings]
RECORDED = Path(__file__).parent / "host" / "recorded"


class RecordedTools:
    """Answers by the beginning of the command line, the longest that fits; a tool that is not there answers None."""

    def __init__(self, answers: Mapping[str, ToolOutput]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def run(self, arguments: Sequence[str], *, limit_s: float) -> ToolOutput | None:
        assert limit_s > 0
        line = " ".join(arguments)
        self.asked.append(line)
        fitting = [start for start in self.answers if line.startswith(start)]
        return self.answers[max(fitting, key=len)] if fitting else None


@pytest.fixture
def recorded() -> Callable[[str], str]:
    """The text of a recording."""
    return lambda name: (RECORDED / name).read_text()


@pytest.fixture
def answered() -> Callable[..., ToolOutput]:
    """An answer from a recording."""

    def answer(name: str, *, returncode: int = 0, stderr: str = "") -> ToolOutput:
        return ToolOutput(returncode, (RECORDED / name).read_text(), stderr)

    return answer


@pytest.fixture
def host(tmp_path: Path) -> Callable[..., Surroundings]:
    """A host `h1` with files (below `/`), answers of tools and an environment."""

    def make(
        files: Mapping[str, str] | None = None,
        tools: Mapping[str, ToolOutput] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Surroundings:
        root = tmp_path / "root"
        root.mkdir(exist_ok=True)
        for name, text in (files or {}).items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        kept = {"XDG_STATE_HOME": str(tmp_path / "state")}
        return Surroundings(host="h1", root=root, environment=kept | (environment or {}), tools=RecordedTools(tools or {}))

    return make


@pytest.fixture
def make_host(host: Callable[..., Surroundings]) -> HostMaker:
    """The same, of files alone."""
    return host
