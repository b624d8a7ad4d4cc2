"""`mistralrs-sdk tune`: what it measures and makes of it, candidates, and what is recommended."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import attrs
import pytest

from mistralrs_sdk import ConfigError, ModelBuilder, ModelLoadError
from mistralrs_sdk.cli import main, serve, tune, tune_probe
from mistralrs_sdk.cli.serve_models import builder_of
from mistralrs_sdk.cli.tune_estimate import BITS, Candidate, completed, recommend
from mistralrs_sdk.cli.tune_probe import Times, Way, probe, uncached, whole_model
from mistralrs_sdk.cli.tune_shape import (
    BLOCKS,
    Shape,
    Types,
    num_bytes,
    read_bytes,
    read_shape,
    slice_of,
)
from mistralrs_sdk.cli.tune_stand_in import write_stand_in
from tests.gguf_files import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, MLP, VOCAB, tiny
from tests.model_helpers import tiny_folder

SMALL = Shape(
    layers=2, hidden=256, wide=512, heads=4, kv_heads=2, head_dim=64, vocab=300, tied=True
)
THIN = attrs.evolve(SMALL, hidden=96, wide=160, heads=3, kv_heads=3, head_dim=32, tied=False)
LARGE = Shape(
    layers=32,
    hidden=4096,
    wide=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128_000,
    tied=False,
)


@pytest.fixture(scope="module", autouse=True)
def _checkpoint():
    """Made before a test looks at what is printed: saving it shows a bar."""
    tiny_folder()


@pytest.fixture
def measured(monkeypatch):
    """A machine that always has the same speed: a step takes a microsecond for each KiB."""

    async def probe(shape, ways, builder_of, *, device, free_bytes):
        return [
            Times(steps=(size * 1e-9, 2 * size * 1e-9), prompt=0.128)
            for size in (read_bytes(shape, way.types) for way in ways)
        ]

    monkeypatch.setattr(tune, "probe", probe)


@attrs.frozen
class FakePlan:
    weight_bytes: float
    weights: str = ""


def candidate(bits, gib, *, fits=True, times=None):
    plan = FakePlan(int(gib * 2**30)) if fits else None
    if fits and times is None:
        times = Times(steps=(gib / 10, gib / 5), prompt=1.0)
    return Candidate(bits=bits, plan=plan, times=times, measured=True)


def built_of(file, tokenizer):
    builder = ModelBuilder(file).with_tokenizer_json(tokenizer)
    return builder.with_force_cpu().with_num_threads(1)


# From a slice to the whole


def test_the_whole_is_the_slice_grown_by_what_it_reads_and_computes():
    """A step of 5 ms, one of them spent without weights, and four times the bytes: 17 ms."""
    part = Times(steps=(0.005, 0.008), prompt=0.030)
    nothing = Times(steps=(0.001, 0.002), prompt=0.010)

    found = whole_model(part, nothing, read=4, computed=3)

    assert found.steps == pytest.approx((0.017, 0.026))
    assert found.prompt == pytest.approx(0.070)
    assert found.decode_rates == pytest.approx((1 / 0.017, 8 / 0.026))


def test_a_model_that_is_its_own_slice_takes_what_was_measured():
    """Whatever a step takes besides its weights."""
    part = Times(steps=(0.005, 0.008), prompt=0.030)

    assert whole_model(part, part, read=1, computed=1) == part


def test_what_a_cache_gave_is_taken_back():
    """10 MB from a cache at 20 GB/s, and from memory at 10: half a millisecond a step more."""
    part = Times(steps=(0.005, 0.008), prompt=0.030)

    found = uncached(part, 10**7, near=20e9, far=10e9)

    assert found.steps == pytest.approx((0.0055, 0.0085))
    assert found.prompt == 0.030
    assert uncached(part, 10**7, near=10.5e9, far=10e9) is part  # no cache, only noise


@pytest.mark.parametrize("kind", ["F16", "Q4_K"])
def test_a_slice_has_the_models_proportions(kind):
    """As large a part of the head as of the layers; about as many bytes as were asked for."""
    types = Types.alike(LARGE, kind)
    most = read_bytes(LARGE, types) // 8

    part, part_types = slice_of(LARGE, types, most_bytes=most)

    assert (part.layers, part.vocab) == (4, 16_000)
    assert read_bytes(part, part_types) == pytest.approx(most, rel=0.01)
    assert (part.hidden, part.wide, part.heads) == (LARGE.hidden, LARGE.wide, LARGE.heads)


def test_a_slice_takes_its_layers_from_everywhere():
    """Files that keep some layers in wider types have them at the ends."""
    wide, small = (("Q6_K",) * 7, ("Q4_K",) * 7)
    types = Types(layers=(wide,) * 8 + (small,) * 24, embedding="Q4_K", head="Q6_K")

    _, found = slice_of(LARGE, types, most_bytes=read_bytes(LARGE, types) // 8)

    assert found.layers == (wide, small, small, small)


def test_a_small_model_is_its_own_slice():
    """Nothing is cut; of a large one a layer is halved until it is small enough."""
    types = Types.alike(SMALL, "F16")

    assert slice_of(SMALL, types, most_bytes=2**30) == (SMALL, types)

    part, _ = slice_of(LARGE, Types.alike(LARGE, "F16"), most_bytes=2**25)
    assert (part.layers, part.heads, part.kv_heads, part.wide) == (1, 4, 1, 1792)


# What the model is made of


def test_the_sizes_of_a_folder_are_in_its_config():
    """The plan says whether the embedding is the head, and in what the weights are kept."""
    found = {
        name: read_shape(tiny_folder(name), plan_weights=f"F16 x{4 * 7 + matrices}")
        for name, matrices in (("llama", 2), ("llama_tied", 1))
    }

    shape, types = found["llama"]
    assert shape == Shape(
        layers=4, hidden=64, wide=128, heads=4, kv_heads=2, head_dim=16, vocab=512, tied=False
    )
    assert types == Types.alike(shape, "F16")
    assert found["llama_tied"][0] == attrs.evolve(shape, tied=True)


def test_the_sizes_of_a_gguf_file_are_in_its_header(tmp_path):
    """With the type of each matrix; lists and text are passed over."""
    shape, types = read_shape(tiny(tmp_path), plan_weights="")

    assert shape == Shape(
        layers=LAYERS,
        hidden=HIDDEN,
        wide=MLP,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab=VOCAB,
        tied=True,
    )
    assert types == Types.alike(shape, "F16")  # what float32 is kept in


def test_a_split_file_is_read_to_its_end(tmp_path):
    """A head of its own may be in the last shard."""
    for number, shape in enumerate((SMALL, attrs.evolve(SMALL, tied=False)), 1):
        file, _ = write_stand_in(tmp_path, shape, Types.alike(shape, "Q8_0"))
        file.rename(tmp_path / f"model-{number:05d}-of-00002.gguf")

    shape, types = read_shape(tmp_path, plan_weights="")

    assert shape == attrs.evolve(SMALL, tied=False)
    assert types == Types.alike(SMALL, "Q8_0")


def test_sizes_that_cannot_be_told_are_an_error(tmp_path):
    """The message names the place and what is missing."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()

    with pytest.raises(ConfigError, match="num_attention_heads"):
        read_shape(tmp_path, plan_weights="F16 x15")


@pytest.mark.parametrize("shape", [SMALL, THIN], ids=["small", "thin"])
@pytest.mark.parametrize("bits", BITS)
async def test_a_number_of_bits_gives_these_types(tmp_path, shape, bits):
    """What slices are written in is what the model is quantised to, where 256 fit and where not."""
    files = write_stand_in(tmp_path, shape, Types.alike(shape, "F16"))

    plan = await built_of(*files).with_auto_isq(bits).plan()

    types = Types.of_bits(shape, bits)
    assert types.are_those_of(plan.weights, shape)
    assert not Types.alike(shape, "Q4_1").are_those_of(plan.weights, shape)


@pytest.mark.parametrize("kind", BLOCKS)
async def test_a_stand_in_is_a_model_in_any_type(tmp_path, kind):
    """It has the sizes that were asked for, reads as what was written, and answers."""
    types = Types.alike(SMALL, kind)
    files = write_stand_in(tmp_path, SMALL, types)

    kept = types if kind not in ("F32", "BF16") else Types.alike(SMALL, "F16")
    found, stored = read_shape(files[0], plan_weights="")
    builder = built_of(*files)

    assert found == SMALL
    assert stored == (types if kind != "F32" else kept)
    async with await builder.build() as model:
        logits, _ = await model.send_raw_chat_request([5, 6, 7])
    assert logits[0].isfinite().all()
    assert float(logits[0].std()) > 0


def test_a_slice_is_written_as_the_model_is_kept():
    """Where it is known how; if not, the builder makes it so, and the plan says how large it is."""
    stored = Types.alike(SMALL, "Q4_1")
    size = num_bytes(SMALL, stored)
    known, dense, unknown = (
        Candidate(bits=bits, plan=FakePlan(num_bytes_kept, weights))
        for bits, num_bytes_kept, weights in (
            (8, 1, "Q8_0 x15"),
            (None, size * 6.4, "f32 x15"),
            (8, size * 1.6, "int8 x14, bf16 x1"),
        )
    )

    ways = [tune._way(c, SMALL, stored) for c in (known, dense, unknown)]

    assert ways == [
        Way(types=Types.alike(SMALL, "Q8_0")),
        Way(types=stored, kept=6.4),
        Way(types=stored, bits=8, kept=1.6),
    ]


# What is measured


async def test_a_model_is_measured_in_each_way():
    """Whole or in a slice, in the file's types or quantised: all take some time."""
    ways = [
        Way(types=Types.alike(SMALL, "F16")),
        Way(types=Types.of_bits(SMALL, 8)),
        Way(types=Types.alike(SMALL, "F16"), bits=4, kept=0.3),
    ]

    found = await probe(SMALL, ways, built_of, device="cpu", free_bytes=2**30, slice_bytes=2**19)

    assert len(found) == 3
    for times in found:
        assert times is not None
        assert min(*times.steps, times.prompt) > 0


async def test_what_there_is_no_time_for_is_not_measured(monkeypatch):
    """The first way always is."""
    monkeypatch.setattr(tune_probe, "SECONDS", 0.0)

    ways = [Way(types=Types.alike(SMALL, "F16"))] * 2
    first, second = await probe(SMALL, ways, built_of, device="cpu", free_bytes=2**30)

    assert first is not None
    assert second is None


async def test_where_there_is_no_room_nothing_is_measured():
    """A slice that does not fit is no error."""

    def too_large(file, tokenizer):
        raise ModelLoadError("it needs 90 GiB")

    ways = [Way(types=Types.alike(SMALL, "F16"))]

    assert await probe(SMALL, ways, too_large, device="cpu", free_bytes=0) == [None]


def test_what_was_not_measured_is_reckoned_from_the_next_in_size():
    """Steps by bytes, prompts alike; what does not fit stays without."""
    found = completed(
        [
            candidate(None, 4, times=Times(steps=(0.4, 0.8), prompt=1.0)),
            attrs.evolve(candidate(5, 2), times=None, measured=False),
            candidate(4, 1, times=Times(steps=(0.3, 0.5), prompt=2.0)),
            candidate(2, 1, fits=False),
        ]
    )

    assert found[1].times == Times(steps=(0.6, 1.0), prompt=2.0)
    assert [c.measured for c in found[:3]] == [True, False, True]
    assert found[3].times is None


# What is recommended


@pytest.mark.parametrize(("profile", "bits"), [("quality", 8), ("balanced", 5), ("fast", 4)])
def test_the_fastest_that_is_good_enough_is_recommended(profile, bits):
    """quality: near-lossless; balanced: good; fast: acceptable. Never worse if that fits."""
    sizes = {None: 4.0, 8: 2.2, 6: 1.7, 5: 1.4, 4: 1.1, 3: 0.9, 2: 0.7}
    found = [candidate(bits, size) for bits, size in sizes.items()]

    best = recommend(found, profile)

    assert best is not None
    assert best.bits == bits


def test_of_those_about_as_fast_the_better_one_is_recommended():
    """A hundredth is no reason to give up bits; more of them is, where they are slower."""
    found = [
        candidate(None, 4),
        candidate(6, 1.7, times=Times(steps=(0.101, 1), prompt=1)),
        candidate(5, 1.4, times=Times(steps=(0.100, 1), prompt=1)),
        candidate(4, 1.1, times=Times(steps=(0.200, 1), prompt=1)),
    ]

    assert recommend(found, "fast") is found[1]


def test_without_speeds_the_smallest_that_is_good_enough_is_recommended():
    """It will be the fastest."""
    sizes = {None: 4.0, 8: 2.2, 5: 1.4, 4: 1.1}
    found = [attrs.evolve(candidate(bits, size), times=None) for bits, size in sizes.items()]

    assert recommend(found, "balanced") is found[2]


def test_what_is_no_smaller_than_the_file_is_not_recommended():
    """A file of four bits is not quantised to eight or four, whatever the profile and speed."""
    fast = Times(steps=(0.001, 0.001), prompt=1)
    found = [candidate(None, 1.1), candidate(8, 2.2, times=fast), candidate(4, 1.1, times=fast)]

    for profile in ("quality", "balanced", "fast"):
        assert recommend(found, profile) is found[0]


def test_if_only_bad_ones_fit_the_best_of_them_is_recommended():
    """Where nothing the profile allows fits, quality decides, then bits."""
    found = [candidate(None, 4, fits=False), candidate(3, 0.9), candidate(2, 0.7)]

    assert recommend(found, "quality") is found[1]
    assert recommend(found[:1], "fast") is None


# The command


def test_tune_as_json_lists_every_candidate(measured, capsys):
    """As stored and each number of bits, with sizes and speeds, and the command for the choice."""
    code = main(["tune", "-m", str(tiny_folder()), "--cpu", "--profile", "quality", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [entry["isq"] for entry in found["candidates"]] == [None, *map(str, BITS)]
    for entry in found["candidates"]:
        assert entry["fits"]
        assert entry["measured"]
        assert entry["weight_bytes"] > 0
        assert entry["kv_bytes"] > 0
        rates = entry["decode_tokens_per_second_at_once"]
        assert rates["1"] == entry["decode_tokens_per_second"]
        assert rates["8"] == pytest.approx(4 * rates["1"])
        assert entry["prefill_tokens_per_second"] == pytest.approx(1000)
    assert found["recommended"] == "8"
    assert found["command"] == f"mistralrs-sdk serve -m {tiny_folder()} --cpu --isq 8"


def test_tune_prints_a_table_and_a_command(measured, capsys):
    """The recommended row has a star."""
    assert main(["tune", "-m", str(tiny_folder()), "--cpu"]) == 0

    out = capsys.readouterr().out
    assert "5 bits *" in out
    assert "8 at once" in out
    assert "serve -m" in out


def test_a_model_of_the_hub_is_read_from_its_cache(measured, tmp_path, capsys):
    """Where `plan()` found it, or put it."""
    repo = tmp_path / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    shutil.copytree(tiny_folder(), repo / "snapshots" / ("a" * 40))

    code = main(["tune", "-m", "org/tiny", "--hf-cache", str(tmp_path), "--cpu", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["unmeasured"] is None
    assert all(entry["measured"] for entry in found["candidates"])


def test_the_settings_that_change_the_speed_hold_for_slices(tmp_path):
    """Threads, types and paging do; files and limits of the model itself do not."""
    parser = argparse.ArgumentParser()
    tune.add_parser(parser.add_subparsers())
    flags = ["--cpu", "--dtype", "f32", "--num-threads", "3", "--paged-attn", "off"]
    args = parser.parse_args(["tune", "-m", "x", *flags, "--max-model-len", "9", "--lora", "a=b"])

    found = tune._settings_for(args)(Path("file"), Path("words"))

    wanted = ModelBuilder("file").with_dtype("f32").with_num_threads(3).with_max_num_seqs(32)
    wanted = wanted.with_force_cpu().with_paged_attn(None).with_tokenizer_json("words")
    assert found == wanted


@pytest.mark.parametrize(
    "flags", [("--tensor-parallel", "2"), ("--device-layers", "cpu:4")], ids=["ranks", "map"]
)
def test_no_speeds_where_several_devices_share_the_model(monkeypatch, capsys, flags):
    """It says so, and chooses by size."""
    plan = ModelBuilder.plan

    async def alone(self):
        config = attrs.evolve(self.config, tensor_parallel=1, device_mapping=None)
        return await plan(self._replace(config=config))

    monkeypatch.setattr(ModelBuilder, "plan", alone)

    assert main(["tune", "-m", str(tiny_folder()), *flags]) == 0

    out = capsys.readouterr().out
    assert f"No speeds: with {flags[0]}" in out
    assert "Recommended (balanced): 5 bits" in out


def test_the_emitted_config_is_what_serve_takes(measured, tmp_path, capsys):
    """Every flag that was given, and the choice, come back as the same builder."""
    file = tmp_path / "serve.toml"
    flags = [
        *("--cpu", "--no-mixed-batches", "--num-threads", "3", "--pa-memory-mb", "64"),
        *("--max-seqs", "7", "--seed", "5"),
    ]

    main(["tune", "-m", str(tiny_folder()), *flags, "--emit-config", str(file)])

    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command[:2] == ["mistralrs-sdk", "serve"]
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    by_file = builder_of(parser.parse_args(["serve", "--config", str(file)]))
    by_flags = builder_of(parser.parse_args(command[1:]))
    assert by_file == by_flags
    assert isinstance(by_file, ModelBuilder)
    assert by_file.config.max_num_seqs == 7
    assert by_file.config.mixed_batches is False
    assert by_file.config.isq is not None


def test_what_does_not_fit_is_shown_with_its_reason(measured, monkeypatch, capsys):
    """One candidate that fails is no error, as long as another fits."""
    plan = ModelBuilder.plan

    async def too_large_as_stored(self):
        if self.config.isq is None:
            raise ModelLoadError("it needs 90 GiB\nof 16")
        return await plan(self)

    monkeypatch.setattr(ModelBuilder, "plan", too_large_as_stored)

    assert main(["tune", "-m", str(tiny_folder()), "--cpu"]) == 0

    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "as stored: it needs 90 GiB of 16" in out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["-m", "/nowhere/at/all"], "/nowhere/at/all"),
        (["-m", "x", "--isq", "4"], "--isq"),
        (["-m", "x", "--topology", "t.yml"], "--topology"),
    ],
)
def test_what_cannot_be_tuned_is_an_error(flags, named, capsys):
    """A model that is not there, and flags that would choose already."""
    assert main(["tune", *flags]) == 1

    assert named in capsys.readouterr().err


def test_a_config_that_cannot_be_written_is_an_error(measured, tmp_path, capsys):
    """The error names the flag and the file."""
    file = tmp_path / "none" / "serve.toml"

    assert main(["tune", "-m", str(tiny_folder()), "--emit-config", str(file)]) == 1

    assert f"--emit-config {file}" in capsys.readouterr().err
