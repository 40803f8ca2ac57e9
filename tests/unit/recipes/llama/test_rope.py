import math

import pytest
import torch

from recipes.llama.config import LlamaConfig
from recipes.llama.rope import Rotary, rope_frequencies, rope_tables

CONFIG = LlamaConfig(
    vocab_size=32, dim=256, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=8, max_seq_len=64, rope_scaling_factor=8.0
)


def scaled_one_by_one(config: LlamaConfig) -> list[float]:
    """The rule in terms of wavelengths, one frequency at a time."""
    result = []
    longest = config.rope_original_max_position / config.rope_low_freq_factor
    shortest = config.rope_original_max_position / config.rope_high_freq_factor
    for pair in range(config.head_dim // 2):
        frequency = config.rope_theta ** (-2 * pair / config.head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > longest:
            result.append(frequency / 8.0)
        elif wavelength < shortest:
            result.append(frequency)
        else:
            share = (config.rope_original_max_position / wavelength - config.rope_low_freq_factor) / (
                config.rope_high_freq_factor - config.rope_low_freq_factor
            )
            result.append((1 - share) * frequency / 8.0 + share * frequency)
    return result


def test_scaling_follows_the_rule_of_wavelengths() -> None:
    expected = torch.tensor(scaled_one_by_one(CONFIG))
    torch.testing.assert_close(rope_frequencies(CONFIG), expected, rtol=2e-6, atol=0.0)
    ratio = expected * CONFIG.rope_theta ** (torch.arange(0, 128, 2) / 128)
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(1 / 8)
    assert ((ratio > 0.13) & (ratio < 0.99)).any(), "the interpolated range must be covered"


def test_scores_depend_on_distance_alone() -> None:
    rotary = Rotary(CONFIG)
    q, k = torch.randn(2, 1, 1, 1, 128, generator=torch.Generator().manual_seed(0)).expand(2, 1, 64, 1, 128)
    turned_q, turned_k = rotary(q)[0, :, 0], rotary(k)[0, :, 0]
    scores = turned_q @ turned_k.t()
    for distance in (0, 3, 40):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=2e-4)
    assert scores[0, 0] != scores[40, 0]


def test_rotation_is_a_complex_product_of_the_two_halves() -> None:
    x = torch.randn(2, 64, 3, 128, generator=torch.Generator().manual_seed(1))
    cos, sin = rope_tables(CONFIG)
    turned = torch.complex(x[..., :64], x[..., 64:]) * torch.complex(cos, sin)[:, None, :]
    torch.testing.assert_close(Rotary(CONFIG)(x), torch.cat((turned.real, turned.imag), dim=-1))


def test_angles_stay_float32_for_bf16_input() -> None:
    rotary = Rotary(CONFIG)
    x = torch.randn(1, 64, 1, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert torch.equal(rotary(x), rotary(x.float()).bfloat16())
