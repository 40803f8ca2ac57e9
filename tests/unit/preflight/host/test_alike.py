import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastictrain.bounded_json import encode_record, parse_record
from elastictrain.preflight.host import alike
from elastictrain.preflight.host.alike import NCCL_LOADED, SoftwareDigest, compare, describe, describe_devices, digest_code
from elastictrain.preflight.host.nvidia import parse_nvidia
from elastictrain.preflight.verdict import Status, Verdict
from elastictrain.surroundings import ToolOutput

A = SoftwareDigest(
    code={"elastictrain/train": "t1", "elastictrain/run.py": "r1", "my_task.py": "m1"},
    folders={"elastictrain": "/opt/app/elastictrain", "my_task": "/opt/app/my_task.py"},
    versions={"python": "3.11.7", "torch": "2.11.0+cu130", "numpy": "2.0.0"},
    config="c" * 64,
    checkouts=("elastictrain",),
)


def package(folder: Path) -> Path:
    for name, text in {
        "__init__.py": "",
        "run.py": "1",
        "train/a.py": "2",
        "train/deep/b.py": "3",
        "notes.txt": "no code",
    }.items():
        path = folder / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "pack"


def bad(verdicts: list[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.status is not Status.PASS]


def test_digest_has_a_part_for_each_module_and_folder(tmp_path: Path) -> None:
    digests = digest_code(package(tmp_path / "a"))
    assert digests is not None
    assert sorted(digests) == ["pack/__init__.py", "pack/run.py", "pack/train"]
    assert digest_code(package(tmp_path / "b")) == digests


@pytest.mark.parametrize("change", ["content", "name", "new", "moved"])
def test_digest_sees_every_change(tmp_path: Path, change: str) -> None:
    folder = package(tmp_path)
    before = digest_code(folder)
    assert before is not None
    deep = folder / "train" / "deep" / "b.py"
    if change == "content":
        deep.write_text("4")
    elif change == "name":
        deep.rename(deep.with_name("c.py"))
    elif change == "new":
        (folder / "train" / "z.py").write_text("")
    else:
        # The same bytes, divided otherwise between two files.
        (folder / "train" / "a.py").write_text("")
        deep.write_text("23")
    after = digest_code(folder)
    assert after is not None
    assert {part for part in before if before[part] != after.get(part)} == {"pack/train"}


def test_digest_leaves_out_what_is_no_code(tmp_path: Path) -> None:
    folder = package(tmp_path)
    before = digest_code(folder)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.py").write_text("compiled")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.py").write_text("hidden")
    (folder / "notes.txt").write_text("changed")
    assert digest_code(folder) == before


def test_package_that_is_too_large_or_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = package(tmp_path)
    (folder / "gone.py").symlink_to("nowhere")
    assert digest_code(folder) is None
    (folder / "gone.py").unlink()
    monkeypatch.setattr(alike, "_MOST_FILES", 3)
    assert digest_code(folder) is None


def test_describing_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_task_module.py").write_text("task = 1\n")
    (tmp_path / ".git").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    began = time.perf_counter()
    found = describe(("elastictrain", "own_task_module.build", "no_such_package", "__main__"), config="c")
    assert time.perf_counter() - began < 1.0
    assert "elastictrain/preflight" in found.code
    assert found.folders["own_task_module"] == str(tmp_path / "own_task_module.py")
    assert "own_task_module" in found.checkouts
    assert set(found.folders) == {"elastictrain", "own_task_module"}
    assert {"python", "torch", "numpy"} <= set(found.versions)
    assert parse_record(encode_record(found), SoftwareDigest) == found


def test_all_alike() -> None:
    verdicts = compare({"h1": A, "h2": A, "h3": A})
    assert [(verdict.subject, verdict.status) for verdict in verdicts] == [(host, Status.PASS) for host in ("h1", "h2", "h3")]


def test_other_code_on_one_host() -> None:
    other = replace(A, code={**A.code, "elastictrain/train": "t2"}, checkouts=())
    (verdict,) = bad(compare({"h1": other, "h2": A, "h3": A}))
    assert (verdict.subject, verdict.status) == ("h1", Status.FAIL)
    assert ("elastictrain/train" in str(verdict.measured), str(verdict.expected).split()[-1]) == (True, "h2")
    assert verdict.remedy.split("`")[1].split()[-2:] == ["h2:/opt/app/elastictrain/", "/opt/app/elastictrain/"]


def test_other_code_in_a_checkout_and_in_a_module() -> None:
    other = replace(A, code={**A.code, "elastictrain/run.py": "r2", "my_task.py": "m2"})
    (verdict,) = bad(compare({"h1": A, "h2": A, "h3": other}))
    assert verdict.remedy == (
        "on h3: `rsync -a --delete h1:/opt/app/elastictrain/ /opt/app/elastictrain/`, or `git -C /opt/app pull`; "
        "`rsync -a --delete h1:/opt/app/my_task.py /opt/app/my_task.py`"
    )


def test_package_that_one_host_lacks() -> None:
    lacking = replace(
        A, code={name: one for name, one in A.code.items() if name != "my_task.py"}, folders={"elastictrain": "/x"}
    )
    (verdict,) = bad(compare({"h1": A, "h2": lacking}))
    assert "install my_task" in verdict.remedy


def test_many_differences_are_counted() -> None:
    other = replace(A, code={f"elastictrain/{name}.py": "x" for name in "abcdefg"})
    (verdict,) = bad(compare({"h1": A, "h2": A, "h3": other}))
    assert str(verdict.measured).endswith("and 7 more")


def test_of_two_hosts_the_first_is_the_model() -> None:
    (verdict,) = bad(compare({"h1": A, "h2": replace(A, config="d" * 64)}))
    assert (verdict.subject, verdict.status) == ("h2", Status.FAIL)
    assert "c" * 12 in str(verdict.expected)
    assert "--cfg job" in verdict.remedy


def test_without_a_majority_all_follow_the_first() -> None:
    hosts = {f"h{number}": replace(A, config=f"{number}" * 64) for number in range(1, 4)}
    assert [verdict.subject for verdict in bad(compare(hosts))] == ["h2", "h3"]


def test_unknown_config_differs_from_nothing() -> None:
    assert bad(compare({"h1": A, "h2": replace(A, config="")})) == []


@pytest.mark.parametrize(
    ("versions", "status", "remedy"),
    [
        (
            {"torch": "2.13.0"},
            Status.FAIL,
            "pip install torch==2.11.0+cu130 --index-url https://download.pytorch.org/whl/cu130",
        ),
        ({"numpy": "1.26.0"}, Status.WARN, "pip install numpy==2.0.0"),
        ({"python": "3.11.9"}, Status.WARN, "use python 3.11.7 on h2"),
        ({"python": "3.12.7"}, Status.FAIL, "uv venv --python 3.11.7"),
        ({"nvidia-nccl-cu12": "2.27.3"}, Status.FAIL, "pip uninstall nvidia-nccl-cu12"),
    ],
)
def test_versions(versions: dict[str, str], status: Status, remedy: str) -> None:
    other = replace(A, versions={**A.versions, **versions})
    (verdict,) = bad(compare({"h1": A, "h2": other, "h3": A}))
    assert (verdict.subject, verdict.status) == ("h2", status)
    assert remedy in verdict.remedy


@pytest.mark.parametrize(
    ("ours", "theirs", "status", "measured"),
    [
        ({"NCCL_ALGO": "Tree"}, {"NCCL_ALGO": "Ring"}, Status.FAIL, "NCCL_ALGO Tree"),
        ({"NCCL_PROTO": "LL"}, {}, Status.FAIL, "NCCL_PROTO LL"),
        ({}, {"NCCL_IB_DISABLE": "1"}, Status.FAIL, "NCCL_IB_DISABLE not set"),
        ({"NCCL_IB_TIMEOUT": "22"}, {}, Status.WARN, "NCCL_IB_TIMEOUT 22"),
        ({}, {"GLOO_DEVICE_TRANSPORT": "TCP"}, Status.WARN, "GLOO_DEVICE_TRANSPORT not set"),
    ],
)
def test_settings(ours: dict[str, str], theirs: dict[str, str], status: Status, measured: str) -> None:
    usual = replace(A, settings=theirs)
    (verdict,) = bad(compare({"h1": usual, "h2": replace(A, settings=ours), "h3": usual}))
    assert (verdict.subject, verdict.status, verdict.measured) == ("h2", status, measured)


@pytest.mark.parametrize(
    "name", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_TOPO_FILE"]
)
def test_settings_that_name_something_of_a_host_may_differ(name: str) -> None:
    assert bad(compare({"h1": A, "h2": replace(A, settings={name: "x"})})) == []


DEVICES = {"driver": "570.86.15", "model": "NVIDIA H200", "power limit": "700.00 W", NCCL_LOADED: "2.28.9"}


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("driver", "550.54.15", Status.WARN),
        ("model", "NVIDIA H100 80GB HBM3", Status.WARN),
        ("power limit", "500.00 W", Status.WARN),
        (NCCL_LOADED, "2.27.3", Status.FAIL),
    ],
)
def test_devices(name: str, value: str, status: Status) -> None:
    usual, other = replace(A, devices=DEVICES), replace(A, devices={**DEVICES, name: value})
    (verdict,) = bad(compare({"h1": usual, "h2": other, "h3": usual}))
    assert (verdict.subject, verdict.status, verdict.measured) == ("h2", status, f"{name} {value}")
    # What is unknown of one host differs from nothing.
    unknown = {one: value for one, value in DEVICES.items() if one != name}
    assert bad(compare({"h1": usual, "h2": replace(A, devices=unknown), "h3": usual})) == []


class Nccl:
    def __init__(self, path: str, *, version: int) -> None:
        self.path, self.version = path, version

    def ncclGetVersion(self, number: Any) -> int:
        number._obj.value = self.version
        return 0


@pytest.mark.parametrize(("version", "text"), [(22809, "2.28.9"), (21005, "2.10.5"), (0, None)])
def test_the_nccl_that_is_loaded(version: int, text: str | None) -> None:
    asked = []

    def load(path: str) -> Any:
        asked.append(path)
        return Nccl(path, version=version)

    maps = "7f00-7f01 r--p 0 08:01 1 /lib/libc.so.6\n7f02-7f03 r-xp 0 08:01 2 /opt/other/libnccl.so.2.28.9\n"
    found = describe_devices(None, maps=maps, load=load)
    assert asked == ["/opt/other/libnccl.so.2.28.9"]
    assert found == ({NCCL_LOADED: text} if text else {})


def test_without_nccl_and_without_gpus_nothing_is_compared() -> None:
    def load(path: str) -> Any:
        raise OSError(path)

    assert describe_devices(None, maps="/lib/libc.so.6\n") == {}
    assert describe_devices(None, maps="/lib/libnccl.so.2\n", load=load) == {}


def test_the_gpus_of_a_host(answered: Callable[..., ToolOutput]) -> None:
    report = parse_nvidia(answered("nvidia_smi_570_h200.xml"))
    found = describe_devices(report, maps="")
    assert found == {
        "driver": report.driver,
        "model": "NVIDIA H200",
        "ECC": "Enabled",
        "MIG": "Disabled",
        "persistence": "Enabled",
        "power limit": "700.00 W",
    }
    low = replace(report.gpus[1], traits=(("power limit", "500.00 W"),))
    mixed = describe_devices(replace(report, gpus=(report.gpus[0], low)), maps="")
    assert mixed["power limit"] == "500.00 W, 700.00 W"


def test_a_thousand_hosts_are_compared_in_a_moment() -> None:
    large = replace(A, settings={f"NCCL_{number}": "1" for number in range(20)}, devices=DEVICES)
    hosts = {f"h{number}": large for number in range(1000)} | {"bad": replace(large, config="d" * 64)}
    began = time.perf_counter()
    assert [verdict.subject for verdict in bad(compare(hosts))] == ["bad"]
    # 0.1 s; each host with each other took 50.
    assert time.perf_counter() - began < 3


def test_nobody() -> None:
    assert compare({}) == []
