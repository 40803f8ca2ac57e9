"""`python -m elastictrain.chaos` on hosts of their own."""

import json
import subprocess
import sys
from pathlib import Path

from torchruns import environment


def test_a_killed_worker_a_cut_cable_and_a_host_that_leaves_break_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elastictrain.chaos", "--hosts", "3", "--faults", "3", "--every", "0", "1", "--seed", "2"]
    command += ["--kinds", "kill_worker", "one_way", "leave", "--html", str(tmp_path / "page.html")]
    command += ["--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    plan = json.loads((tmp_path / "chaos-2.json").read_text())
    assert sorted(fault["kind"] for fault in plan["faults"]) == ["kill_worker", "leave", "one_way"]
    table = {words[0]: words[1:] for words in map(str.split, done.stdout.splitlines()) if words and words[0] in done.stdout}
    assert {"kill_worker", "one_way", "leave"} <= table.keys()
    assert "<h2>Hosts</h2>" in (tmp_path / "page.html").read_text()
    history = json.loads((tmp_path / "kept" / "history.json").read_text())
    assert {fault["kind"] for fault in history["faults"]} == {"worker", "one_way", "notice", "host", "come"}
    assert all(0 < fault["at_s"] < history["seconds"] for fault in history["faults"] if fault["kind"] != "come")
    assert (tmp_path / "kept" / "run" / "run" / "launch").is_dir()
