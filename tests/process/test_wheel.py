"""The installed wheel brings conf/ and recipes/ along: a run composes in an empty folder, far from the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_TIMEOUT_S = 180
START_TIMEOUT_S = 60


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr


def _copied(source: Path) -> Path:
    """A copy to build from: the build leaves build/ and *.egg-info beside its sources, and a stale build/ gets in the wheel."""
    source.mkdir(exist_ok=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("conf", "elastictrain", "recipes"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return source


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, built = _copied(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel")
    # With setuptools from the dev extra: an isolated build would download it.
    _pip("wheel", str(source), "--wheel-dir", str(built), "--no-build-isolation")
    (path,) = built.glob("elastictrain-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    _pip("install", "--target", str(target), str(wheel))
    return target


def _run(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )


def test_the_wheel_holds_every_config_and_every_recipe_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"elastictrain/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    recipes = {
        f"elastictrain/{path.relative_to(ROOT)}" for suffix in ("py", "md") for path in (ROOT / "recipes").rglob(f"*.{suffix}")
    }
    assert configs
    assert configs <= names
    assert recipes <= names
    assert "elastictrain/report/page.css" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"elastictrain"}


def test_a_run_composes_from_the_wheel_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = _run(installed, tmp_path, "elastictrain.run", "--cfg", "job", "recipe=llama_tiny")
    assert done.returncode == 0, done.stderr
    assert "global_batch:" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_console_script_composes_the_same_run(installed: Path, tmp_path: Path) -> None:
    script = _run(installed, tmp_path, "elastictrain", "run", "--cfg", "job", "recipe=llama_tiny")
    module = _run(installed, tmp_path, "elastictrain.run", "--cfg", "job", "recipe=llama_tiny")
    assert script.returncode == 0, script.stderr
    assert script.stdout == module.stdout


def test_the_console_script_lists_its_commands(installed: Path, tmp_path: Path) -> None:
    done = _run(installed, tmp_path, "elastictrain", "--help")
    assert done.returncode == 0, done.stderr
    assert {"run", "data"} <= {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}


@pytest.mark.parametrize("arguments", [[], ["trian"]])
def test_an_unknown_command_is_a_usage_error(installed: Path, tmp_path: Path, arguments: list[str]) -> None:
    done = _run(installed, tmp_path, "elastictrain", *arguments)
    assert done.returncode == 64
    assert "usage:" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_the_installed_one(installed: Path, tmp_path: Path, wheel: Path) -> None:
    done = _run(installed, tmp_path, "elastictrain", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["elastictrain", wheel.name.split("-")[1]]
    where = subprocess.run(
        [sys.executable, "-c", "import elastictrain, elastictrain.recipes as r; print(elastictrain.__file__, r.__path__[0])"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=True,
    )
    assert [Path(path).parents[1] for path in where.stdout.split()] == [installed, installed]


# Without the checkout, which an editable install would let in.
ALONE = """
import runpy, sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in getattr(one, "__module__", "")]
sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def test_a_run_trains_from_the_wheel_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    keys = (
        "recipe=llama_tiny",
        "train.steps=2",
        "train.eval_every_steps=0",
        "model.dim=32",
        "model.num_heads=2",
        "model.ffn_dim=64",
    )
    where = (f"run.dir={tmp_path}/run", f"checkpoint.memory_dir={tmp_path}/host-memory")
    (tmp_path / "host-memory").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "elastictrain.run", *keys, *where, "model.num_kv_heads=2", "preflight=off"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stderr


def test_build_makes_what_an_index_takes(tmp_path: Path) -> None:
    for name in ("build", "twine"):
        if (spec := find_spec(name)) is None or spec.origin is None:
            pytest.skip(f"needs pip install {name}")
    source = _copied(tmp_path / "source")
    for command in (
        ["build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source)],
        ["twine", "check", "--strict"],
    ):
        files = sorted(map(str, (tmp_path / "dist").glob("*"))) if command[0] == "twine" else []
        done = subprocess.run(
            [sys.executable, "-m", *command, *files],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (tmp_path / "dist").glob("*.whl")
    assert "elastictrain/conf/recipe/llama_tiny.yaml" in zipfile.ZipFile(made).namelist()
