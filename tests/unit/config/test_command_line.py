"""Taking a command line apart."""

import pytest

from elastictrain.config.command_line import CommandLine, read_command_line
from elastictrain.errors import EXIT_USAGE, UsageError


def test_overrides_options_and_folders() -> None:
    line = read_command_line(["recipe=a", "--config-dir", "x", "~b", "--config-dir=y", "+c=1", "--cfg", "job"])
    assert line == CommandLine(("recipe=a", "~b", "+c=1"), ("x", "y"), "show", "")


def test_help_takes_a_topic_but_no_override() -> None:
    assert read_command_line(["--help", "train"]).topic == "train"
    line = read_command_line(["-h", "recipe=a"])
    assert (line.action, line.topic, line.overrides) == ("help", "", ("recipe=a",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hepl"], "did you mean --help"),
        (["--data.path=x"], "without dashes, data.path=x"),
        (["--config-dir"], "--config-dir needs a value"),
        (["--cfg", "hydra"], "--cfg must be job, but is hydra"),
        (["--one", "--two"], "unknown option --one; unknown option --two"),
        (["--multirun"], "--multirun is not offered: one command is one run"),
        (["-cn", "x"], "-cn is not offered: a run is chosen by recipe=NAME"),
        (["--info"], "--info is not offered: --cfg job"),
    ],
)
def test_usage_errors(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_command_line(arguments)
    assert caught.value.exit_code == EXIT_USAGE
