"""Every script in scripts/ runs, at a size of seconds."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import pytest
from torchruns import REPOSITORY, Run, environment
from warm import warm_host

from elastictrain.config.load import load

SCRIPTS = REPOSITORY / "scripts"
LIMIT_S = 240
SMALL = (
    "parallel.backend=gloo",
    "train=default",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_dim=64",
    "train.seq_len=32",
    "preflight=off",
)
Check = Callable[[Path], None]


def run(
    command: list[str | Path], *, folder: Path, extra_environment: Mapping[str, str] = {}, code: int = 0
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment({"TMPDIR": str(folder), **extra_environment}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == code, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def python(script: str, *arguments: str, folder: Path, world_size: int = 0, **variables: str) -> str:
    """What a script prints, under torchrun if there is a world; it, and what it starts of ours, are forks that have torch."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)] if world_size else []
    log, errors = folder / f"{time.monotonic_ns()}.out", folder / "errors"
    variables = environment({"TMPDIR": str(folder), **variables})
    command = [*launcher, str(SCRIPTS / script), *arguments]
    fork = Run(warm_host().start(command, environment=variables, log=log, cwd=folder, errors_log=errors), log)
    try:
        code = fork.wait(LIMIT_S)
    finally:
        fork.kill_tree()
    assert code == 0, f"{fork.output()[-3000:]}\n{errors.read_text()[-6000:]}"
    return fork.output()


def bench_step(folder: Path) -> None:
    arguments = ("recipe=llama_tiny", *SMALL, "train.micro_batch=4", f"checkpoint.memory_dir={folder}")
    variables = {"BENCH_STEPS": "2", "BENCH_BLOCKS": "2", "BENCH_LOSS": "logits"}  # the task's loss has `bench_peers`
    said = python("bench_step.py", *arguments, folder=folder, world_size=2, **variables)
    assert "with all logits\nspeed ratio ours / hand-written" in said
    assert not list(folder.glob("elastictrain-bench-*"))


def bench_peers(folder: Path) -> None:
    arguments = ("recipe=llama_tiny", *SMALL, "train.micro_batch=4", f"checkpoint.memory_dir={folder}")
    hook = os.pathsep.join([str(REPOSITORY / "tests" / "process" / "fp8_on_cpu"), str(REPOSITORY)])
    said = python("bench_peers.py", *arguments, folder=folder, STEPS="2", ROUNDS="1", PRECISIONS="fp8", PYTHONPATH=hook)
    assert [line.split("|")[1:3] for line in said.splitlines() if " fp8 " in line] == [
        [" ours ", " fp8 "],
        [" by hand ", " fp8 "],
    ]
    assert "failed" not in said
    assert "TorchTitan is left out" in said


def bench_compare(folder: Path) -> None:
    arguments = ("recipe=llama_tiny", *SMALL, "train.micro_batch=4", f"checkpoint.memory_dir={folder}")
    figures = {"BENCH_STEPS": "4", "BENCH_COMPARISONS": "3"}
    for world_size in (1, 2):
        said = python("bench_compare.py", *arguments, folder=folder, world_size=world_size, **figures)
        row = json.loads(said.splitlines()[-1])
        assert row["ranks"] == world_size
        assert min(row["step_ms"], row["compare_ms"], row["state_bytes"]) > 0


def bench_checkpoint(folder: Path) -> None:
    arguments = ("--model", "tiny", "--rounds", "1", "--disk", str(folder), "--json", str(folder / "rows.json"))
    python("bench_checkpoint.py", *arguments, *SMALL, f"checkpoint.memory_dir={folder}", folder=folder)
    rows = {row["method"]: row for row in json.loads((folder / "rows.json").read_text())["rows"]}
    ours = [row for name, row in rows.items() if name.startswith("ours")]
    assert [(row["rounds"], row["remark"]) for row in ours] == [(1, "")] * 4
    assert rows["dcp.save"]["rounds"] == 1


def bench_data(folder: Path) -> None:
    rows = folder / "rows.json"
    small = ("--ranks", "2", "--steps", "3", "--seq-len", "32", "--tokens-per-s", "3000", "--latency-ms", "2")
    python("bench_data.py", *small, "--sources", "mixture,remote", "--json", str(rows), folder=folder)
    found = {row["source"]: row for row in json.loads(rows.read_text())["rows"]}
    assert found.keys() == {"memory", "mixture", "remote"}
    assert all(row["steps"] == 3 and row["ratio"] > 0 for row in found.values())
    assert min(found[name]["feeds_tokens_per_s"] for name in ("mixture", "remote")) > 0


def bench_start(folder: Path) -> None:
    lines = python("bench_start.py", str(folder / "run"), "--objects", "5,200", folder=folder).splitlines()
    assert [line.split()[0] for line in lines] == ["5"] * 3 + ["200"] * 3
    # Two blocks of 64 starts became an object each.
    assert [line.split()[-4] for line in lines if "leaves" in line] == ["5", "74"]


def bench_fleet(folder: Path) -> None:
    assert len(python("bench_fleet.py", "--hosts", "4", "--seeds", "2", folder=folder).splitlines()) == 2


def bench_planning(folder: Path) -> None:
    rows = folder / "rows.json"
    python("bench_planning.py", "--ranks", "2", "--sharding", "fsdp", "--model", "tiny", "--json", str(rows), folder=folder)
    assert [row["ranks"] for row in json.loads(rows.read_text())] == [2]


def bench_recovery(folder: Path) -> None:
    rows, overrides = folder / "rows.json", (*SMALL, "train.micro_batch=4", "data.ledger=true")
    plan = ("--kills", "1", "--steps", "3", "--during", "build")
    kept = folder / "kept" / "here"
    said = python("bench_recovery.py", *plan, "--json", str(rows), "--keep", str(kept), "--", *overrides, folder=folder)
    assert {str(one.relative_to(kept)) for one in kept.glob("*/log.txt")} == {"disturbed/log.txt", "undisturbed/log.txt"}
    assert list(kept.glob("disturbed/run/events/*.jsonl"))
    assert max(map(len, said.splitlines())) <= 128
    figures = json.loads(rows.read_text())
    assert (figures["problems"], {one["strike"]["during"] for one in figures["kills"]}) == ([], {"", "build"})
    assert all(one["new_step_s"] > 0 for one in figures["kills"])
    assert figures["goodput"] > 0
    calm = ("--calm", "2.5", "--steps", "2", "--json", str(rows))
    python("bench_recovery.py", *calm, "--", *overrides, "checkpoint.every_steps=1", folder=folder)
    figures = json.loads(rows.read_text())
    assert figures["stalls_s"]["snapshots that are saved"]
    for intervals_s in figures["between_s"].values():
        assert {*intervals_s} == {"0", "1"}
        assert all(0 < median(one) < 5 for one in intervals_s.values())


def bench_save_interval(folder: Path) -> None:
    (folder / "trace").write_text("0,4\n3600,2\n5400,4\n9000,3\n20000,3\n")
    said = python("bench_save_interval.py", "trace", "--save", "5", "--draws", "1", folder=folder)
    assert len(said.splitlines()) == 3


def fuzz_run_folder(folder: Path) -> None:
    summary = json.loads(python("fuzz_run_folder.py", "--cases", "3", "--jobs", "1", folder=folder).splitlines()[-1])
    assert (summary["cases"], summary["failed"]) == (3, 0)


def gpu_preflight(folder: Path) -> None:
    assert "full again" in python("gpu/preflight.py", folder=folder, CUDA_VISIBLE_DEVICES="")


def gpu_engine(folder: Path) -> None:
    options = f"{' '.join(SMALL)} model=tiny train.micro_batch=2 checkpoint.memory_dir={folder}"
    figures = {"WORLD": "1", "TURNS": "1", "KILLS": "1", "SAVES": "1", "HOW": "launch"}
    said = python("gpu/engine.py", folder=folder, DISK=str(folder), EXTRA=options, **figures)
    told = [json.loads(line) for line in said.splitlines() if line.startswith('{"what"')]
    assert not any("error" in one for one in told), told
    whats = {"kill", "losses of repeated steps", "snapshots", "throughput", "safety", "persist", "restore from disk"}
    assert {one["what"] for one in told} == whats


def gpu_fp8(folder: Path) -> None:
    options = " ".join([*SMALL, "parallel=fsdp", "train.compile=false", f"checkpoint.memory_dir={folder}"])
    hook = os.pathsep.join([str(REPOSITORY / "tests" / "process" / "fp8_on_cpu"), str(REPOSITORY)])
    said = python("gpu/fp8.py", "loss", folder=folder, EXTRA=options, LOSS_STEPS="10", PYTHONPATH=hook)
    assert "again steps   10 to   10" in said


def stand_in(folder: Path, name: str, script: str = "") -> None:
    """A program that writes what it is asked to `NAME.txt`, one call a line, and goes on with `script`."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$*" >>"$NOTES/{name}.txt"\n{script}\n')
    (folder / name).chmod(0o755)


def noted(folder: Path, name: str) -> list[str]:
    """The calls since the last look."""
    file = folder / f"{name}.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def environment_of(folder: Path) -> dict[str, str]:
    """A virtual environment whose Python is this one and installs nothing; its other tools only take down what is asked."""
    tools = folder / "venv" / "bin"
    tools.mkdir(parents=True)
    stand_in(tools, "python", f'[[ "$1 $2" =~ ^-m\\ (pip|compileall|pytest)$ ]] || exec {sys.executable} "$@"')
    stand_in(tools, "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    for name in ("ruff", "mypy", "lint-imports"):
        stand_in(tools, name)
    return {"ELASTICTRAIN_VENV": str(folder / "venv"), "NOTES": str(folder)}


def setup(folder: Path) -> None:
    variables = environment_of(folder)
    for extras, wanted in ((["dev"], "[dev]"), (["dev"], ""), (["s3"], "[dev,s3]"), (["s3", "dev"], ""), ([], "")):
        run(["bash", SCRIPTS / "setup.sh", *extras], folder=folder, extra_environment=variables)
        installed = [line for line in noted(folder, "python") if line.startswith("-m pip install")]
        assert [line.endswith(f"-e {REPOSITORY}{wanted}") for line in installed] == ([True] if wanted else [])
    refused = run(
        ["bash", SCRIPTS / "setup.sh"], folder=folder, code=1, extra_environment={"ELASTICTRAIN_VENV": "none", "PYTHON": "/no"}
    )
    assert "PYTHON=/no must be an interpreter" in refused.stderr


def check_and_test(folder: Path) -> None:
    variables = environment_of(folder)
    run(["bash", SCRIPTS / "test.sh", "-k", "nothing"], folder=folder, extra_environment=variables)
    assert [line.split()[0] for line in noted(folder, "ruff")] == ["format", "check"]
    assert [len(noted(folder, name)) for name in ("mypy", "lint-imports")] == [1, 1]
    suites = [line.split()[2:] for line in noted(folder, "python") if line.startswith("-m pytest")]
    folders = [word for words in suites for word in words if word.startswith("tests/")]
    alone = [*(f"tests/network/test_{name}.py" for name in ("links", "preflight", "rendezvous"))]
    alone.append("tests/process/test_stragglers.py")
    assert folders == ["tests/unit", "tests/integration", "tests/process", "tests/network", *alone, "tests/gpu"]
    assert [word for words in suites for word in words if word.startswith("--ignore=")] == [f"--ignore={one}" for one in alone]
    assert all((REPOSITORY / name).exists() for name in folders)
    assert all(words[-2:] == ["-k", "nothing"] for words in suites)
    run(["bash", SCRIPTS / "check.sh"], folder=folder, extra_environment=variables)
    assert sum(line.startswith("-m pytest tests/unit") for line in noted(folder, "python")) == 1


def demo(folder: Path) -> None:
    variables = environment_of(folder)
    overrides = [*(one for one in SMALL if one != "train=default"), "train.steps=3", f"checkpoint.memory_dir={folder}"]
    for again in (False, True):
        command = ["bash", SCRIPTS / "demo.sh", f"run.dir={folder}/run", *overrides]
        said = run(command, folder=folder, extra_environment=variables).stdout
        assert "What happened" in said
        assert ("the run in" in said) == again
        # What is complete needs no second worker.
        stand_in(folder / "venv" / "bin", "torchrun", f'exec {sys.executable} "${{@:6}}"')
    twice = run(
        ["bash", SCRIPTS / "demo.sh", "train.steps=3", "train.steps=4"], folder=folder, extra_environment=variables, code=64
    )
    assert "given twice" in twice.stderr


def gpu_shells(folder: Path) -> None:
    """What they would start on a host with GPUs composes, and is there."""
    for name in ("python3", "torchrun"):
        stand_in(folder / "bin", name)
    variables = {"NOTES": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    run(["bash", SCRIPTS / "gpu" / "check.sh"], folder=folder, extra_environment=variables)
    lines = "train.activation_checkpointing=full\n\ntrain.compile=false\n"
    shell = ["bash", "-c", f'bash "{SCRIPTS}/gpu/variants.sh" <<<"$LINES"']
    run([*shell], folder=folder, extra_environment=variables | {"LINES": lines})
    (tests,) = noted(folder, "python3")
    assert (REPOSITORY / tests.split()[2]).is_dir()
    calls = [line.split() for line in noted(folder, "torchrun")]
    assert len(calls) >= 4
    for words in calls:
        script = words.index("scripts/bench_step.py")
        assert load(words[script + 1 :], with_task=False).parallel.kind == "fsdp"


def first_step(folder: Path) -> None:
    command = [sys.executable, SCRIPTS / "first_step.py", "--turns", "1", "--ways", "run", "--", "recipe=llama_tiny", *SMALL]
    said = run(command, folder=folder).stdout
    kinds = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [one.pop("kind") for one in kinds] == ["run, cold", "run, warm"]
    for one in kinds:
        assert abs(2 * one["wall"] - sum(one.values())) < 0.2, "a part of the start has no name"


def gpu_memory(folder: Path) -> None:
    arguments = ("--only", "1b, compiled", "--", "model=tiny", "train.seq_len=32")
    row = json.loads(python("gpu/memory.py", *arguments, folder=folder, CUDA_VISIBLE_DEVICES="").splitlines()[0])
    assert row["predicted_gb"] > 0


CHECKS: Mapping[str, Check] = {
    "bench_checkpoint.py": bench_checkpoint,
    "bench_compare.py": bench_compare,
    "bench_data.py": bench_data,
    "bench_fleet.py": bench_fleet,
    "bench_planning.py": bench_planning,
    "bench_recovery.py": bench_recovery,
    "bench_start.py": bench_start,
    "bench_step.py": bench_step,
    "demo.sh": demo,
    "first_step.py": first_step,
    "fuzz_run_folder.py": fuzz_run_folder,
    "bench_peers.py": bench_peers,
    "gpu/engine.py": gpu_engine,
    "gpu/memory.py": gpu_memory,
    "gpu/fp8.py": gpu_fp8,
    "gpu/preflight.py": gpu_preflight,
    "gpu/variants.sh": gpu_shells,
    "setup.sh": setup,
    "bench_save_interval.py": bench_save_interval,
    "test.sh": check_and_test,
}
ELSEWHERE = {
    "check.sh": "test.sh",
    "checkpoint_methods.py": "bench_checkpoint.py",
    "fault_list.py": "tests/network/test_faults.py",
    "faults.py": "tests/network/test_faults.py",
    "fuzz_mutations.py": "fuzz_run_folder.py",
    "gpu/check.sh": "gpu/variants.sh",
    "recovery_calm.py": "bench_recovery.py",
    "recovery_report.py": "bench_recovery.py",
    "recovery_run.py": "bench_recovery.py",
    **{f"cluster/{path.name}": "tests/integration/launch/test_templates.py" for path in (SCRIPTS / "cluster").iterdir()},
}
"""Scripts that another one's test runs, or a test in another file."""


@pytest.mark.parametrize("name", CHECKS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    CHECKS[name](tmp_path)


def test_every_script_is_run() -> None:
    files = {str(path.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert files == {*CHECKS, *ELSEWHERE}
    assert all(where in CHECKS or (REPOSITORY / where).is_file() for where in ELSEWHERE.values())


@pytest.mark.parametrize(
    "script", sorted(SCRIPTS.rglob("*.sh")) + sorted(SCRIPTS.rglob("*.sbatch")), ids=lambda path: path.name
)
def test_the_shell_reads_it(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", str(script)], check=True, timeout=60)
