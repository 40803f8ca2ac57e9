"""What identifies a run, and what may change at a restart."""

import re
import time
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from elastictrain.config.composed import (
    CheckpointGroup,
    DataGroup,
    FaultGroup,
    LaunchGroup,
    ParallelGroup,
    RunConfig,
    RunGroup,
    SourceGroup,
    TaskGroup,
    TelemetryGroup,
    TrainGroup,
)
from elastictrain.config.digest import (
    answer_keys,
    changed_answers,
    config_digest,
    from_yaml,
    group_digest,
    parse_stored_yaml,
    to_tree,
    to_yaml,
)
from elastictrain.config.optim import OptimGroup
from elastictrain.config.preflight import PreflightGroup
from elastictrain.config.schema import DATACLASSES
from elastictrain.errors import ConfigError
from tests.unit.examples import examples

CONFIG = RunConfig(
    run=RunGroup("runs/${x}"),
    task=TaskGroup("my.Task", {"rate": 0.5, "names": ["on", "1e-3"]}),
    model={"dim": 4, "rope": {"theta": 500000.0}},
    data=DataGroup(),
    train=TrainGroup(steps=10, global_batch=8, micro_batch=4),
    optim=OptimGroup(lr=1e-3, arguments={"momentum": 0.9}),
    parallel=ParallelGroup("fsdp"),
    checkpoint=CheckpointGroup(),
    fault=FaultGroup(),
    preflight=PreflightGroup(),
    telemetry=TelemetryGroup(progress="off"),
    launch=LaunchGroup(),
)

FREE = {
    "run": {"dir", "on_change", "on_held", "deterministic"},
    "data": {"cache_dir", "cache_gb", "workers", "prefetch", "ledger"},
    "train": {
        "micro_batch",
        "compile",
        "activation_checkpointing",
        "max_skipped",
        "eval_every_steps",
        "eval_samples",
        "stop_after_evals_without_gain",
    },
    "optim": set(),
}
"""Keys that may change at any restart; all of the other groups may."""


@pytest.mark.parametrize("group", DATACLASSES)
def test_it_is_decided_for_each_key_whether_it_changes_the_answer(group: str) -> None:
    names = {field.name for field in fields(DATACLASSES[group])}
    # Only a run in 8 bits has scales.
    config = replace(CONFIG, train=replace(CONFIG.train, precision="fp8"))
    answers = {key.split(".")[1] for key in answer_keys(to_tree(config)) if key.startswith(f"{group}.")}
    assert names - answers == FREE.get(group, names)


def test_all_of_task_and_model_changes_the_answer() -> None:
    answers = answer_keys(to_tree(CONFIG))
    assert answers["task._target_"] == "my.Task"
    assert answers["task.names"] == ["on", "1e-3"]
    assert answers["model.rope.theta"] == 500000.0


def test_a_config_that_was_stored_before_a_key_was_there_continues() -> None:
    stored = to_tree(CONFIG)
    for group, names in (("train", ("init_from", "ema", "fp8_scaling")), ("optim", ("_target_",))):
        stored[group] = {key: value for key, value in stored[group].items() if key not in names}  # type: ignore[attr-defined]
    assert changed_answers(stored, now=CONFIG) == []
    assert changed_answers(stored, now=replace(CONFIG, train=replace(CONFIG.train, ema=0.0))) == [("train.ema", None, 0.0)]


def test_a_run_that_changes_to_8_bits_is_told() -> None:
    in_8_bits = replace(CONFIG, train=replace(CONFIG.train, precision="fp8"))
    changed = changed_answers(to_tree(CONFIG), now=in_8_bits)
    assert ("train.precision", "fp32", "fp8") in changed
    assert ("train.precision", "fp8", "fp32") in changed_answers(to_tree(in_8_bits), now=CONFIG)


def test_with_a_constant_learning_rate_the_run_may_be_made_longer() -> None:
    constant = replace(CONFIG, optim=OptimGroup(schedule="constant"))
    longer = replace(constant, train=replace(CONFIG.train, steps=20))
    assert changed_answers(to_tree(constant), now=longer) == []
    assert changed_answers(to_tree(CONFIG), now=replace(CONFIG, train=longer.train)) == [("train.steps", 10, 20)]


def test_changed_answers_names_what_differs_and_nothing_else() -> None:
    now = replace(
        CONFIG,
        run=replace(CONFIG.run, seed=1, dir="elsewhere"),
        model={"dim": 4.0, "rope": {"theta": 500000.0, "factor": 8}},
        parallel=ParallelGroup("ddp"),
        train=replace(CONFIG.train, micro_batch=1),
    )
    stored = from_yaml(to_yaml(CONFIG), source="x")
    assert changed_answers(stored, now=now) == [("model.rope.factor", None, 8), ("run.seed", 0, 1)]


def test_a_run_of_a_release_without_a_key_goes_on() -> None:
    stored = from_yaml(to_yaml(CONFIG), source="x")
    for key in ("sources", "packing"):
        del stored["data"][key]  # type: ignore[attr-defined]
    assert changed_answers(stored, now=CONFIG) == []
    packed = replace(CONFIG, data=replace(CONFIG.data, packing=True))
    assert changed_answers(stored, now=packed) == [("data.packing", False, True)]


def test_a_stored_config_is_read_as_it_was_written() -> None:
    tree = from_yaml(to_yaml(CONFIG), source="x")
    assert tree == to_tree(CONFIG)


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "just text", "a: ${b}"])
def test_a_garbled_stored_config_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"s3://b/config\.yaml"):
        from_yaml(text, source="s3://b/config.yaml")


def test_the_digest_follows_every_key_but_not_their_order() -> None:
    digest = config_digest(CONFIG)
    assert len(digest) == 64
    assert config_digest(replace(CONFIG, model=dict(reversed(CONFIG.model.items())))) == digest
    assert config_digest(replace(CONFIG, telemetry=TelemetryGroup())) != digest
    assert config_digest(replace(CONFIG, model={**CONFIG.model, "dim": 5})) != digest


HOSTS_OWN = {"cache_dir": "elsewhere", "cache_gb": 7.0, "workers": 3, "prefetch": 9}


@pytest.mark.parametrize("key", [field.name for field in fields(DataGroup)])
def test_ranks_may_differ_in_what_is_their_hosts_own_business_and_in_nothing_else(key: str) -> None:
    others = {
        "path": "elsewhere",
        "packing": True,
        "sources": (SourceGroup("one"),),
        "holdout_samples": 3,
        "shuffle": False,
        "ledger": True,
    }
    other = replace(CONFIG, data=replace(CONFIG.data, **{key: (HOSTS_OWN | others)[key]}))
    assert other.data != CONFIG.data
    assert (group_digest(other, data_digest="d") == group_digest(CONFIG, data_digest="d")) == (key in HOSTS_OWN)


def test_ranks_must_not_differ_in_any_other_group_nor_in_their_data() -> None:
    digest = group_digest(CONFIG, data_digest="d")
    assert len(digest) == 64
    assert group_digest(CONFIG, data_digest="e") != digest
    assert group_digest(replace(CONFIG, run=replace(CONFIG.run, seed=1)), data_digest="d") != digest
    assert group_digest(replace(CONFIG, model={**CONFIG.model, "dim": 5}), data_digest="d") != digest
    assert group_digest(replace(CONFIG, checkpoint=CheckpointGroup(every_steps=1)), data_digest="d") != digest


def test_how_hosts_are_launched_concerns_neither_the_answer_nor_the_group() -> None:
    other = replace(CONFIG, launch=LaunchGroup(min_hosts=2, processes=3, address="10.0.0.1", lost_s=9.0))
    assert group_digest(other, data_digest="d") == group_digest(CONFIG, data_digest="d")
    assert answer_keys(to_tree(other)) == answer_keys(to_tree(CONFIG))


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
    "an interpolation of interpolations": "data: {path: '" + "${" * 300_000 + "'}",
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
