import sys

import pytest
import torch

from elastictrain.distributed.float8 import check_float8
from elastictrain.errors import ConfigError


def test_a_cpu_is_refused() -> None:
    pytest.importorskip("torchao", reason="needs the extra fp8")
    with pytest.raises(ConfigError) as caught:
        check_float8(torch.device("cpu"))
    assert [problem.key for problem in caught.value.problems] == ["train.precision"]


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_by_its_capability(capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao", reason="needs the extra fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    if fits:
        check_float8(torch.device("cuda", 0))
        return
    with pytest.raises(ConfigError):
        check_float8(torch.device("cuda", 0))


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match="fp8") as caught:
        check_float8(torch.device("cpu"))
    assert "elastictrain[fp8]" in str(caught.value)
