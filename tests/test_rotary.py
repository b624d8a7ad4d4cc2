"""Rotary embedding: the frequencies of each scaling, and the rotation itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mistralrs_sdk.layers.rotary import RotaryEmbedding, rope_frequencies

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with its ramp spelled out": {**YARN, "beta_fast": 8, "beta_slow": 2, "truncate": False},
    "yarn with an attention factor": {**YARN, "attention_factor": 0.7},
    "yarn with mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn with mscale alone": {**YARN, "mscale": 0.707},
    "yarn with an empty ramp": {**YARN, "beta_fast": 1, "beta_slow": 1, "truncate": False},
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=list(SCALINGS))
def test_frequencies_equal_the_reference(scaling: dict[str, Any]):
    """Each scaling gives the frequencies and the magnitude transformers computes."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={**scaling, "rope_theta": 5000.0},
    )
    expected, expected_magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")

    frequencies, magnitude = rope_frequencies(64, 5000.0, scaling=scaling, device="cpu")

    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert magnitude == pytest.approx(expected_magnitude)


def test_factors_divide_the_frequencies():
    """GGUF's per-pair factors slow each pair by its own."""
    factors = [1.0, 2.0, 4.0, 8.0]

    plain, _ = rope_frequencies(8, 10_000.0, scaling=None, device="cpu")
    scaled, magnitude = rope_frequencies(
        8, 10_000.0, scaling={"rope_type": "factors", "factors": factors}, device="cpu"
    )

    assert torch.equal(scaled, plain / torch.tensor(factors))
    assert magnitude == 1.0


def test_factors_can_say_what_llama3_says():
    """The llama3 rule, written as factors, is the same rotation."""
    plain, _ = rope_frequencies(64, 500_000.0, scaling=None, device="cpu")
    llama3, _ = rope_frequencies(64, 500_000.0, scaling=LLAMA3, device="cpu")
    factors = {"rope_type": "factors", "factors": (plain / llama3).tolist()}

    scaled, _ = rope_frequencies(64, 500_000.0, scaling=factors, device="cpu")

    torch.testing.assert_close(scaled, llama3)


def test_unknown_type_is_refused():
    """A scaling that is not known is never taken for none."""
    with pytest.raises(ValueError, match="'dynamic' is not one of"):
        rope_frequencies(8, 1e4, scaling={"rope_type": "dynamic"}, device="cpu")


def test_rotation_turns_pairs_of_halves():
    """Element i and i + dim/2 are the plane that turns by position times frequency i."""
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 5, 11])
    angles = positions[:, None].double() * 10_000.0 ** -(torch.arange(4).double() / 4)

    turned = RotaryEmbedding(8, 10_000.0)(positions, torch.float32)(x)

    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    expected = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(
        turned.double(), torch.cat((expected.real, expected.imag), -1), atol=1e-5, rtol=0
    )
    assert torch.equal(turned[0], x[0])


def test_scores_depend_on_distance_only():
    """Moving a query and a key by the same number of positions leaves their product."""
    rope = RotaryEmbedding(16, 10_000.0)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(at: int, other: int) -> float:
        turn_q = rope(torch.tensor([at]), torch.float32)
        turn_k = rope(torch.tensor([other]), torch.float32)
        return float((turn_q(q) * turn_k(k)).sum())

    assert score(9, 2) == pytest.approx(score(407, 400), abs=1e-4)


def test_angles_are_float32_whatever_the_dtype():
    """In bfloat16 positions 60000 and 60001 would be one; their rotations are not."""
    rope = RotaryEmbedding(64, 10_000.0)
    positions = torch.tensor([60_000, 60_001])

    low = rope(positions, torch.bfloat16)
    full = rope(positions, torch.float32)

    assert low.cos.dtype == torch.bfloat16
    torch.testing.assert_close(low.cos.float(), full.cos, atol=0.005, rtol=0)
    torch.testing.assert_close(low.sin.float(), full.sin, atol=0.005, rtol=0)
    assert not torch.equal(low.cos[0], low.cos[1])
