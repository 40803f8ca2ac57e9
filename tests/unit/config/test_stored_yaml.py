"""A stored configuration is data, whoever wrote it."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from elastictrain.config.digest import from_yaml, parse_stored_yaml
from elastictrain.errors import ConfigError
from tests.unit.examples import examples

SECRET = "the-secret-value"

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{one}: &{one} [{','.join([f'*{before}'] * 9)}]\n" for before, one in zip("abcdefgh", "bcdefghi", strict=True)
)

HOSTILE = {
    "an interpolation": "data: {path: '${oc.env:SECRET_FOR_THIS_TEST}'}",
    "an interpolation inside a text": "data: {path: 'x-${oc.env:SECRET_FOR_THIS_TEST}-y'}",
    "an interpolation in a list": "data: {path: ['${data.other}']}",
    "an alias bomb": BOMB,
    "one alias": "data: {path: &p x, cache_dir: *p}",
    "one anchor": "data: {path: &p x}",
    "a tag": "data: !!python/object/apply:os.system ['true']",
    "a harmless tag": "data: {path: !!str x}",
    "a binary": "data: {path: !!binary aGk=}",
    "brackets": "data: " + "[" * 200_000,
    "braces": "data: " + "{a: " * 200_000,
    "blocks": "data:\n" + "".join(" " * depth + "a:\n" for depth in range(1, 400)),
    "a number of 5,000 digits": "run: {seed: " + "9" * 5_000 + "}",
    "a number of 100 digits": "run: {seed: " + "9" * 100 + "}",
    "a sum of sixties": "run: {seed: " + ":".join(["1"] + ["59"] * 60) + "}",
    "no number": "optim: {lr: .nan}",
    "an endless number": "optim: {lr: -.inf}",
    "a number that is too large": "optim: {lr: 1e999}",
    "a key twice": "run: {seed: 1, seed: 2}",
    "a group twice": "run: {seed: 1}\nrun: {seed: 2}",
    "a key that is a list": "run: {? [1] : 2}",
    "two documents": "run: {seed: 1}\n---\nrun: {seed: 2}",
    "too large": "run: {seed: 1}\n#" + "x" * (1 << 20),
    "no text": b"\xff\xfe\x00\x01",
    "a zero byte": "run: {seed: \x00}",
    "no groups": "run: 3",
    "nothing": "",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_every_one_is_a_named_refusal(text: str | bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_FOR_THIS_TEST", SECRET)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"s3://b/config\.yaml") as caught:
        from_yaml(text, source="s3://b/config.yaml")
    assert SECRET not in str(caught.value)
    assert time.monotonic() - began < 10.0


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8) | st.sampled_from(
    ["1", "1e-3", "on", "null", "~", "2020-01-01", "1:30", "<<", "=", "${x}", "a${x.y}", "*a", "&a", "!t", "- x", "a: b", "#"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def escaped(value: object) -> object:
    if isinstance(value, dict):
        return {name: escaped(one) for name, one in value.items()}
    if isinstance(value, list):
        return [escaped(one) for one in value]
    # A backslash before an escaped brace is escaped, too.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


@settings(max_examples=examples(200))
@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_what_omegaconf_writes_is_read_as_it_was(tree: dict[str, object]) -> None:
    """The writer of a run's config.yaml."""
    assert parse_stored_yaml(OmegaConf.to_yaml(escaped(tree))) == tree


@settings(max_examples=examples(200))
@given(st.text(max_size=30) | st.binary(max_size=30))
def test_anything_is_a_value_or_a_refusal(text: str | bytes) -> None:
    try:
        parse_stored_yaml(text)
    except ValueError as error:
        assert type(error) is ValueError  # noqa: PT017
