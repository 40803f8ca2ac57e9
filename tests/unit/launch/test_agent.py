import socket

import pytest
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from elastictrain.errors import EXIT_BUG, EXIT_TRANSPORT
from elastictrain.launch.agent import explain
from elastictrain.liveness.progress import Phase


@pytest.mark.parametrize(
    "error",
    [
        DistNetworkError("port 1 is taken\nException raised from listen at socket.cpp:123\n"),
        DistStoreError("1/2 clients joined"),
        RendezvousTimeoutError("too late"),
        ConnectionResetError("gone"),
        TimeoutError(),
        socket.gaierror("no such name"),
    ],
)
def test_where_the_hosts_do_not_meet_nobody_is_to_blame(error: Exception) -> None:
    reason = explain(error)
    assert (reason.exit_code, reason.phase, reason.step) == (EXIT_TRANSPORT, Phase.RENDEZVOUS, 0)
    assert reason.sentence.startswith(f"torchrun could not bring the workers together: {type(error).__name__}")
    assert "\n" not in reason.sentence


def test_the_first_line_of_an_error_is_enough() -> None:
    reason = explain(ValueError("no such\nthing"))
    assert (reason.exit_code, reason.sentence) == (EXIT_BUG, "torchrun failed: ValueError: no such")
    assert explain(KeyError()).sentence == "torchrun failed: KeyError"
    assert len(explain(ValueError("x" * 5000)).sentence) < 500
