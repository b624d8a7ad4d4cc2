"""The whole engine with FlashInfer's wrappers in torch, and who decides whether they are used."""

from __future__ import annotations

import asyncio

import attrs
import pytest
import torch

from mistralrs_sdk import (
    ConfigError,
    EngineConfig,
    ModelBuilder,
    PagedAttentionMetaBuilder,
    UnsupportedError,
)
from mistralrs_sdk.attention import flashinfer
from mistralrs_sdk.attention.backend import AttentionSpec
from mistralrs_sdk.attention.flashinfer import FlashInferBackend, flashinfer_missing
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.select import Choice
from mistralrs_sdk.config import ModelDType, PagedCacheType
from mistralrs_sdk.engine import build, paged_attention
from mistralrs_sdk.engine.paged_attention import choose_attention, make_backend
from tests.flashinfer_reference import FlashInferReference
from tests.model_helpers import assert_idle, continue_ids, expected, prompt, tiny_builder

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1)
CUDA = torch.device("cuda")


@pytest.fixture
def reference(monkeypatch) -> FlashInferReference:
    """The engine takes FlashInfer on this CPU, and the reference for the module."""
    module = FlashInferReference(any_shape=True)
    monkeypatch.setattr(flashinfer, "_flashinfer", lambda: module)
    monkeypatch.setattr(
        paged_attention, "select_backend", lambda **facts: Choice(name="FlashInferBackend")
    )
    return module


@pytest.mark.parametrize(
    "name", ["llama", "llama_gqa93", "mistral_swa", "qwen3", "gemma2", "gemma3"]
)
async def test_an_engine_on_flashinfer_says_what_hugging_face_says(reference, name):
    """Greedy tokens of prompts that arrive together, in chunks, with a prefix that is shared, in a
    pool too small for all of them, are those of each alone."""
    builder = tiny_builder(name, kv_tokens=192).with_max_num_seqs(4)
    shared = prompt(30, seed=1)
    prompts = [[*shared, *prompt(n, seed=n)] for n in (3, 17, 9)] + [prompt(50, seed=5)]
    async with await builder.with_max_num_batched_tokens(24).build() as model:
        found = await asyncio.gather(*(continue_ids(model, ids, 16) for ids in prompts))
        assert "FlashInferBackend" in model.describe()
        await assert_idle(model)

    assert found == [expected(name, tuple(ids), 16) for ids in prompts]
    assert {"plan prefill", "plan decode"} <= set(reference.calls)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
async def test_halves_are_planned_as_they_are_computed(reference, dtype):
    """Queries, keys and values are of the model's dtype, and the plans say so."""
    async with await tiny_builder().with_dtype(dtype).build() as model:
        await continue_ids(model, prompt(20), 4)

    types = {(w.options["q_data_type"], w.options["kv_data_type"]) for w in reference.wrappers}
    wanted = {"f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    assert types == {(wanted, wanted)}


# When the kernels do not work


class Broken:
    """FlashInfer on a machine without a compiler."""

    def __init__(self, *args, **options) -> None:
        raise RuntimeError("nvcc: not found")


def broken(reference: FlashInferReference) -> None:
    reference.BatchPrefillWithPagedKVCacheWrapper = Broken


async def test_kernels_that_do_not_compile_leave_the_work_to_torch(reference, caplog):
    """The model is there all the same, says so, and says the same."""
    broken(reference)
    async with await tiny_builder().build() as model:
        found = await continue_ids(model, prompt(20), 8)
        shown = {line.split()[0]: line for line in model.describe().splitlines()}
        config = model.config()

    assert found == expected("llama", tuple(prompt(20)), 8)
    assert "SdpaBackend" in shown["attention"]
    assert "nvcc: not found" in shown["attention"]
    assert "nvcc: not found" in shown["flashinfer"]
    assert (config.flashinfer, config.cuda_graphs) == (False, False)
    assert "FlashInfer is not used" in caplog.text


@pytest.mark.parametrize(
    ("asked", "dtype", "named"),
    [
        ({"flashinfer": True}, torch.float16, r"^flashinfer \(True\) cannot"),
        ({"cuda_graphs": True}, torch.float16, r"^cuda_graphs \(True\) cannot"),
        ({}, torch.float8_e4m3fn, r"^cache_type \(f8e4m3\) cannot"),
        ({"cuda_graphs": False}, torch.float16, None),
    ],
)
def test_kernels_that_do_not_compile_fail_what_was_asked_for(reference, asked, dtype, named):
    """A build that asked for FlashInfer, or for what needs it, ends with the reason."""
    broken(reference)
    config = EngineConfig(**{"flashinfer": True, "cuda_graphs": True, "max_model_len": 64} | asked)
    names = ("flashinfer", "cuda_graphs")
    origins = {name: "user" if name in asked else "automatic on cuda" for name in names}
    cache = PagedKVCache([SPEC], num_blocks=9, block_size=8, dtype=dtype, device="cpu")

    def make():
        return make_backend(
            "FlashInferBackend", cache, [SPEC], config=config, dtype=torch.float16, origins=origins
        )

    if named is None:
        assert make()[0].cuda_graphs is False
        assert origins["cuda_graphs"] == "user"
        return
    with pytest.raises(UnsupportedError, match=named) as caught:
        make()
    assert "nvcc: not found" in str(caught.value)


# Who decides


def settings(**given) -> EngineConfig:
    return EngineConfig(**{"device": "cuda", "dtype": "bf16"} | given)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of compute capability 9.0 with FlashInfer, as far as choosing asks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(paged_attention, "flashinfer_missing", lambda: None)


def choose(config: EngineConfig, *specs: AttentionSpec, device: torch.device = CUDA):
    """What is resolved, and where it came from."""
    origins = {"dtype": "automatic"}
    resolved, backend, kv = choose_attention(config, device, specs or [SPEC], origins)
    return resolved, backend, kv, origins


@pytest.mark.parametrize(("device", "current"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])])
async def test_the_engines_thread_has_the_models_gpu_as_its_current_one(
    device, current, monkeypatch
):
    """Kernels that are not torch's go there, whichever GPU is named; "cuda" is current already."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(str(device)))
    make_current = build.make_current
    monkeypatch.setattr(build, "make_current", lambda _: make_current(torch.device(device)))

    async with await tiny_builder("llama").build():
        assert found == current


@pytest.mark.usefixtures("gpu")
def test_flashinfer_and_graphs_are_on_where_they_can_be():
    """With nothing set, a GPU that can has both."""
    config, backend, kv, origins = choose(settings())

    assert (config.flashinfer, config.cuda_graphs) == (True, True)
    assert (backend, kv) == ("FlashInferBackend", ModelDType.BF16)
    assert origins["flashinfer"] == origins["cuda_graphs"] == "automatic on cuda"
    assert origins["attention"] == "automatic"


@pytest.mark.usefixtures("gpu")
def test_graphs_can_be_off_alone():
    """FlashInfer attends without them."""
    config, backend, _, origins = choose(settings(cuda_graphs=False))

    assert (config.flashinfer, config.cuda_graphs) == (True, False)
    assert (backend, origins["cuda_graphs"]) == ("FlashInferBackend", "user")


@pytest.mark.usefixtures("gpu")
def test_ranks_that_hold_a_model_together_capture_if_they_are_asked_to():
    """FlashInfer attends on each of them; why there are no graphs unasked is said."""
    config, backend, _, origins = choose(settings(tensor_parallel=2))

    assert (config.flashinfer, config.cuda_graphs) == (True, False)
    assert (backend, origins["cuda_graphs"]) == (
        "FlashInferBackend",
        "2 ranks hold the model together, and capture only if they are asked to",
    )
    config, _, _, origins = choose(settings(tensor_parallel=2, cuda_graphs=True))
    assert (config.cuda_graphs, origins["cuda_graphs"]) == (True, "user")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("by", ["user", "MISTRALRS_FLASHINFER_DECODE=Off"])
def test_without_flashinfer_torch_attends_and_graphs_are_off(by, monkeypatch):
    """Whoever switched it off is named."""
    if by != "user":
        monkeypatch.setenv(*by.split("="))

    config, backend, _, origins = choose(settings(flashinfer=False if by == "user" else None))

    assert (config.flashinfer, config.cuda_graphs, backend) == (False, False, "SdpaBackend")
    assert by in origins["flashinfer"]
    assert "switched off" in origins["attention"]
    assert "SdpaBackend" in origins["cuda_graphs"]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["MISTRALRS_FLASHINFER_DECODE", "MISTRALRS_CUDA_GRAPHS"])
def test_a_variable_counts_unless_the_setting_says_otherwise(name, monkeypatch):
    """What is set in code wins over the environment."""
    monkeypatch.setenv(name, "FALSE")

    config = choose(settings(flashinfer=True, cuda_graphs=True))[0]
    assert (config.flashinfer, config.cuda_graphs) == (True, True)
    assert choose(settings())[0].cuda_graphs is False


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["MISTRALRS_FLASHINFER_DECODE", "MISTRALRS_CUDA_GRAPHS"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_variable_that_is_neither_on_nor_off_is_refused(name, device, monkeypatch):
    """On every device: a slip must not wait for a GPU to be found."""
    monkeypatch.setenv(name, "maybe")

    with pytest.raises(ConfigError, match=rf"{name} \('maybe'\) must be one of 1, true"):
        choose(settings(device=device, dtype="f32"), device=torch.device(device))


@pytest.mark.usefixtures("gpu")
def test_a_float8_cache_is_flashinfers(monkeypatch):
    """The type that was asked for is kept; where FlashInfer cannot read it, the build fails."""
    paged = PagedAttentionMetaBuilder().with_paged_cache_type("f8e4m3").build()

    _, backend, kv, origins = choose(settings(paged_attn=paged))

    assert (backend, kv) == ("FlashInferBackend", PagedCacheType.F8E4M3)
    assert paged_attention.TORCH_DTYPES[kv] is torch.float8_e4m3fn
    assert origins["kv_dtype"] == "user's cache_type"
    odd = attrs.evolve(SPEC, head_dim=80)
    with pytest.raises(UnsupportedError, match=r"cache_type \(f8e4m3\).*head_dim.*80.*auto"):
        choose(settings(paged_attn=paged), odd)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UnsupportedError, match=r"f8e4m3 needs compute capability 8.0.* 7.5"):
        choose(settings(paged_attn=paged, dtype="f16"))


@pytest.mark.usefixtures("gpu")
def test_asking_for_flashinfer_names_every_obstacle(monkeypatch):
    """The reasons all at once, so that nobody removes one to find the next."""
    monkeypatch.setattr(paged_attention, "flashinfer_missing", lambda: "it is not installed")
    odd = attrs.evolve(SPEC, head_dim=80)

    with pytest.raises(UnsupportedError) as caught:
        choose(settings(flashinfer=True, dtype="f32"), odd)

    for words in ("flashinfer (True)", "not f32", "not 80", "not installed", "with_flashinfer"):
        assert words in str(caught.value)


@pytest.mark.usefixtures("gpu")
def test_asking_for_graphs_names_what_keeps_torch_attending():
    """Graphs need FlashInfer, so that its obstacles are theirs."""
    with pytest.raises(UnsupportedError, match=r"cuda_graphs \(True\).*SdpaBackend.*not f32"):
        choose(settings(cuda_graphs=True, dtype="f32"))


@pytest.mark.parametrize("method", ["with_flashinfer", "with_cuda_graphs"])
async def test_a_cpu_refuses_what_it_cannot_have(method):
    """At build, with the device named; a plan is refused in the same words."""
    builder = getattr(tiny_builder(), method)()
    with pytest.raises(UnsupportedError, match=r"\(True\).*device is cpu.*with_") as built:
        await builder.build()
    with pytest.raises(UnsupportedError) as planned:
        await builder.plan()

    assert str(built.value) == str(planned.value)


async def test_a_cpu_says_that_it_has_neither():
    """Both are resolved to off, with the reason; nobody has to ask."""
    async with await tiny_builder().build() as model:
        shown = model.describe().splitlines()
        config = model.config()

    assert (config.flashinfer, config.cuda_graphs) == (False, False)
    for name in ("flashinfer", "cuda_graphs"):
        (line,) = (line for line in shown if line.startswith(f"{name} "))
        assert line.split() == [name, "False", "the", "device", "is", "cpu"]


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda b: b.with_paged_attn(None).with_flashinfer(), r"paged_attn \(None\)"),
        (lambda b: b.with_cuda_graphs().with_no_kv_cache(), r"no_kv_cache \(True\)"),
        (lambda b: b.with_flashinfer(False).with_cuda_graphs(), r"flashinfer \(False\)"),
        (
            lambda b: b.with_flashinfer(False).with_paged_attn(
                PagedAttentionMetaBuilder().with_paged_cache_type("f8e4m3").build()
            ),
            r"cache_type \(f8e4m3\)",
        ),
        (lambda b: b.with_flashinfer("yes"), r"with_flashinfer\('yes'\).*True or False"),
        (lambda b: b.with_cuda_graphs(None), r"with_cuda_graphs\(None\): needs a value"),
    ],
)
def test_contradictions_are_refused_where_they_are_written(build, named):
    """FlashInfer reads a paged cache, and only what it computes is captured."""
    with pytest.raises(ConfigError, match=named):
        build(ModelBuilder("x"))


def test_a_builder_shows_its_switches():
    """On and off, as they are written."""
    shown = repr(ModelBuilder("x").with_flashinfer().with_cuda_graphs(False))

    assert shown == "ModelBuilder('x').with_flashinfer().with_cuda_graphs(False)"


# Whether the module is there


def test_a_module_that_is_not_installed_is_a_reason(monkeypatch):
    """It names the extra to install."""
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: None)

    assert flashinfer_missing() == (
        'flashinfer-python is not installed: pip install "mistralrs_sdk[cuda]"'
    )


def test_a_module_that_does_not_import_is_a_reason(monkeypatch):
    """Whatever it raises: a library it loads, a driver it asks."""

    def fail():
        raise OSError("libcudart.so.13: cannot open")

    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(flashinfer, "_flashinfer", fail)

    assert "OSError: libcudart.so.13" in (flashinfer_missing() or "")


def test_the_backend_takes_the_module_by_itself(reference):
    """Only tests hand it another one."""
    cache = PagedKVCache([SPEC], num_blocks=9, block_size=8, dtype=torch.float16, device="cpu")
    backend = FlashInferBackend(
        cache, [SPEC], dtype=torch.float16, max_num_seqs=2, max_model_len=64
    )

    backend.try_out()

    assert "run decode" in reference.calls
