"""Which backend attends to keys and values of which type, and that all of them say the same."""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch

from mistralrs_sdk.attention.backend import AttentionSpec
from mistralrs_sdk.attention.cpu import CpuBackend
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.sdpa import SdpaBackend
from mistralrs_sdk.attention.select import (
    FLASHINFER_SWITCH,
    GRAPHS_SWITCH,
    KV_SWITCH,
    Choice,
    CudaFacts,
    select_backend,
    select_graphs,
    select_kv_dtype,
)
from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.kernels import native
from mistralrs_sdk.layers.rotary import RotaryEmbedding
from tests.batches import Row, make_batch
from tests.model_helpers import continue_ids, expected, prompt, tiny_builder

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1)
FINE = CudaFacts(capability=(9, 0))

needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels here")


def choose(**facts) -> Choice:
    """What is chosen for a model in float16 on a GPU that has everything, but for `facts`."""
    usual = {"device": "cuda", "dtype": "f16", "native": None, "specs": [SPEC]}
    usual |= {"cache_type": "auto", "flashinfer": None, "environ": {}}
    usual["cuda"] = FINE if facts.get("device", "cuda") == "cuda" else None
    return select_backend(**(usual | facts))


@pytest.mark.parametrize(
    ("device", "dtype", "reason", "name", "named"),
    [
        ("cpu", "f32", None, "CpuBackend", []),
        ("cpu", "bf16", None, "SdpaBackend", ["bf16", "needs a CUDA device"]),
        ("cpu", "f32", "no compiler", "SdpaBackend", ["no compiler", "device is cpu"]),
        ("cpu", "bf16", "no gcc", "SdpaBackend", ["bf16", "no gcc", "device is cpu"]),
        ("mps", "f16", None, "SdpaBackend", ["device is mps", "needs a CUDA device"]),
        ("cuda", "f32", None, "SdpaBackend", ["device is cuda", "f16 and bf16, not f32"]),
        ("cuda", "f16", None, "FlashInferBackend", []),
    ],
)
def test_the_choice_names_every_reason_against(device, dtype, reason, name, named):
    """The native kernel on a CPU in float32, FlashInfer on a GPU in halves, else torch's; each
    obstacle has its sentence."""
    choice = choose(device=device, dtype=dtype, native=reason)
    assert choice.name == name
    assert len(choice.reasons) == len(named)
    assert all(word in text for word, text in zip(named, choice.reasons, strict=True))


def test_each_obstacle_to_flashinfer_is_named_beside_the_others():
    """In every combination: the reasons are exactly the sentences of what stands in the way."""
    words = {
        "off": "switched off",
        "dtype": "not f32",
        "head_dim": "not 80, 96",
        "groups": "9 heads cannot share 2",
        "causal": "looks ahead",
        "capability": "it needs compute capability 7.5, and this GPU has 7.0",
        "missing": "not installed",
    }
    for chosen in itertools.product([False, True], repeat=len(words)):
        wrong = {name for name, is_wrong in zip(words, chosen, strict=True) if is_wrong}
        specs = [SPEC]
        if "head_dim" in wrong:
            specs += [attrs.evolve(SPEC, head_dim=96), attrs.evolve(SPEC, head_dim=80)]
        if "groups" in wrong:
            specs.append(attrs.evolve(SPEC, num_heads=9))
        if "causal" in wrong:
            specs.append(attrs.evolve(SPEC, causal=False))
        choice = choose(
            dtype="f32" if "dtype" in wrong else "f16",
            specs=specs,
            environ={FLASHINFER_SWITCH: "off"} if "off" in wrong else {},
            cuda=CudaFacts(
                capability=(7, 0) if "capability" in wrong else (9, 0),
                flashinfer="it is not installed" if "missing" in wrong else None,
            ),
        )

        against = [text for text in choice.reasons if text.startswith("FlashInferBackend: ")]
        assert choice.name == ("SdpaBackend" if wrong else "FlashInferBackend")
        assert len(against) == len(wrong)
        assert {name for name in words if any(words[name] in text for text in against)} == wrong


@pytest.mark.parametrize(
    ("capability", "dtype", "cache_type", "refused"),
    [
        ((7, 5), "f16", "auto", []),
        ((7, 5), "bf16", "auto", ["bf16"]),
        ((7, 5), "f16", "f8e4m3", ["cache_type f8e4m3"]),
        ((8, 0), "bf16", "f8e4m3", []),
        ((7, 0), "bf16", "f8e4m3", ["it", "bf16", "cache_type f8e4m3"]),
    ],
)
def test_older_gpus_lack_some_types(capability, dtype, cache_type, refused):
    """Turing has FlashInfer's kernels in float16; what is missing is named with what it needs."""
    choice = choose(dtype=dtype, cache_type=cache_type, cuda=CudaFacts(capability=capability))

    found = [r for r in choice.reasons if r.startswith("FlashInferBackend")]
    assert [text.split(" needs ")[0].split(": ")[1] for text in found] == refused
    assert choice.name == ("SdpaBackend" if refused else "FlashInferBackend")


@pytest.mark.parametrize(
    ("asked", "switch", "name"),
    [
        (None, "", "FlashInferBackend"),
        (None, "ON", "FlashInferBackend"),
        (None, " False ", "SdpaBackend"),
        (True, "no", "FlashInferBackend"),
        (False, "yes", "SdpaBackend"),
    ],
)
def test_who_asks_in_code_wins_over_the_switch(asked, switch, name):
    """MISTRALRS_FLASHINFER_DECODE counts if nothing was set, in any case of its letters."""
    assert choose(flashinfer=asked, environ={FLASHINFER_SWITCH: switch}).name == name


def test_who_asks_for_flashinfer_hears_every_obstacle_on_any_device():
    """Its limits are beside the point on a CPU only until someone wants it there."""
    odd = [attrs.evolve(SPEC, head_dim=80)]
    common = {"device": "cpu", "dtype": "f32", "native": "no compiler", "specs": odd}

    assert len(choose(**common).reasons) == 2
    assert len(choose(**common, flashinfer=True).reasons) == 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_word_that_is_no_switch_is_refused_everywhere(device):
    """Naming the variable and what it holds."""
    words = r"{} \('2'\) must be one of 1, true"
    with pytest.raises(ConfigError, match=words.format(FLASHINFER_SWITCH)):
        choose(device=device, environ={FLASHINFER_SWITCH: "2"})
    with pytest.raises(ConfigError, match=words.format(GRAPHS_SWITCH)):
        select_graphs(None, device=device, cuda_graphs=None, environ={GRAPHS_SWITCH: "2"})


@pytest.mark.parametrize(
    ("backend", "device", "asked", "switch", "on", "named"),
    [
        ("FlashInferBackend", "cuda", None, "", True, "automatic"),
        ("FlashInferBackend", "cuda", True, "off", True, "user"),
        ("FlashInferBackend", "cuda", None, "No", False, "MISTRALRS_CUDA_GRAPHS=No"),
        ("FlashInferBackend", "cuda", False, "1", False, "switched off"),
        ("SdpaBackend", "cuda", None, "", False, "SdpaBackend"),
        (None, "cuda", None, "", False, "not paged"),
        ("CpuBackend", "cpu", None, "1", False, "device is cpu"),
    ],
)
def test_graphs_are_captured_where_flashinfer_attends(backend, device, asked, switch, on, named):
    """Unless somebody switched them off; what stands in the way is said."""
    choice = select_graphs(
        backend, device=device, cuda_graphs=asked, environ={GRAPHS_SWITCH: switch}
    )

    assert choice.on is on
    assert named in choice.reason


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
        ("FlashInferBackend", "bf16", False, True, "", "bf16", "model"),
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


def test_a_type_that_was_asked_for_is_kept():
    """The float8 cache, whatever the model computes in."""
    choice = select_kv_dtype(
        "FlashInferBackend",
        "bf16",
        user_dtype=True,
        fast_halves=False,
        environ={},
        cache_type="f8e4m3",
    )
    assert (choice.dtype, choice.origin) == ("f8e4m3", "user's cache_type")


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
