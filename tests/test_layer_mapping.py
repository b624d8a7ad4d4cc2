"""Layers on several devices: what can be asked for, where they go, and the same tokens.

"cpu" and "cpu:0" stand for two devices: to torch they differ, and what goes from one to the other
is copied.
"""

from __future__ import annotations

import asyncio
import pickle
import types

import attrs
import pytest
import torch

from mistralrs_sdk import (
    AutoDeviceMapParams,
    ConfigError,
    DeviceLayerMapMetadata,
    DeviceMapMetadata,
    DeviceMapSetting,
    EngineConfig,
    MemoryGpuConfig,
    ModelBuilder,
    ModelLoadError,
    PagedAttentionMetaBuilder,
    UnsupportedError,
)
from mistralrs_sdk.attention.backend import Batch
from mistralrs_sdk.attention.flashinfer import LEAST_WORKSPACE
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.mapped import MappedBackend, MappedPart
from mistralrs_sdk.attention.sdpa import SdpaBackend
from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.engine import layer_places, settle
from mistralrs_sdk.engine.kept_memory import WRAPPER_BYTES
from mistralrs_sdk.engine.layer_places import place_layers, refuse_crowded
from mistralrs_sdk.engine.memory import plan_memory
from mistralrs_sdk.engine.pool_size import GIB, MIB, DeviceMemory
from mistralrs_sdk.loading.forms import choose_forms, total_bytes
from mistralrs_sdk.loading.loader import load_model, open_checkpoint, prepare_model
from mistralrs_sdk.models import decoder
from tests.gpu_engine import gpu_engine
from tests.model_helpers import (
    assert_idle,
    continue_ids,
    expected,
    prompt,
    tiny_builder,
    tiny_folder,
)

THREE_RUNS = "cpu:1;cpu:2;cpu:1"
CUDA = [torch.device("cuda", index) for index in range(3)]
CPU = torch.device("cpu")
OTHER = torch.device("cpu", 0)

# What can be asked for


def mapped(*runs: tuple[int | str, int]) -> DeviceMapSetting:
    layers = [DeviceLayerMapMetadata(device, count) for device, count in runs]
    return DeviceMapSetting.Map(DeviceMapMetadata.from_num_device_layers(layers))


def test_a_map_is_written_as_text_or_as_values():
    """Numbers are CUDA devices; both ways are equal, and pickled like every setting."""
    by_text = ModelBuilder("x").with_device_mapping("0:16; cuda:1:8 ;cpu:2")
    by_values = ModelBuilder("x").with_device_mapping(mapped((0, 16), ("cuda:1", 8), ("cpu", 2)))

    assert by_text == by_values == pickle.loads(pickle.dumps(by_values))
    assert str(by_text.config.device_mapping) == "cuda:0:16;cuda:1:8;cpu:2"
    assert "with_device_mapping(DeviceMapSetting.Map(" in repr(by_text)
    assert ModelBuilder("x").with_device_mapping("Auto").config.device_mapping == (
        DeviceMapSetting.Auto(AutoDeviceMapParams.Text(max_seq_len=4096, max_batch_size=1))
    )


def test_a_map_that_asks_for_nothing_is_the_default():
    """mistral.rs' dummy map: all layers on one device."""
    assert ModelBuilder("x").with_device_mapping(DeviceMapSetting.dummy()) == ModelBuilder("x")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mapped((0, 0)), r"cuda:0 \(0\).*at least 1"),
        (lambda: mapped((0, True)), "at least 1"),
        (lambda: mapped((-1, 2)), r"\(-1\).*number of a CUDA device"),
        (lambda: mapped(("mps", 2)), "'mps'"),
        (lambda: DeviceMapMetadata([3]), "DeviceLayerMapMetadata"),
        (lambda: DeviceMapSetting.Map([]), "DeviceMapMetadata"),
        (lambda: DeviceMapSetting.Auto(4096), "AutoDeviceMapParams"),
        (lambda: AutoDeviceMapParams.Text(max_seq_len=0), r"max_seq_len \(0\)"),
        (lambda: ModelBuilder("x").with_device_mapping("16"), "0:16;1:16"),
        (lambda: ModelBuilder("x").with_device_mapping(2), "DeviceMapSetting, or its text"),
        (lambda: ModelBuilder("x").with_device_mapping(None), "needs a value"),
    ],
)
def test_what_is_no_map_is_refused_where_it_is_written(make, words):
    """With the value and what it must be."""
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("name", ["Nccl", "DummyNccl"])
def test_ranks_are_asked_for_otherwise(name):
    """mistral.rs' settings for them name the way out."""
    with pytest.raises(UnsupportedError, match="with_tensor_parallel"):
        getattr(DeviceMapSetting, name)()
    with pytest.raises(UnsupportedError, match="text only"):
        AutoDeviceMapParams.Multimodal()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.with_paged_attn(None), r"paged_attn \(None\)"),
        (lambda b: b.with_lora(), "LoRA adapters"),
        (lambda b: b.with_tensor_parallel(2), r"tensor_parallel \(2\)"),
        (lambda b: b.with_device("cuda:1"), r"device \('cuda:1'\).*leave device out"),
        (lambda b: b.with_force_cpu(), "device"),
    ],
)
def test_what_does_not_go_with_a_map_is_refused(change, words):
    """Both settings are named."""
    with pytest.raises(ConfigError, match=words):
        change(ModelBuilder("x").with_device_mapping("0:2;1:2"))


# Where layers go


def tiny(config: EngineConfig):
    checkpoint = open_checkpoint(ModelSource(model_id=tiny_folder()))
    model = prepare_model(checkpoint)
    forms = choose_forms(model, checkpoint, dtype=torch.bfloat16, packing="none")

    def place(free: dict[int, int], devices=None):
        return place_layers(
            model,
            config,
            forms=forms,
            dtype=torch.bfloat16,
            kv_dtype=torch.bfloat16,
            device=CUDA[0],
            devices=CUDA[: len(free)] if devices is None else devices,
            memory_of=lambda device: DeviceMemory(
                free=free[device.index or 0], total=max(free.values()), is_cpu=False
            ),
        )

    return model, forms, place


def on_gpu(mapping: str | DeviceMapSetting = "auto", **settings) -> EngineConfig:
    return EngineConfig(device="cuda:0", dtype="bf16", device_mapping=mapping, **settings)


def test_by_size_a_model_that_fits_stays_on_the_first_device():
    """Nothing is spread without need."""
    _, _, place = tiny(on_gpu())

    assert place({0: 8 * GIB, 1: 8 * GIB}) is None


def test_by_size_layers_are_spread_so_that_the_pool_is_largest():
    """The first device is not filled with layers until no keys and values go beside them."""
    params = AutoDeviceMapParams.Text(max_seq_len=500_000)
    config = on_gpu(DeviceMapSetting.Auto(params), max_num_seqs=4, max_num_batched_tokens=64)
    model, forms, place = tiny(config)
    free = {0: GIB // 2 + 200 * MIB, 1: GIB // 2 + 200 * MIB}
    params_bytes = 4 * 500_000 * 128  # more than 200 MiB: they do not fit on one

    places = place(free)

    assert params_bytes > 200 * MIB
    assert places is not None
    assert [(device, len(layers)) for device, layers in places.runs] == [(CUDA[0], 2), (CUDA[1], 2)]
    plan = plan_memory(
        model,
        config,
        name="tiny",
        forms=forms,
        dtype=torch.bfloat16,
        memory=DeviceMemory(free=1, total=1, is_cpu=False),
        shares=[
            attrs.evolve(share, memory=attrs.evolve(share.memory, total=share.memory.free))
            for share in places.shares
        ],
    )
    assert 100 * MIB < plan.kv_bytes / 2 < 200 * MIB
    assert plan.weight_bytes == total_bytes(forms)
    assert plan.free_bytes == sum(free.values())


def test_by_size_more_layers_than_there_is_room_for_are_refused():
    """With the MiB that are missing."""
    params = AutoDeviceMapParams.Text(max_seq_len=4_000_000)
    _, _, place = tiny(on_gpu(DeviceMapSetting.Auto(params), max_num_batched_tokens=64))

    with pytest.raises(ModelLoadError, match="exceeds the total capacity by"):
        place({0: GIB, 1: GIB})


def test_layers_left_over_go_to_the_cpu():
    """As in mistral.rs; a device with two runs has one share."""
    _, forms, place = tiny(on_gpu("0:1;1:1;0:1"))

    places = place({0: GIB, 1: GIB})

    assert places is not None
    assert [(str(device), list(layers)) for device, layers in places.runs] == [
        ("cuda:0", [0]),
        ("cuda:1", [1]),
        ("cuda:0", [2]),
        ("cpu", [3]),
    ]
    assert [(str(s.device), s.layers, s.holds_rest) for s in places.shares] == [
        ("cuda:0", (0, 2), True),
        ("cuda:1", (1,), False),
        ("cpu", (3,), False),
    ]
    assert sum(len(share.forms(forms)) for share in places.shares) == len(forms)
    assert str(places.device_of("model.layers.1.mlp.down_proj.weight")) == "cuda:1"
    assert str(places.device_of("model.embed_tokens.weight")) == "cuda:0"


@pytest.mark.parametrize(
    ("mapping", "words"),
    [("0:3;1:3", "places 6 layers and the model has 4"), ("0:1;7:3", "no cuda:7.*cuda:0, cuda:1")],
)
def test_a_map_that_does_not_suit_the_model_or_the_machine_is_refused(mapping, words):
    """Before anything is read, with what there is."""
    _, _, place = tiny(on_gpu(mapping))

    with pytest.raises(ConfigError, match=words):
        place({0: GIB, 1: GIB})


def test_weights_that_do_not_fit_where_they_are_mapped_to_are_refused():
    """The device is named, what it would hold and what is free."""
    _, forms, place = tiny(on_gpu("0:2;1:2"))
    places = place({0: GIB, 1: 1000})
    assert places is not None

    with pytest.raises(ModelLoadError, match=r"cuda:1 does not hold.*2 layers take 0.00 GiB"):
        refuse_crowded(places, forms, needed=total_bytes)


async def test_by_size_there_must_be_gpus():
    """A CPU's memory is one."""
    with pytest.raises(UnsupportedError, match=r"device_mapping \(auto\).*device is cpu"):
        await tiny_builder().with_device_mapping("auto").plan()


def test_the_first_device_of_a_map_is_the_models(monkeypatch):
    """with_device need not be said."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def choose(**settings) -> torch.device:
        return settle._choose_device(EngineConfig(**settings), {})

    assert choose(device_mapping="1:2;0:2") == CUDA[1]
    assert choose(device_mapping="auto") == CUDA[0]
    assert choose(device_mapping="auto", device="cuda") == CUDA[0]
    assert choose(device_mapping="0:2;1:2", device="cuda") == CUDA[0]


# The model


@pytest.fixture
def other_device(monkeypatch):
    """Every second run of a map is on another device."""
    by_hand = layer_places._by_hand

    def apart(*args, **more):
        runs = by_hand(*args, **more)
        return [(OTHER if i % 2 else device, run) for i, (device, run) in enumerate(runs)]

    monkeypatch.setattr(layer_places, "_by_hand", apart)


@pytest.mark.usefixtures("other_device")
@pytest.mark.parametrize("name", ["llama", "mistral_swa", "qwen3", "gemma2", "gemma3"])
async def test_layers_on_several_devices_say_what_hugging_face_says(name):
    """Greedy tokens of prompts in chunks, with a shared prefix, in a pool too small for all."""
    builder = tiny_builder(name, kv_tokens=192).with_max_num_seqs(4)
    shared = prompt(30, seed=1)
    prompts = [[*shared, *prompt(n, seed=n)] for n in (3, 17, 9)] + [prompt(50, seed=5)]
    builder = builder.with_max_num_batched_tokens(24).with_device_mapping(THREE_RUNS)
    async with await builder.build() as model:
        found = await asyncio.gather(*(continue_ids(model, ids, 12) for ids in prompts))
        shown = {line.split()[0]: line for line in model.describe().splitlines()}
        parts = await model.inner().thread.call(lambda engine: engine.runner.backend.parts)
        await assert_idle(model)

    assert found == [expected(name, tuple(ids), 12) for ids in prompts]
    assert "MappedBackend" in shown["attention"]
    assert "cpu:0: layers 1 to 2" in shown["device_mapping"]
    last = range(3, 6 if name == "gemma3" else 4)  # what the map leaves over is on the CPU
    assert [(part.device, part.layers) for part in parts] == [
        (CPU, (0, 3)),
        (OTHER, (1, 2, *last[1:])),
    ]


@pytest.mark.usefixtures("other_device")
async def test_without_a_kv_cache_layers_can_be_mapped_too():
    """Each device attends to what the step brings."""
    plain = ModelBuilder(tiny_folder()).with_dtype("f32").with_num_threads(1).with_no_kv_cache()
    async with await plain.with_device_mapping("cpu:2;cpu:2").build() as model:
        found = await continue_ids(model, prompt(20), 6)

    assert found == expected("llama", tuple(prompt(20)), 6)


async def test_a_mapped_plan_is_what_is_built():
    """The pool is of the whole model: blocks, bytes of a token, and where layers are."""
    builder = tiny_builder(kv_tokens=160).with_device_mapping(THREE_RUNS)
    plan = await builder.plan()

    async with await builder.build() as model:
        stats = await model.stats()

    one = await tiny_builder(kv_tokens=160).plan()
    assert stats.total_blocks == plan.num_blocks == one.num_blocks == 20
    assert plan.kv_bytes_per_token == one.kv_bytes_per_token
    assert (plan.weight_bytes, plan.activation_bytes) == (one.weight_bytes, one.activation_bytes)
    assert plan.is_mapped
    assert "3 runs" in str(plan)
    assert "cpu: layers 0 to 0, cpu: layers 1 to 2, cpu: layers 3 to 3" in str(plan)


@pytest.mark.usefixtures("other_device")
async def test_a_plan_shows_what_each_device_holds():
    """Layers, weights, step and keys and values of each, which add up, and are what is built."""
    builder = tiny_builder(kv_tokens=160).with_dtype("f16").with_device_mapping(THREE_RUNS)
    plan = await builder.plan()

    first, second = plan.devices
    assert (first.device, first.layers, first.holds_rest) == ("cpu", (0, 3), True)
    assert (second.device, second.layers, second.holds_rest) == ("cpu:0", (1, 2), False)
    for name in ("weight_bytes", "activation_bytes", "attention_bytes", "kv_bytes", "free_bytes"):
        assert getattr(first, name) + getattr(second, name) == getattr(plan, name)
    assert first.kv_bytes == second.kv_bytes
    assert 0 < second.activation_bytes < first.activation_bytes, "logits are on the first"
    assert 0 < second.weight_bytes < first.weight_bytes
    async with await builder.build() as model:
        parts = await model.inner().thread.call(lambda engine: engine.runner.backend.parts)
        caches = [part.backend._cache for part in parts]
    held = [sum(store.nbytes for store in (*cache.k, *cache.v)) for cache in caches]
    assert held == [first.kv_bytes, second.kv_bytes]
    (line,) = [line for line in str(plan).splitlines() if line.startswith("cpu:0 ")]
    for words in (f"{second.total_bytes / MIB:.1f} MiB", "2 layers: weights", "step", "KV cache"):
        assert words in line
    assert "2 layers and what is in none: weights" in str(plan)


@pytest.mark.usefixtures("other_device")
async def test_layers_that_one_device_holds_are_no_table_of_devices():
    """There the plan is that of the device."""
    assert (await tiny_builder(kv_tokens=160).plan()).devices == ()


@pytest.mark.usefixtures("other_device")
async def test_runs_of_one_device_share_flashinfers_workspace():
    """Three runs on two devices have two, as they are planned, and say what Hugging Face says."""
    with gpu_engine(graphs=False) as played:
        async with await tiny_builder().with_device_mapping(THREE_RUNS).build() as model:
            found = await continue_ids(model, prompt(20), 6)

    assert found == expected("llama", tuple(prompt(20)), 6)
    assert len({wrapper.workspace.data_ptr() for wrapper in played.reference.wrappers}) == 2


def test_a_plan_counts_one_workspace_for_each_device(monkeypatch):
    """However many runs of layers it has."""
    properties = types.SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    config = on_gpu("0:1;1:2;0:1", flashinfer=True)
    model, forms, place = tiny(config)
    places = place({0: 2 * GIB, 1: 2 * GIB})
    assert places is not None

    plan = plan_memory(
        model,
        config,
        name="tiny",
        forms=forms,
        dtype=torch.bfloat16,
        memory=DeviceMemory(free=1, total=1, is_cpu=False),
        shares=places.shares,
    )

    assert [each.attention_bytes for each in plan.devices] == [
        LEAST_WORKSPACE + 2 * WRAPPER_BYTES
    ] * 2
    assert plan.attention_bytes == sum(each.attention_bytes for each in plan.devices)
    assert "FlashInfer 1" in str(plan.devices[1])


def mapped_model(runs):
    """A loaded model over a map, and its backend with 9 blocks of 8."""
    checkpoint = open_checkpoint(ModelSource(model_id=tiny_folder()))
    model = load_model(checkpoint, dtype=torch.float32, device=CPU)
    model.model.runs = runs
    parts = []
    for device, layers in runs:
        specs = [model.specs[layer] for layer in layers]
        cache = PagedKVCache(specs, num_blocks=9, block_size=8, dtype=torch.float32, device=device)
        parts.append(MappedPart(device=device, layers=layers, backend=SdpaBackend(cache)))
    return model, MappedBackend(parts)


def batch_of(rows: int) -> Batch:
    return Batch(
        input_ids=torch.arange(3, 3 + rows),
        positions=torch.arange(rows),
        slot_mapping=torch.arange(8, 8 + rows),
        logits_indices=torch.tensor([rows - 1]),
        query_start=[0, rows],
        seq_lens=[rows],
        block_tables=[[1, 2]],
    )


def test_hidden_states_go_over_once_per_border(monkeypatch):
    """One tensor to each next run, and the rows whose logits are wanted back to the first."""
    runs = [(CPU, range(1)), (CPU, range(1, 3)), (CPU, range(3, 4))]
    model, backend = mapped_model(runs)
    crossed = []
    across = decoder._across

    def watch(x, added, device):
        crossed.append((tuple(x.shape), device))
        return across(x, added, device)

    monkeypatch.setattr(decoder, "_across", watch)
    batch = batch_of(5)
    backend.plan(batch)
    model(batch, backend)

    size = model.config.hidden_size
    assert crossed == [((5, size), CPU), ((5, size), CPU), ((1, size), CPU)]


def test_a_mapped_model_computes_the_same_bits():
    """The sum that goes over is the one that the next norm would have made."""
    model, backend = mapped_model([(CPU, range(2)), (CPU, range(2, 4))])
    batch = batch_of(7)
    backend.plan(batch)
    found = model(batch, backend)

    alone, one = mapped_model([(CPU, range(4))])
    alone.model.runs = ()
    one.plan(batch)
    assert torch.equal(found, alone(batch, one))


def test_each_part_keeps_the_keys_of_its_own_layers():
    """A layer's keys are under its number within the run."""
    model, backend = mapped_model([(CPU, range(1)), (CPU, range(1, 4))])
    batch = batch_of(5)
    backend.plan(batch)
    model(batch, backend)

    caches = [part.backend._cache for part in backend.parts]
    assert [len(cache.k) for cache in caches] == [1, 3]
    assert all(k[1].abs().sum() > 0 for cache in caches for k in cache.k)


class Watched:
    """A tensor's copies to devices."""

    def __init__(self) -> None:
        self.devices: list[torch.device] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        watch = self.devices

        class Tensor(torch.Tensor):
            def to(self, device):
                watch.append(device)
                return super().to(device)

        return tensor.as_subclass(Tensor)


def test_attention_gets_no_tensor_on_another_device_but_the_slots():
    """Once for each device, however many runs of layers it has."""
    layers = {CPU: (0, 2), OTHER: (1, 3)}
    _, backend = mapped_model(layers.items())
    copies = {name: Watched() for name in ("input_ids", "positions", "slot_mapping")}
    batch = batch_of(5)
    watched = {name: copies[name].of(getattr(batch, name)) for name in copies}

    backend.plan(attrs.evolve(batch, **watched))

    assert {name: found.devices for name, found in copies.items()} == {
        "input_ids": [],
        "positions": [],
        "slot_mapping": [CPU, OTHER],
    }


def test_a_mapped_model_is_not_captured():
    """A graph belongs to one device."""
    _, backend = mapped_model([(CPU, range(2)), (CPU, range(2, 4))])

    assert not backend.supports_graphs
    with pytest.raises(ValueError, match="MappedBackend has no CUDA graphs"):
        backend.plan(batch_of(1), graph_size=1)


def test_graphs_are_off_with_several_devices_and_refused_if_asked_for():
    """The reason is where describe() shows it."""
    checkpoint = open_checkpoint(ModelSource(model_id=tiny_folder()))
    _, forms, place = tiny(on_gpu("0:2;1:2"))
    places = place({0: GIB, 1: GIB})

    def settled(origin: str) -> tuple[EngineConfig, dict[str, str]]:
        origins = {"cuda_graphs": origin}
        config = settle._with_places(
            on_gpu("0:2;1:2", cuda_graphs=True),
            places,
            checkpoint,
            forms,
            device=CUDA[0],
            origins=origins,
        )
        return config, origins

    config, origins = settled("automatic on cuda")
    assert config.cuda_graphs is False
    assert origins["cuda_graphs"] == "the layers are on several devices"
    assert origins["device_mapping"] == "cuda:0: layers 0 to 1, cuda:1: layers 2 to 3"
    with pytest.raises(UnsupportedError, match=r"cuda_graphs \(True\).*several devices"):
        settled("user")


def test_the_pool_of_a_map_must_fit_on_each_device():
    """An amount in MiB is of the whole pool; the device that lacks it is named."""
    paged = PagedAttentionMetaBuilder().with_gpu_memory(MemoryGpuConfig.MbAmount(600)).build()
    model, forms, place = tiny(on_gpu("0:1;1:3", paged_attn=paged))
    places = place({0: GIB, 1: GIB // 2 + 300 * MIB})
    assert places is not None

    with pytest.raises(ModelLoadError, match=r"MbAmount\(600\).*needs 0.44 GiB on cuda:1 but only"):
        plan_memory(
            model,
            on_gpu("0:1;1:3", paged_attn=paged),
            name="tiny",
            forms=forms,
            dtype=torch.bfloat16,
            memory=DeviceMemory(free=1, total=1, is_cpu=False),
            shares=places.shares,
        )
