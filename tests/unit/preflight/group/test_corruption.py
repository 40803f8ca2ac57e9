import pytest
import torch
from torch import Tensor

from elastictrain.preflight.group import corruption
from elastictrain.preflight.group.corruption import (
    BFLOAT16,
    FLOAT8,
    FLOAT32,
    KnownProduct,
    examine_device,
    is_supported,
    multiply,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("known", [FLOAT32, BFLOAT16, FLOAT8])
@pytest.mark.parametrize("side", [1, 33, 300])
def test_the_result_is_known(known: KnownProduct, side: int) -> None:
    left, right, expected = known.make(side, CPU)
    assert left.dtype is right.dtype is known.dtype
    assert torch.equal(left.double().long() @ right.double().long().T, expected.long())


@pytest.mark.parametrize(("known", "bits"), [(FLOAT32, 24), (BFLOAT16, 24), (FLOAT8, 13)])
def test_no_partial_sum_can_be_rounded(known: KnownProduct, bits: int) -> None:
    assert known.most**2 * known.period <= 2**bits
    assert int(torch.tensor(float(known.most)).to(known.dtype).float()) == known.most


@pytest.mark.parametrize("known", [FLOAT32, FLOAT8])
def test_products_are_exact(known: KnownProduct) -> None:
    left, right, expected = known.make(48, CPU)
    assert torch.equal(multiply(left, right), expected)


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), AttributeError("scaled_mm"), TypeError("out_dtype")])
def test_a_type_that_a_library_does_not_multiply_is_no_fault_of_the_device(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corruption, "_CUDA_SIDE", 512)

    def product(left: Tensor, right: Tensor) -> Tensor:
        raise error

    assert not is_supported(BFLOAT16, CPU, product)
    assert is_supported(FLOAT32, CPU, multiply)
    with pytest.raises(type(error)):
        examine_device(CPU, lambda _: None, budget_s=0.0, free_bytes=1 << 30, product=product)


def test_a_healthy_device() -> None:
    found = examine_device(CPU, lambda _: None, budget_s=0.0, free_bytes=1 << 30)
    assert (found.wrong, found.copies_gbs, found.tflops > 0) == ((), (), True)


@pytest.mark.parametrize("bit", [0, 31])
def test_one_wrong_bit_of_one_product(bit: int) -> None:
    calls: list[None] = []

    def flip(left: Tensor, right: Tensor) -> Tensor:
        result = multiply(left, right)
        calls.append(None)
        if len(calls) == 3:
            result.view(torch.int32)[63, 63] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
        return result

    (wrong,) = examine_device(CPU, lambda _: None, budget_s=0.0, free_bytes=1 << 30, product=flip).wrong
    assert "float32" in wrong


@pytest.mark.parametrize("on", [0, 1])
def test_one_wrong_bit_of_the_memory(on: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = torch.bitwise_xor, list[None]()

    def forget(pattern: Tensor, marks: Tensor, *, out: Tensor) -> None:
        write(pattern, marks, out=out)
        if len(calls) == on:
            out[-1, -1] ^= 1 << 40
        calls.append(None)

    monkeypatch.setattr(torch, "bitwise_xor", forget)
    (wrong,) = examine_device(CPU, lambda _: None, budget_s=0.0, free_bytes=1 << 30).wrong
    assert wrong.startswith("1 of ")


@pytest.mark.parametrize("blocks", [15, 33])
def test_wrong_bits_of_a_memory_that_is_read_in_pieces(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write = torch.bitwise_xor

    def forget(pattern: Tensor, marks: Tensor, *, out: Tensor) -> None:
        write(pattern, marks, out=out)
        out[0, 0] ^= 1
        out[-1, -1] ^= 1 << 40

    monkeypatch.setattr(corruption, "_CPU_BLOCKS", blocks)
    monkeypatch.setattr(torch, "bitwise_xor", forget)
    (one, other) = examine_device(CPU, lambda _: None, budget_s=0.0, free_bytes=1 << 30).wrong
    assert one.startswith(f"2 of {blocks << 17} ")
    assert other.startswith(f"2 of {blocks << 17} ")
    monkeypatch.setattr(torch, "bitwise_xor", write)
    assert examine_device(CPU, lambda _: None, budget_s=0.0, free_bytes=1 << 30).wrong == ()


@pytest.mark.parametrize("stuck", [0, -1])
def test_a_bit_that_is_stuck(stuck: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write = torch.bitwise_xor

    def stick(pattern: Tensor, marks: Tensor, *, out: Tensor) -> None:
        write(pattern, marks, out=out)
        out[0, 3] = (out[0, 3] & ~1) | (stuck & 1)

    monkeypatch.setattr(torch, "bitwise_xor", stick)
    (wrong,) = examine_device(CPU, lambda _: None, budget_s=0.0, free_bytes=1 << 30).wrong
    assert wrong.startswith("1 of ")


def test_it_goes_on_while_others_read() -> None:
    left = iter([True] * 20 + [False])
    calls: list[None] = []

    def count(one: Tensor, other: Tensor) -> Tensor:
        calls.append(None)
        return multiply(one, other)

    examine_device(CPU, lambda _: None, budget_s=0.0, free_bytes=1 << 30, busy=lambda: next(left), product=count)
    assert len(calls) == 10 + 20
