"""The rate at which a rank multiplies matrices."""

import time
from collections.abc import Callable

import torch

_CUDA_SIDE, _CPU_SIDE = 8192, 256
_FEWEST, _MOST = 5, 200
_MATRICES = 3


def matmul_tflops(device: torch.device, *, budget_s: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """TFLOP/s of the fastest product within `budget_s`, after a warm-up: bfloat16 on a GPU, float32 on a CPU.

    The fastest, because what else a processor does makes products slower, and never faster. Raises: RuntimeError if the device
    fails, or has no memory.
    """
    cuda = device.type == "cuda"
    side = _CUDA_SIDE if cuda else _CPU_SIDE
    dtype = torch.bfloat16 if cuda else torch.float32
    if cuda and torch.cuda.mem_get_info(device)[0] < 2 * _MATRICES * side * side * dtype.itemsize:
        side //= 4
    one = torch.ones(side, side, dtype=dtype, device=device)
    out = torch.empty_like(one)
    times: list[float] = []
    _settle(device)
    until = clock() + 2 * budget_s
    # The first ones wake the device up, and load its library. They do not count.
    while len(times) < 2 * _FEWEST or (clock() < until and len(times) < _MOST):
        began = clock()
        torch.mm(one, one, out=out)
        _settle(device)
        times.append(clock() - began)
    best = min(times[_FEWEST:])
    return 2 * side**3 / best / 1e12


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
