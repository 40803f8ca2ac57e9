import pytest

from elastictrain.preflight.transport.settings import NcclPattern

NAMES = ["lo", "eth0", "eth1", "eth10", "docker0"]


@pytest.mark.parametrize(
    ("text", "matched"),
    [
        ("eth", ["eth0", "eth1", "eth10"]),
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("=eth0,eth1", ["eth0", "eth1"]),
        ("eth0,,docker", ["eth0", "docker0"]),
        ("^docker,lo", ["eth0", "eth1", "eth10"]),
        ("^=eth1", ["lo", "eth0", "eth10", "docker0"]),
        ("^", []),
        ("=", NAMES),
        ("=eth", []),
        ("eth0 ", []),
    ],
)
def test_nccl(text: str, matched: list[str]) -> None:
    pattern = NcclPattern.parse(text)
    assert [name for name in NAMES if pattern.matches(name)] == matched


def test_ports() -> None:
    pattern = NcclPattern.parse("=mlx5_0:1,mlx5_1:2:0:1,mlx5_2,mlx5_3:,mlx5_4:x")
    hits = [(name, port) for name in range(5) for port in (1, 2) if pattern.matches(f"mlx5_{name}", port)]
    assert hits == [(0, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]


def test_what_is_missing() -> None:
    assert NcclPattern.parse("=eth0,eth7").without_match(NAMES) == ["eth7"]
    assert NcclPattern.parse("eth,ib").without_match(NAMES) == ["ib"]
    assert NcclPattern.parse("^ib").without_match(NAMES) == []
