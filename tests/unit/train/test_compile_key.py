import dataclasses
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elastictrain.config.composed import RunConfig
from elastictrain.train.compile_key import KEY_DIGITS, cache_key, code_digest, device_facts, facts_of, host_facts, processor_of
from tests.unit.train.parts import Squares
from tests.unit.train.test_loop import config

CPU = torch.device("cpu")
PROCESSOR = """\
processor\t: 0
vendor_id\t: GenuineIntel
model\t\t: 207
model name\t: Xeon
cpu MHz\t\t: {mhz}
flags\t\t: {flags}

processor\t: 1
flags\t\t: none
"""


def with_group(plain: RunConfig, group: str, **keys: object) -> RunConfig:
    return dataclasses.replace(plain, **{group: dataclasses.replace(getattr(plain, group), **keys)})


def key_of(changed: RunConfig) -> str:
    return cache_key(facts_of(changed, task=Squares(), device=CPU))


def test_the_same_run_has_the_same_key() -> None:
    assert key_of(config(steps=5)) == key_of(config(steps=5))
    assert len(key_of(config(steps=5))) == KEY_DIGITS


@pytest.mark.parametrize(
    ("group", "keys"),
    [
        ("train", {"micro_batch": 3}),
        ("train", {"seq_len": 77}),
        ("train", {"precision": "bf16"}),
        ("train", {"fp8_scaling": "rowwise"}),
        ("train", {"compile": True}),
        ("train", {"activation_checkpointing": "selective"}),
        ("run", {"deterministic": True}),
        ("run", {"num_threads": 3}),
        ("parallel", {"kind": "fsdp"}),
        ("task", {"target": "other.Task"}),
        ("task", {"options": {"dim": 7}}),
    ],
)
def test_each_key_that_shapes_a_graph_counts(group: str, keys: dict[str, object]) -> None:
    plain = config(steps=5)
    assert key_of(with_group(plain, group, **keys)) != key_of(plain)


@pytest.mark.parametrize(
    ("group", "keys"),
    [
        ("run", {"dir": "elsewhere"}),
        ("run", {"seed": 7}),
        ("train", {"steps": 9}),
        ("train", {"global_batch": 16}),
        ("optim", {"lr": 1.0}),
    ],
)
def test_what_shapes_no_graph_does_not_count(group: str, keys: dict[str, object]) -> None:
    plain = config(steps=5)
    assert key_of(with_group(plain, group, **keys)) == key_of(plain)


def test_each_fact_of_the_host_counts(tmp_path: Path) -> None:
    processor, system = tmp_path / "cpuinfo", tmp_path / "os-release"
    processor.write_text(PROCESSOR.format(mhz=2000, flags="avx2"))
    system.write_text("ID=debian")
    facts = host_facts(processor, system)
    assert all(facts[name] for name in ("elastictrain", "torch", "python", "machine", "c_library", "system", "processor"))
    keys = {cache_key({**facts, name: f"{value} changed"}) for name, value in facts.items()}
    assert len(keys | {cache_key(facts)}) == len(facts) + 1
    processor.write_text(PROCESSOR.format(mhz=3000, flags="avx2"))
    assert host_facts(processor, system) == facts
    processor.write_text(PROCESSOR.format(mhz=3000, flags="avx2 avx512f"))
    assert host_facts(processor, system) != facts
    assert host_facts(tmp_path / "none", tmp_path / "none")["processor"] == ""


def test_the_features_of_the_first_processor_count() -> None:
    assert processor_of(PROCESSOR.format(mhz=1, flags="avx2")).splitlines()[-1] == "flags=avx2"
    assert "MHz" not in processor_of(PROCESSOR.format(mhz=1, flags="avx2"))


def gpu(name: str = "H200", major: int = 9, count: int = 132) -> Callable[[torch.device], object]:
    return lambda _: types.SimpleNamespace(name=name, major=major, minor=0, multi_processor_count=count)


def test_kinds_of_devices_differ_and_their_indices_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [device_facts(CPU)]
    for properties in (gpu(), gpu("H100"), gpu(major=10), gpu(count=66)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        found.append(device_facts(torch.device("cuda", 0)))
        assert device_facts(torch.device("cuda", 3)) == found[-1]
    assert len(set(found)) == 5


def module_at(path: Path) -> types.ModuleType:
    module = types.ModuleType("task")
    module.__file__ = str(path)
    return module


def test_the_code_of_the_task_counts_wherever_it_lies(tmp_path: Path) -> None:
    digests = []
    for folder in ("a", "b"):
        package = tmp_path / folder / "package"
        package.mkdir(parents=True)
        for name in ("__init__.py", "task.py", "model.py"):
            (package / name).write_text(name)
        digests.append(code_digest(module_at(package / "task.py")))
    assert digests[0] == digests[1] != ""
    (package / "model.py").write_text("other")
    assert code_digest(module_at(package / "task.py")) != digests[0]


def test_a_module_that_is_in_no_package_counts_alone(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("task")
    before = code_digest(module_at(tmp_path / "task.py"))
    (tmp_path / "other.py").write_text("other")
    assert code_digest(module_at(tmp_path / "task.py")) == before
    (tmp_path / "task.py").write_text("changed")
    assert code_digest(module_at(tmp_path / "task.py")) != before
    assert code_digest(types.ModuleType("without source")) == ""
    assert code_digest(None) == ""
