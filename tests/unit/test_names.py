"""Names are the field's words: a class name exists once, and the words of an earlier vocabulary do not come back."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.unit.sources import nodes

PACKAGE = Path(__file__).parents[2] / "elastictrain"

CLASSES = """
    Aftermath Answer Asked Beat Blame Board Broken Built Claim Desk Entry Flush Incarnation KeptObjects Keeper Lane Lookout
    Likeness LoopParts Mark Met Offer Outpost Outstanding Parts Past Patience Pets Pins Reach Recall Recalled Refusals
    Registry Rest SavingParts Seat Seen Sentence Silence Standing Started Station Together View Walk Watcher Way
    Whereabouts Word
""".split()  # noqa: SIM905

FUNCTIONS_AND_FIELDS = """
    accuse buddy_of bury carried deserted fall fallen fleeting form gather_no_more hear hurry knock last_words mute
    needs_settled no_stacks_any_more off_line on_line owes predecessors put_off say second_look see settled side_by_side
    speaker speaks tell_others votes wards_of
""".split()  # noqa: SIM905

FILES = ["guilty", "kept", "meaning", "meeting", "pets", "predecessors", "sight", "sole", "turns", "words"]


NAMING = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.arg, ast.AnnAssign)


def _definitions() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, NAMING):
                yield path, node


def _name(node: ast.AST) -> str:
    """The name that this node introduces; empty if none."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name.lstrip("_")
        case ast.arg(arg=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return name.lstrip("_")
        case _:
            return ""


def test_a_class_name_exists_once() -> None:
    names = Counter(node.name for _, node in _definitions() if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_class_has_a_name_of_the_earlier_vocabulary() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path, node in _definitions()
        if isinstance(node, ast.ClassDef) and node.name in CLASSES
    ]
    assert found == []


def test_no_function_parameter_or_field_has_one() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {_name(node)}" for path, node in _definitions() if _name(node) in FUNCTIONS_AND_FIELDS
    }
    assert sorted(found) == []


def test_no_file_has_one() -> None:
    assert [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.stem in FILES] == []
