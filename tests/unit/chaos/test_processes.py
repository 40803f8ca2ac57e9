import signal
from types import SimpleNamespace

import pytest

from elastictrain.chaos import processes


def test_all_processes_of_a_host_stop_before_one_of_them_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a launcher may still tell of the end of what it watches: a host that has lost its power tells nothing."""
    sent: list[tuple[int, int]] = []
    living = {11, 12, 13}

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        if number == signal.SIGKILL:
            living.discard(pid)

    monkeypatch.setattr(processes, "os", SimpleNamespace(kill=kill))
    processes.kill_all(living.copy)
    assert [number for _, number in sent] == [signal.SIGSTOP] * 3 + [signal.SIGKILL] * 3
