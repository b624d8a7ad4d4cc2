"""Adapters by name: policies, limits, what requests hold, and what the refusals say."""

from __future__ import annotations

import functools
import gc
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mistralrs_sdk import ModelBuilder
from mistralrs_sdk.adapters import (
    AdapterSelection,
    LoraAdapterLoadPolicy,
    LoraAdapterSpec,
    LoraRuntimeConfig,
)
from mistralrs_sdk.engine.adapters import AdapterRegistry
from mistralrs_sdk.errors import AdapterError, ConfigError, ModelLoadError, RequestError
from mistralrs_sdk.layers.lora import LoraLayers
from mistralrs_sdk.models import build_model, read_config
from tests.adapter_files import random_pairs, shapes_of, write_adapter
from tests.checkpoint_files import config_for

CONFIG = config_for("llama")
POLICY = LoraAdapterLoadPolicy


@functools.cache
def layers() -> LoraLayers:
    with torch.device("meta"):
        model = build_model(read_config(CONFIG))
    return LoraLayers(model, packed=False, dtype=torch.float32, device=torch.device("cpu"))


def locate(spec: LoraAdapterSpec) -> Path:
    return Path(spec.source)


def registry(**limits) -> AdapterRegistry:
    made = AdapterRegistry(LoraRuntimeConfig(**limits), locate)
    made.serve(layers())
    return made


@pytest.fixture
def folder(tmp_path) -> Callable[..., Path]:
    """A function that writes the adapter with this number, once."""

    def write(number: int = 0, *, rank: int = 4) -> Path:
        place = tmp_path / f"{number}-{rank}"
        if not place.exists():
            tensors = random_pairs(shapes_of(CONFIG), rank, leaves=("q_proj",), seed=number)
            write_adapter(place, tensors, leaves=("q_proj",), rank=rank)
        return place

    return write


def spec(alias: str, place: Path) -> LoraAdapterSpec:
    return LoraAdapterSpec(alias, place)


def kind_of(error: pytest.ExceptionInfo[AdapterError]) -> str:
    return error.value.kind


SIZE = 2 * 4 * (4 * 72 + 72 * 4)
"""Bytes of one adapter: two layers, float32, rank 4 of a 72 x 72 matrix."""


# Loading


def test_a_loaded_adapter_is_described(folder):
    """Where it came from, its content's hash, its rank, its memory."""
    adapters = registry()

    info = adapters.load(LoraAdapterSpec("sql", folder(), base_model_name="tiny"))

    assert (info.alias, info.source, info.revision) == ("sql", str(folder()), None)
    assert (info.rank, info.bytes, info.base_model_name) == (4, SIZE, "tiny")
    assert len(info.generation) == 64
    assert adapters.infos() == (info,)


def test_a_taken_name_is_refused_without_a_policy(folder):
    """Create is the default; the message names where the other came from and the way out."""
    adapters = registry()
    first = adapters.load(spec("a", folder(0)))

    with pytest.raises(AdapterError, match=r"loaded already, from .*Upsert\(\)") as error:
        adapters.load(spec("a", folder(1)))

    assert kind_of(error) == "already_loaded"
    assert adapters.infos() == (first,)


def test_upsert_replaces_or_creates(folder):
    """The name then leads to the new weights."""
    adapters = registry()

    first = adapters.load(spec("a", folder(0)), POLICY.Upsert())
    second = adapters.load(spec("a", folder(1)), POLICY.Upsert())

    assert first.generation != second.generation
    assert adapters.infos() == (second,)


def test_compare_and_swap_replaces_only_the_named_generation(folder):
    """Somebody else's replacement is not lost."""
    adapters = registry()
    first = adapters.load(spec("a", folder(0)))
    second = adapters.load(spec("a", folder(1)), POLICY.CompareAndSwap(first.generation))

    with pytest.raises(AdapterError, match=second.generation) as error:
        adapters.load(spec("a", folder(2)), POLICY.CompareAndSwap(first.generation))

    assert kind_of(error) == "generation_mismatch"
    with pytest.raises(AdapterError, match="'b' is unknown") as error:
        adapters.load(spec("b", folder(2)), POLICY.CompareAndSwap(first.generation))
    assert kind_of(error) == "not_found"
    assert adapters.infos() == (second,)


def test_equal_content_is_in_memory_once(folder):
    """Two names lead to one generation."""
    adapters = registry()
    adapters.load(spec("a", folder()))
    adapters.load(spec("b", folder()))

    status = adapters.status()

    assert [info.alias for info in status.adapters] == ["a", "b"]
    (generation,) = status.generations
    assert generation.aliases == ("a", "b")
    assert status.resident_bytes == SIZE


def test_a_file_that_does_not_load_changes_nothing(folder, tmp_path):
    """Not even when it was to replace another."""
    adapters = registry()
    first = adapters.load(spec("a", folder()))

    with pytest.raises(ModelLoadError, match="adapter_config"):
        adapters.load(spec("a", tmp_path / "none"), POLICY.Upsert())

    assert adapters.infos() == (first,)
    assert adapters.status().resident_bytes == SIZE


# Limits


def test_a_rank_over_the_limit_is_refused(folder):
    """Before its weights are read."""
    with pytest.raises(AdapterError, match=r"rank 8: max_rank is 4") as error:
        registry(max_rank=4).load(spec("a", folder(rank=8)))

    assert kind_of(error) == "rank_limit"


def test_a_name_too_many_is_refused_and_replacing_is_not(folder):
    """The limit counts names."""
    adapters = registry(max_adapters=2)
    adapters.load(spec("a", folder(0)))
    adapters.load(spec("b", folder(1)))

    with pytest.raises(AdapterError, match="max_adapters is 2") as error:
        adapters.load(spec("c", folder(2)))

    assert kind_of(error) == "adapter_limit"
    adapters.load(spec("b", folder(2)), POLICY.Upsert())
    adapters.unload("a")
    adapters.load(spec("c", folder(0)))


def test_bytes_count_what_running_requests_hold_too(folder):
    """Memory is memory, whether it has a name or not."""
    adapters = registry(max_bytes=2 * SIZE)
    adapters.load(spec("a", folder(0)))
    lease = adapters.lease("a")
    adapters.load(spec("a", folder(1)), POLICY.Upsert())

    with pytest.raises(AdapterError, match=f"max_bytes is {2 * SIZE}") as error:
        adapters.load(spec("b", folder(2)))

    assert kind_of(error) == "byte_limit"
    assert lease is not None
    lease.release()
    adapters.load(spec("b", folder(2)))


@pytest.mark.parametrize("name", ["max_adapters", "max_rank", "max_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_limits_are_whole_numbers_of_at_least_one(name, value):
    """There is no 0 for "no limit"."""
    with pytest.raises(ConfigError, match=name):
        LoraRuntimeConfig(**{name: value})


@pytest.mark.parametrize(
    ("alias", "kind"),
    [("", "invalid_alias"), (" ", "invalid_alias"), (3, "invalid_alias"),
     ("f" * 64, "invalid_alias"), ("é" * 129, "alias_too_long")],
)  # fmt: skip
def test_a_name_that_cannot_be_one_is_refused(alias, kind):
    """At most 256 bytes, and nothing that looks like a generation."""
    with pytest.raises(AdapterError) as error:
        LoraAdapterSpec(alias, "folder")

    assert kind_of(error) == kind
    assert LoraAdapterSpec("é" * 128, "folder").alias


# Requests


def test_a_request_without_an_adapter_has_none(folder):
    """The base model needs no lease, with or without adapters."""
    assert registry().lease(None) is None
    assert AdapterRegistry(None, locate).lease(None) is None


def test_an_unknown_name_lists_those_there_are(folder):
    """It is a RequestError: the request is at fault."""
    adapters = registry()
    adapters.load(spec("b", folder(0)))
    adapters.load(spec("a", folder(1)))

    with pytest.raises(RequestError, match=r"'sql' is unknown; loaded are 'a', 'b'"):
        adapters.lease("sql")
    with pytest.raises(AdapterError, match="no adapter has generation") as error:
        adapters.lease("0" * 64)
    assert kind_of(error) == "generation_not_found"


def test_a_model_without_adapters_says_how_to_get_them(folder):
    """For requests and for loading."""
    adapters = AdapterRegistry(None, locate)

    for call in (lambda: adapters.lease("a"), lambda: adapters.load(spec("a", folder()))):
        with pytest.raises(AdapterError, match=r"with_lora\(\)") as error:
            call()
        assert kind_of(error) == "runtime_unavailable"
    assert adapters.infos() == ()


def test_a_request_can_name_the_generation(folder):
    """Exactly these weights, whatever name they have."""
    adapters = registry()
    info = adapters.load(spec("a", folder()))

    lease = adapters.lease(info.generation)

    assert lease is not None
    assert lease.generation == info.generation


def test_a_running_request_keeps_the_weights_it_was_admitted_with(folder):
    """Replaced or taken away, they stay until it ends, and are then gone."""
    adapters = registry()
    first = adapters.load(spec("a", folder(0)))
    lease = adapters.lease("a")
    assert lease is not None
    adapters.load(spec("a", folder(1)), POLICY.Upsert())
    adapters.unload("a")

    status = adapters.status()

    assert status.adapters == ()
    assert (status.resident_generations, status.retired_generations) == (1, 1)
    assert status.generations[0].generation == lease.generation == first.generation
    assert lease.weights is not None

    lease.release()

    assert adapters.status().resident_bytes == 0


def test_ten_rounds_of_loading_and_unloading_leave_nothing(folder):
    """No weights stay behind."""
    adapters = registry()
    gc.collect()
    for number in range(10):
        adapters.load(spec("a", folder(number % 3)))
        adapters.unload("a")

    assert adapters.status().generations == ()


def test_unloading_checks_the_generation_it_is_given(folder):
    """What somebody else loaded under the name stays."""
    adapters = registry()
    info = adapters.load(spec("a", folder()))

    with pytest.raises(AdapterError) as error:
        adapters.unload("a", generation="0" * 64)

    assert kind_of(error) == "generation_mismatch"
    assert adapters.unload("a", generation=info.generation) == info
    with pytest.raises(AdapterError, match="none is loaded") as error:
        adapters.unload("a")
    assert kind_of(error) == "not_found"


def test_loads_at_the_same_time_keep_the_limits(folder):
    """Eight threads, room for three: three are in, the others are refused."""
    adapters = registry(max_bytes=3 * SIZE)
    outcomes: list[str] = []

    def load(number: int) -> None:
        try:
            adapters.load(spec(f"a{number}", folder(number)))
            outcomes.append("loaded")
        except AdapterError as error:
            outcomes.append(error.kind)

    for number in range(8):
        folder(number)
    threads = [threading.Thread(target=load, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(outcomes) == ["byte_limit"] * 5 + ["loaded"] * 3
    assert adapters.status().resident_bytes == 3 * SIZE


# Values


def test_an_adapter_is_written_as_alias_and_source():
    """The source may hold further equal signs."""
    assert LoraAdapterSpec.parse("sql=org/sql=1") == LoraAdapterSpec("sql", "org/sql=1")
    for text in ("sql", "=x", "sql="):
        with pytest.raises(ConfigError, match="alias=source"):
            LoraAdapterSpec.parse(text)


def test_a_selection_is_read_from_text():
    """A generation if it looks like one, else an alias; `str` is what was read."""
    for text in ("sql", "0" * 64):
        assert str(AdapterSelection.parse(text)) == text
    assert AdapterSelection.parse("0" * 64).generation
    assert AdapterSelection.parse("0" * 63).alias
    with pytest.raises(AdapterError):
        AdapterSelection()


def test_a_policy_to_swap_needs_a_generation():
    """And the others take none."""
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        POLICY.CompareAndSwap("v2")
    with pytest.raises(ConfigError):
        POLICY("create", "0" * 64)
    assert repr(POLICY.Upsert()) == "LoraAdapterLoadPolicy.Upsert()"


def test_a_builder_names_what_is_wrong_with_its_adapters():
    """A name twice, more of them than the limit, limits that are none."""
    builder = ModelBuilder("x").with_lora_adapter("a", "one")
    for build, message in (
        (lambda: builder.with_lora_adapter("a", "two"), "two adapters have the alias 'a'"),
        (lambda: builder.with_lora_adapters(["b=two"]).with_lora(max_adapters=1), "max_adapters"),
        (lambda: builder.with_lora_adapters("b=two"), "must be a list"),
        (lambda: builder.with_lora_runtime_config(16), "must be a LoraRuntimeConfig"),
        (lambda: builder.with_lora(max_rank=0), r"max_rank \(0\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            build()


def test_a_builder_with_adapters_is_a_value():
    """Comparable, hashable, picklable; the first adapter switches them on with the usual limits."""
    builder = ModelBuilder("x").with_lora_adapter("a", "one").with_lora_adapters(["b=two"])

    assert builder == ModelBuilder("x").with_lora_adapters(["a=one", LoraAdapterSpec("b", "two")])
    assert pickle.loads(pickle.dumps(builder)) == builder
    assert len({builder, builder.with_lora()}) == 2
    assert builder.config.lora == builder.with_lora().config.lora == LoraRuntimeConfig()
    assert ModelBuilder("x").config.lora is None


def test_an_adapter_error_survives_pickling():
    """Kind and message."""
    error = pickle.loads(pickle.dumps(AdapterError("no", kind="not_found")))

    assert (str(error), error.kind) == ("no", "not_found")
