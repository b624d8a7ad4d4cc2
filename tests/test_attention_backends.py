"""Which backend attends to keys and values of which type, and that all of them say the same."""

from __future__ import annotations

import pytest
import torch

from mistralrs_sdk.attention.backend import AttentionSpec
from mistralrs_sdk.attention.cpu import CpuBackend
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.sdpa import SdpaBackend
from mistralrs_sdk.attention.select import KV_SWITCH, select_backend, select_kv_dtype
from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.kernels import native
from mistralrs_sdk.layers.rotary import RotaryEmbedding
from tests.batches import Row, make_batch
from tests.model_helpers import continue_ids, expected, prompt, tiny_builder

needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels here")


@pytest.mark.parametrize(
    ("device", "dtype", "reason", "name", "named"),
    [
        ("cpu", "f32", None, "CpuBackend", []),
        ("cpu", "bf16", None, "SdpaBackend", ["bf16"]),
        ("cpu", "f32", "no compiler", "SdpaBackend", ["no compiler"]),
        ("cpu", "bf16", "no compiler", "SdpaBackend", ["bf16", "no compiler"]),
        ("cuda", "f32", None, "SdpaBackend", ["cuda"]),
    ],
)
def test_the_choice_names_every_reason_against(device, dtype, reason, name, named):
    """The native kernel on a CPU in float32, else torch's; each obstacle has its sentence."""
    choice = select_backend(device=device, dtype=dtype, native=reason)
    assert choice.name == name
    assert len(choice.reasons) == len(named)
    assert all(word in text for word, text in zip(named, choice.reasons, strict=True))


@pytest.mark.parametrize(
    ("backend", "dtype", "user", "fast", "switch", "kept", "named"),
    [
        ("CpuBackend", "f32", False, True, "", "f16", "automatic"),
        ("CpuBackend", "f32", False, True, "0", "f16", "automatic"),
        ("CpuBackend", "f32", False, True, "on", "f32", KV_SWITCH),
        ("CpuBackend", "f32", True, True, "", "f32", "user"),
        ("CpuBackend", "f32", False, False, "", "f32", "slow"),
        ("SdpaBackend", "f32", False, True, "", "f32", "model"),
        ("SdpaBackend", "bf16", True, False, "1", "bf16", "model"),
    ],
)
def test_keys_and_values_are_f16_where_that_is_fast_and_nobody_objects(
    backend, dtype, user, fast, switch, kept, named
):
    """Native attention keeps f16 by itself; a dtype of the user's or the switch keeps f32."""
    choice = select_kv_dtype(
        backend, dtype, user_dtype=user, fast_halves=fast, environ={KV_SWITCH: switch}
    )
    assert choice.dtype == kept
    assert named in choice.origin


def test_a_switch_that_is_neither_on_nor_off_is_refused():
    """A slip must not change what is computed."""
    with pytest.raises(ConfigError, match=r"MISTRALRS_CPU_KV_F32 \('f32'\) must be one of 1, true"):
        select_kv_dtype(
            "CpuBackend", "f32", user_dtype=False, fast_halves=True, environ={KV_SWITCH: "f32"}
        )


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_native_backend_equals_torch(window, softcap, rotated, dtype):
    """A mixed batch of decodes and chunks over scattered blocks, rotated or not; keys and values
    are rounded to what the cache holds, nothing else is."""
    torch.manual_seed(0)
    spec = AttentionSpec(
        num_heads=6, num_kv_heads=2, head_dim=24, scale=0.2, window=window, softcap=softcap
    )
    backends = []
    for kind in (SdpaBackend, CpuBackend):
        cache = PagedKVCache([spec], num_blocks=20, block_size=8, dtype=dtype, device="cpu")
        backends.append(kind(cache))
    rows = [Row(list(range(30)), [3, 9, 1, 7]), Row(list(range(20)), [2, 5, 8])]
    rope = RotaryEmbedding(24, 1e4)
    for counts in ((17, 9), (1, 5), (1, 1), (7, 1)):
        batch = make_batch(list(zip(rows, counts, strict=True)), 8)
        q = torch.randn(sum(counts), 6, 24)
        k, v = torch.randn(2, sum(counts), 2, 24)
        outs = []
        for backend in backends:
            backend.plan(batch)
            rotation = rope(batch.positions, torch.float32) if rotated else None
            outs.append(backend.run(spec, 0, q.clone(), k.clone(), v, rotation=rotation))
        # A rotation that differs in the last bit may round to the next float16.
        atol = 1e-3 if dtype is torch.float16 and rotated else 1e-5
        torch.testing.assert_close(outs[0], outs[1], atol=atol, rtol=1e-4)
        for row, count in zip(rows, counts, strict=True):
            row.computed += count


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_native_backend_keeps_tokens_where_the_cache_says(dtype):
    """Its keys lie otherwise in the same memory; k and v show each token in its slot all the
    same, and what takes tokens to lie in one piece is refused."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
    cache = PagedKVCache([spec] * 2, num_blocks=6, block_size=4, dtype=dtype, device="cpu")
    memory = cache.k[1].view(-1)
    backend = CpuBackend(cache)
    k, v = torch.randn(2, 5, 2, 8)
    backend.plan(make_batch([(Row([0] * 5, [3, 2]), 5)], 4))

    backend.run(spec, 1, torch.randn(5, 4, 8), k, v)

    assert cache.k[1].shape == cache.v[1].shape == (6, 4, 2, 8)
    assert torch.equal(cache.k[1][3], k[:4].to(dtype))
    assert torch.equal(cache.k[1][2, 0], k[4].to(dtype))
    assert torch.equal(cache.v[1][3], v[:4].to(dtype))
    assert torch.equal(memory.view(6, 2, 8, 4)[3].permute(2, 0, 1), k[:4].to(dtype))
    assert not cache.k[0].any()
    with pytest.raises(ValueError, match="lie as its backend wants them"):
        cache.flat(1)
    with pytest.raises(ValueError, match="lie as its backend wants them"):
        cache.store(1, torch.tensor([0]), k[:1], v[:1])


@needs_native
def test_a_large_native_cache_takes_memory_only_when_used():
    """8 GiB of blocks can be laid out on a machine that never fills them."""
    spec = AttentionSpec(num_heads=8, num_kv_heads=8, head_dim=128, scale=0.1)
    cache = PagedKVCache(
        [spec] * 2, num_blocks=65_536, block_size=16, dtype=torch.float16, device="cpu"
    )
    backend = CpuBackend(cache)
    backend.plan(make_batch([(Row([0], [65_535]), 1)], 16))
    k, v = torch.ones(2, 1, 8, 128)

    out = backend.run(spec, 1, torch.ones(1, 8, 128), k, v)

    assert out.eq(1).all()
    assert cache.k[1][-1, 0].eq(1).all()
    assert cache.k[0][-1].eq(0).all()


@pytest.mark.parametrize("switch", ["1", "0"])
async def test_switched_off_torch_attends_and_says_the_same(monkeypatch, switch):
    """MISTRALRS_NATIVE_KERNELS=0 is obeyed and shown by describe(); the tokens are the oracle's."""
    monkeypatch.setenv(native.SWITCH, switch)
    native.outcome.cache_clear()
    try:
        async with await tiny_builder("mistral_swa").build() as model:
            tokens = await continue_ids(model, prompt(37, seed=37), 12)
            line = next(x for x in model.describe().splitlines() if x.startswith("attention"))
    finally:
        native.outcome.cache_clear()
    assert tokens == expected("mistral_swa", tuple(prompt(37, seed=37)), 12)
    if switch == "0":
        assert "SdpaBackend" in line
        assert "switched off" in line
