from pathlib import Path

from tests.integration.launch.restarting import Group

DELAY_S = 0.3


def test_a_restart_with_the_same_hosts_waits_for_few_requests_one_after_another(tmp_path: Path) -> None:
    group = Group(tmp_path)
    try:
        quick_s = group.restart(delay_s=0.0)
        slow_s = group.restart(delay_s=DELAY_S)
    finally:
        group.close()
    # The proposal, and the other hosts' reading of it.
    assert (slow_s - quick_s) / DELAY_S <= 3
