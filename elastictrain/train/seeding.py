"""Seeds derived from what they are for, so that randomness does not depend on the world, a rank or the clock."""

import hashlib
import random

import numpy
import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a function of `parts` alone, on every platform."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and CUDA), Python and NumPy, for whatever the task draws from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)  # the global generator, which a task may use
