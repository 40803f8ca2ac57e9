"""Finds the key or choice that was probably meant."""

from collections.abc import Sequence
from difflib import get_close_matches


def suggest_choice(wrong: str, *, choices: Sequence[str]) -> str:
    """A "did you mean", to be added to a message, or nothing."""
    close = get_close_matches(wrong, choices, n=1, cutoff=0.65)
    return f"; did you mean {close[0]}?" if close else ""


def suggest_key(wrong: str, *, vocabulary: Sequence[str]) -> str:
    """The dotted key of `vocabulary` that was probably meant by the dotted key `wrong`, or "".

    Within a group that exists only its own keys are meant. A key without a group is that of the only group that has it, and the
    name of a group may be misspelt (`trian.steps`).
    """
    group, _, leaf = wrong.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in vocabulary if group and key.rpartition(".")[0] == group]
    if siblings:
        close = get_close_matches(leaf, siblings, n=1, cutoff=0.6)
        return f"{group}.{close[0]}" if close else ""
    elsewhere = {key for key in vocabulary if not group and key.rpartition(".")[2] == leaf}
    close = [*elsewhere] if len(elsewhere) == 1 else get_close_matches(wrong.lower(), vocabulary, n=1, cutoff=0.85)
    return close[0] if close else ""
