"""The documents and the API reference build without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import elastictrain

ROOT = Path(__file__).parents[2]
PARTS = ("train.task", "errors", "events", "storage.store", "preflight.verdict")


def test_the_reference_builds_and_holds_every_public_part(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "reference" / "index.html").read_text()
    assert [part for part in PARTS if f'id="elastictrain.{part}' not in page] == []
    offered = set(elastictrain.__all__) - {"__version__"}
    assert offered - set(re.findall(r'id="elastictrain\.own_loop\.\w+\.(\w+)"', page)) == set()
