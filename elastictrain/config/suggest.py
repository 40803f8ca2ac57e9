"""Finds the key or choice that was probably meant."""

from collections.abc import Sequence
from difflib import get_close_matches


def suggest_choice(wrong: str, *, choices: Sequence[str]) -> str:
    """A "did you mean", to be added to a message, or nothing."""
    close = get_close_matches(wrong, choices, n=1, cutoff=0.65)
    return f"; did you mean {close[0]}?" if close else ""


def suggest_key(wrong: str, *, vocabulary: Sequence[str]) -> str:
    """The dotted key of `vocabulary` that was probably meant by the dotted key `wrong`, or "".

    The same name in another group comes first (`train.lr` for `optim.lr`), then a misspelling within the group, then whatever
    looks alike as a whole (`trian.steps`).
    """
    group, _, leaf = wrong.rpartition(".")
    if elsewhere := [key for key in vocabulary if key.rpartition(".")[2] == leaf]:
        return elsewhere[0]
    siblings = [key.rpartition(".")[2] for key in vocabulary if key.rpartition(".")[0] == group]
    if close := get_close_matches(leaf, siblings, n=1, cutoff=0.6):
        return f"{group}.{close[0]}" if group else close[0]
    close = get_close_matches(wrong, vocabulary, n=1, cutoff=0.85)
    return close[0] if close else ""
