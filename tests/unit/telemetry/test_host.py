import psutil
import torch

from elastictrain.telemetry.host import HostProbe


def test_a_look_gives_plausible_facts() -> None:
    probe = HostProbe(torch.device("cpu"))
    facts = probe.look()
    assert 0.0 <= facts.host_cpu_percent <= 100.0
    assert 0.0 < facts.host_memory_gb < psutil.virtual_memory().total / 1e9
    assert facts.device_memory_gb is None
