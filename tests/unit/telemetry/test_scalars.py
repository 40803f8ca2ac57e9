from elastictrain.telemetry.host import HostFacts
from elastictrain.telemetry.reading import Reading
from elastictrain.telemetry.scalars import scalars_of, scalars_of_eval

READING = Reading(step=3, loss=1.0, lr=2.0, grad_norm=3.0, tokens_per_s=4.0, step_s=5.0, mfu=0.5, skipped=6)
HOST = HostFacts(
    host_cpu_percent=7.0,
    host_memory_gb=8.0,
    device_memory_gb=9.0,
    device_busy_percent=95.0,
)


def test_every_figure_has_its_tag() -> None:
    assert scalars_of(READING, host=HOST) == {
        "loss/train": 1.0,
        "optimizer/lr": 2.0,
        "optimizer/grad_norm": 3.0,
        "optimizer/skipped": 6.0,
        "speed/tokens_per_s": 4.0,
        "speed/step_s": 5.0,
        "speed/mfu": 0.5,
        "system/device_memory_gb": 9.0,
        "system/device_busy_percent": 95.0,
        "system/cpu_percent": 7.0,
        "system/memory_gb": 8.0,
    }
    assert scalars_of_eval(1.5) == {"loss/held_out": 1.5}


def test_what_is_not_known_has_no_tag() -> None:
    reading = Reading(step=3, loss=1.0, lr=2.0, grad_norm=3.0, tokens_per_s=4.0, step_s=5.0, mfu=None, skipped=0)
    host = HostFacts(
        host_cpu_percent=7.0,
        host_memory_gb=8.0,
        device_memory_gb=None,
        device_busy_percent=None,
    )
    tags = scalars_of(reading, host=host)
    assert "speed/mfu" not in tags
    assert "system/device_memory_gb" not in tags
