"""What a device computes, stores and copies while busy: products and patterns of known bits, and the rates of both."""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from elastictrain.distributed.clock import clock_of
from elastictrain.distributed.device import settle
from elastictrain.preflight.group.collectives import MB
from elastictrain.preflight.group.measurements import seconds_of
from elastictrain.preflight.host.gpu import Gpu

logger = logging.getLogger(__name__)

QUICK_S, FULL_S, CPU_S = 0.2, 2.0, 0.04
_CUDA_SIDE, _CPU_SIDE = 8192, 64
_ROOMY_BYTES = 4 << 30  # a device with less of free memory multiplies smaller matrices
_FEWEST = 10
_SEED = 21
_BLOCK_BYTES, _MOST_BLOCKS, _CPU_BLOCKS = 64 * MB, 2048, 1  # a block is larger than a GPU's cache
_PIECES = 16  # of the memory that is read at once, and then compared
_COPIES = 4
COPIES = "copies"  # the part of an examination that the host times


@dataclass(frozen=True, slots=True)
class KnownProduct:
    """A product of matrices of whole numbers from -`most` to `most`. All partial sums are exact in the accumulator: no order
    of summation and no library changes the result. Source: tensor cores keep 24 bits of a sum, for float8 of Hopper 14."""

    dtype: torch.dtype
    most: int
    period: int  # inner dimension, and period of the rows

    def make(self, side: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """`left [side, period]`, `right [side, period]` and `left @ right.T [side, side]`. Each row is the one before, turned
        by one place: the product has as many different elements as a row, which a Fourier transform in float64 gives."""
        generator = torch.Generator().manual_seed(_SEED)
        one, other = torch.randint(-self.most, self.most + 1, (2, self.period), generator=generator)
        spectrum = torch.fft.rfft(one.double()) * torch.fft.rfft(other.double()).conj()
        sums = torch.fft.irfft(spectrum, n=self.period).round().float().to(device)
        rows, columns = torch.arange(side, device=device)[:, None], torch.arange(self.period, device=device)
        left = one.to(device)[(columns + rows) % self.period].to(self.dtype)
        right = other.to(device)[(columns - rows) % self.period].to(self.dtype)
        return left, right, sums.repeat(2 * side // self.period + 1).as_strided((side, side), (1, 1))


FLOAT32, BFLOAT16 = KnownProduct(torch.float32, 31, 4096), KnownProduct(torch.bfloat16, 31, 4096)
FLOAT8 = KnownProduct(torch.float8_e4m3fn, 2, 2048)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T` in float32."""
    if left.dtype is torch.float8_e4m3fn:
        one, scale = torch.ones((), device=left.device), F.ScalingType.TensorWise
        return F.scaled_mm(left, right.T, one, scale, one, scale, output_dtype=torch.float32)
    return left @ right.T if left.dtype is torch.float32 else torch.mm(left, right.T, out_dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class DeviceFindings:
    """What a device got wrong, in words; TFLOP/s of the fastest product, in bfloat16 if the device has it, else in float32:
    other work makes products slower, never faster; GB/s of copies to the device and from it, if it is a GPU."""

    tflops: float
    wrong: tuple[str, ...] = ()
    copies_gbs: tuple[float, ...] = ()
    gpus: tuple[Gpu, ...] = ()  # of the host, while all of them work: on its first rank in a full preflight


def examine_device(
    device: torch.device,
    at: Callable[[str], None],
    *,
    budget_s: float,
    free_bytes: int,
    busy: Callable[[], bool] = lambda: False,
    product: Callable[[Tensor, Tensor], Tensor] = multiply,
) -> DeviceFindings:
    """Multiply for `budget_s`, and as long as `busy`; use up to half of `free_bytes`. Raises: RuntimeError of a device."""
    cuda, began = device.type == "cuda", time.monotonic()
    side, chosen = _CPU_SIDE, [FLOAT32]
    if cuda:
        side = _CUDA_SIDE if free_bytes > _ROOMY_BYTES else _CUDA_SIDE // 8
        capability = torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)
        chosen += [known for known, least in ((BFLOAT16, (8, 0)), (FLOAT8, (8, 9))) if capability >= least]
    at(COPIES)
    copies, found = _copy(device) if cuda else ((), [])
    at("memory")
    found += _remember(device, num_bytes=free_bytes // 2 if budget_s > QUICK_S else _BLOCK_BYTES * 16)
    made = [(known, *known.make(side, device)) for known in chosen if known is FLOAT32 or is_supported(known, device, product)]
    fastest = next((index for index, (known, *_) in enumerate(made) if known is BFLOAT16), 0)
    clock, times = clock_of(device), list[float]()
    bad = torch.zeros(len(made), dtype=torch.int64, device=device)
    while len(times) < _FEWEST or time.monotonic() < began + budget_s or busy():
        at("products")
        settle(device)
        marks = []
        for index, (_, left, right, expected) in enumerate(made):
            # A GPU still multiplies in float32 while the host, which other threads may hold up, hands it what comes next.
            before = clock.now()
            result = product(left, right)
            marks.append((before, clock.now()))
            bad[index] += (result != expected).sum()
        settle(device)
        times.append(clock.between_s(*marks[fastest]))
    for (known, *_), count in zip(made, bad.tolist(), strict=True):
        if count:
            found.append(f"{count / len(times) / side**2:.3g} of products in {str(known.dtype).removeprefix('torch.')}")
    # The first ones wake the device up and load its library: they do not count.
    return DeviceFindings(2 * side**2 * made[fastest][0].period / min(times[_FEWEST // 2 :]) / 1e12, tuple(found), copies)


def is_supported(known: KnownProduct, device: torch.device, product: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether this torch, with its libraries, multiplies this type on this device."""
    left, right, _ = known.make(_CUDA_SIDE // 8, device)
    try:
        product(left, right)
        settle(device)
    except (RuntimeError, AttributeError, TypeError) as error:
        # A device that is broken fails in float32, too.
        logger.info("products in %s are not checked: %s", known.dtype, error)
        return False
    return True


def _remember(device: torch.device, *, num_bytes: int) -> list[str]:
    """Write a pattern that differs from block to block, read it, and do the same with its complement."""
    block, most = (_BLOCK_BYTES, _MOST_BLOCKS) if device.type == "cuda" else (MB, _CPU_BLOCKS)
    pattern = torch.arange(block // 8, device=device) * 0x9E3779B97F4A7C1
    count = max(1, min(num_bytes // block, most))
    memory = None
    while memory is None:
        # Another process may have taken memory since it was counted.
        with suppress(torch.OutOfMemoryError) if count > 1 else nullcontext():
            memory = torch.empty(count, len(pattern), dtype=torch.int64, device=device)
        count //= 2
    blocks = torch.arange(len(memory), device=device)
    # Few calls: for each one the host may wait for another thread.
    at_once = max(1, len(memory) // _PIECES)
    found = []
    for name, marks in (("pattern", blocks), ("complement", ~blocks)):
        torch.bitwise_xor(pattern, marks[:, None], out=memory)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for rows, expected in zip(torch.split(memory, at_once), torch.split(marks, at_once), strict=True):
            wrong += ((rows ^ pattern) != expected[:, None]).sum()
        if count := int(wrong):
            found.append(f"{count} of {memory.numel()} words of a memory {name}")
    return found


def _copy(device: torch.device) -> tuple[tuple[float, ...], list[str]]:
    """GB/s to the device and back of the fastest copy, and whether all bytes came back."""
    source = torch.arange(_BLOCK_BYTES // 8).pin_memory()
    there, back = torch.empty_like(source, device=device), torch.zeros_like(source).pin_memory()
    ways = [partial(target.copy_, origin, non_blocking=True) for target, origin in ((there, source), (back, there))]
    best = [min(seconds_of(copy, device=device) for _ in range(_COPIES)) for copy in ways]
    return tuple(_BLOCK_BYTES / seconds / 1e9 for seconds in best), [] if torch.equal(source, back) else [
        "bytes changed on the way to the device and back"
    ]
