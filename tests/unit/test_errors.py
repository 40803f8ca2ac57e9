import inspect

import pytest

from elastictrain import errors
from elastictrain.errors import ConfigError, DataError, ElasticTrainError, Problem, StorageError

LEAVES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ElasticTrainError)]


def drawn_tree() -> dict[str, tuple[str | None, int]]:
    """The tree drawn in the module's docstring: name -> (parent, exit code)."""
    tree: dict[str, tuple[str | None, int]] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        words = line.replace("│", " ").replace("├──", "   ").replace("└──", "   ")
        fields = words.split()
        if len(fields) < 2 or not fields[0].endswith("Error") or not fields[1].isdecimal():
            continue
        depth = len(words) - len(words.lstrip())
        while path and path[-1][0] >= depth:
            path.pop()
        tree[fields[0]] = (path[-1][1] if path else None, int(fields[1]))
        path.append((depth, fields[0]))
    return tree


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    actual = {
        kind.__name__: (None if kind is ElasticTrainError else kind.__bases__[0].__name__, kind.exit_code) for kind in LEAVES
    }
    assert drawn_tree() == actual


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_every_error_shows_its_message_and_has_an_exit_code_of_sysexits(kind: type[ElasticTrainError]) -> None:
    error = kind("do this")
    assert str(error) == "do this"
    assert error.exit_code in (64, 69, 70, 71, 74, 75, 78)


STEPS, BATCH = Problem("train.steps", "must be >= 1, but is 0"), Problem("c", "must be 2")


@pytest.mark.parametrize(
    ("problems", "text"),
    [
        ([STEPS], "`train.steps` must be >= 1, but is 0"),
        ([STEPS, BATCH], "2 problems in the configuration:\n  - `train.steps` must be >= 1, but is 0\n  - `c` must be 2"),
    ],
)
@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_all_problems_are_kept_and_listed(kind: type[ConfigError], problems: list[Problem], text: str) -> None:
    error = kind(problems)
    assert (str(error), error.problems, error.exit_code) == (text, tuple(problems), errors.EXIT_CONFIG)


def test_a_text_has_no_problems() -> None:
    assert ConfigError("unreadable").problems == ()


def test_storage_errors_of_both_kinds_are_storage_errors() -> None:
    assert issubclass(errors.TransientStorageError, StorageError)
    assert not issubclass(errors.TransientStorageError, errors.PermanentStorageError)
