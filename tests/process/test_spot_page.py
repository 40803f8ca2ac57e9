"""The rehearsal of docs/spot.md does what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

from torchruns import REPOSITORY, environment, events


def test_the_rehearsal_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```bash\n(.*?)^```", (REPOSITORY / "docs" / "spot.md").read_text(), re.DOTALL | re.MULTILINE)
    variables = environment({"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    command = ["timeout", "--kill-after=9", "400", "bash", "-c", block]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=420)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines().count("exit code 75") == 1
    run_dir = tmp_path / "runs" / "rehearsal"
    stopped, ended = (event["step"] for event in events(run_dir, "stop"))
    assert 20 <= stopped < ended == 60
    assert [event["step"] for event in events(run_dir, "resume")] == [0, stopped]
    assert [event["step"] for event in events(run_dir, "step")] == list(range(1, 61))
