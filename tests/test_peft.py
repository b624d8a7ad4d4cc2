"""Adapters in PEFT's layout: what is read, what is refused, and what the message says."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.layers.lora import LoraLayers, LoraTarget
from mistralrs_sdk.loading.hub import locate_adapter
from mistralrs_sdk.loading.peft import PeftAdapter, open_adapter
from mistralrs_sdk.loading.peft_config import PeftConfig, parse_peft_config
from mistralrs_sdk.models import build_model, read_config
from tests.adapter_files import LEAVES, key, module, random_pairs, shapes_of, write_adapter
from tests.checkpoint_files import config_for

CONFIG = config_for("llama")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@functools.cache
def targets() -> dict[str, LoraTarget]:
    """The matrices of a tiny llama that can be changed."""
    with torch.device("meta"):
        model = build_model(read_config(CONFIG))
    layers = LoraLayers(model, packed=False, dtype=torch.float32, device=torch.device("cpu"))
    return layers.targets


def pairs(**settings) -> dict[str, torch.Tensor]:
    return random_pairs(shapes_of(CONFIG), **settings)


def opened(folder: Path, tensors=None, **changes) -> PeftAdapter:
    return open_adapter(write_adapter(folder, tensors or pairs(), **changes), targets())


def refusal(folder: Path, tensors=None, kind=ModelLoadError, **changes) -> str:
    with pytest.raises(kind) as caught:
        opened(folder, tensors, **changes)
    return str(caught.value)


def config(**values) -> PeftConfig:
    return parse_peft_config(
        {"peft_type": "LORA", "r": 8, "lora_alpha": 16, **values}, where="config"
    )[0]


# Which matrices, and how much


def test_the_targets_are_the_linear_layers_of_the_decoder():
    """All parts of fused layers by their own names; neither the head nor the embedding."""
    assert set(targets()) == {module(layer, leaf) for layer in range(2) for leaf in LEAVES}
    assert targets()[module(0, "k_proj")].out_features == CONFIG["num_key_value_heads"] * 8


def test_an_adapter_is_read_with_its_ranks_and_scales(tmp_path):
    """Each matrix of the file under its checkpoint name, multiplied by alpha / r."""
    tensors = pairs(ranks=4)

    adapter = opened(tmp_path, tensors)
    loaded = adapter.load()

    assert adapter.ranks == dict.fromkeys(targets(), 4)
    assert adapter.rank == 4
    name = module(1, "down_proj")
    assert torch.equal(loaded[name].a, tensors[key(name, "A")])
    assert torch.equal(loaded[name].b, tensors[key(name, "B")])
    assert loaded[name].scale == 2.0


def test_patterns_give_some_matrices_a_rank_and_an_alpha_of_their_own(tmp_path):
    """The end of a name, or a regular expression for it; the rest has r and lora_alpha."""
    ranks = dict.fromkeys(LEAVES, 4) | {"q_proj": 2, "down_proj": 8}
    adapter = opened(
        tmp_path,
        pairs(ranks=ranks),
        rank_pattern={"q_proj": 2, "mlp.down_proj": 8},
        alpha_pattern={r"layers\.1\..*q_proj": 6},
    )
    scales = {name: pair.scale for name, pair in adapter.load().items()}

    assert adapter.rank == 8
    assert scales[module(0, "q_proj")] == 8 / 2
    assert scales[module(1, "q_proj")] == 6 / 2
    assert scales[module(0, "down_proj")] == 8 / 8
    assert scales[module(0, "o_proj")] == 8 / 4


def test_rank_stabilised_scales_divide_by_the_root():
    """use_rslora: alpha / sqrt(r)."""
    assert config(use_rslora=True, r=16).scale_of("x") == 4.0


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"target_modules": ["q_proj"]}, {"0.q_proj", "1.q_proj"}),
        ({"target_modules": ["self_attn.q_proj", "v_proj"], "exclude_modules": ["v_proj"]},
         {"0.q_proj", "1.q_proj"}),
        ({"target_modules": r".*layers\.1\.mlp\.(gate|up)_proj"}, {"1.gate_proj", "1.up_proj"}),
        ({"target_modules": r"q_proj"}, set()),
        ({"target_modules": ["o_proj"], "layers_to_transform": [1]}, {"1.o_proj"}),
        ({"target_modules": ["o_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
         {"0.o_proj"}),
        ({"target_modules": ["o_proj"], "layers_to_transform": 0, "layers_pattern": "h"}, set()),
        ({"target_modules": ["o_proj"], "layers_to_transform": 1, "layers_pattern": "(h|layers)"},
         {"1.o_proj"}),
        ({"target_modules": ["o_proj"], "layers_to_transform": 1, "layers_pattern": "h|layers"},
         {"1.o_proj"}),
        ({"target_modules": "all-linear", "exclude_modules": r".*mlp.*"},
         {f"{i}.{leaf}" for i in range(2) for leaf in LEAVES[:4]}),
    ],
)  # fmt: skip
def test_the_config_names_matrices_as_peft_does(settings, changed):
    """A list holds ends of names, a string is a regular expression for all of one."""
    wanted = {
        f"{layer}.{leaf}"
        for layer in range(2)
        for leaf in LEAVES
        if config(**settings).changes(module(layer, leaf))
    }

    assert wanted == changed


def test_any_subset_of_matrices_is_an_adapter(tmp_path):
    """Two of the seven, in one layer."""
    leaves = (r"model\.layers\.1\.self_attn\.(q|o)_proj",)
    tensors = {
        name: tensor
        for name, tensor in pairs(leaves=("q_proj", "o_proj")).items()
        if ".layers.1." in name
    }

    adapter = opened(tmp_path, tensors, leaves=leaves[0])

    assert set(adapter.ranks) == {module(1, "q_proj"), module(1, "o_proj")}


# Generations


def test_equal_content_is_one_generation_wherever_it_lies(tmp_path):
    """The hash is of config and weights alone, 64 hexadecimal digits."""
    first, second = opened(tmp_path / "a"), opened(tmp_path / "b")

    assert first.generation == second.generation
    assert len(bytes.fromhex(first.generation)) == 32


def test_other_weights_or_another_config_are_another_generation(tmp_path):
    """Each of the two files counts."""
    found = {
        opened(tmp_path / "a").generation,
        opened(tmp_path / "b", pairs(seed=1)).generation,
        opened(tmp_path / "c", lora_alpha=1).generation,
    }

    assert len(found) == 3


def test_files_that_change_between_opening_and_reading_are_not_mixed(tmp_path):
    """What was hashed is what is loaded, or loading fails."""
    adapter = opened(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    os.utime(weights, ns=(1, 1))

    with pytest.raises(ModelLoadError, match="changed while being read"):
        adapter.load()


# What is refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "DoRA (use_dora)"),
        ({"bias": "lora_only"}, "trained biases (bias 'lora_only')"),
        ({"modules_to_save": ["lm_head"]}, "modules that were trained as a whole"),
        ({"layer_replication": [[0, 2]]}, "replicated layers"),
        ({"target_parameters": ["x"]}, "bare parameters"),
        ({"trainable_token_indices": [1]}, "trained embeddings of single tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "a base model of its own"),
        ({"init_lora_weights": "unheard of"}, "init_lora_weights 'unheard of'"),
    ],
)
def test_a_config_that_asks_for_more_is_refused_by_name(tmp_path, changes, reason):
    """What would change the answers and is not done here is no detail."""
    assert reason in refusal(tmp_path, kind=UnsupportedError, **changes)


def test_every_reason_is_in_one_message(tmp_path):
    """Of the config and of the tensors, each kind once."""
    embeddings = {
        f"base_model.model.model.embed_tokens.lora_embedding_{w}": torch.ones(4, 4) for w in "AB"
    }
    message = refusal(
        tmp_path,
        pairs() | embeddings | {"base_model.model.lm_head.weight": torch.ones(4, 4)},
        kind=UnsupportedError,
        use_dora=True,
        bias="all",
    )

    for reason in ("use_dora", "bias 'all'", "LoRA of embeddings", "a trained head"):
        assert message.count(reason) == 1


@pytest.mark.parametrize("start", ["gaussian", "eva", True, None])
def test_ways_to_begin_the_training_do_not_matter_afterwards(tmp_path, start):
    """Only those that change the base model too are refused."""
    assert opened(tmp_path, init_lora_weights=start).rank == 4


def test_an_adapter_of_another_kind_is_refused(tmp_path):
    """Prompt tuning, for example, is no LoRA."""
    assert "'PROMPT_TUNING'" in refusal(tmp_path, peft_type="PROMPT_TUNING")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"r": 0}, "r (0)"),
        ({"r": "8"}, "r ('8')"),
        ({"lora_alpha": None}, "lora_alpha (None)"),
        ({"rank_pattern": [1]}, "rank_pattern ([1])"),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern (1.5)"),
        ({"alpha_pattern": {"(": 1}}, "'(' is no regular expression"),
        ({"target_modules": 3}, "target_modules (3)"),
        ({"layers_to_transform": ["x"]}, "layers_to_transform (['x'])"),
    ],
)
def test_a_config_with_a_wrong_value_names_it(tmp_path, changes, named):
    """Key and value, and what it must be."""
    assert named in refusal(tmp_path, **changes)


def test_missing_left_over_and_misshapen_tensors_are_all_named(tmp_path):
    """One message has everything that is wrong with the file."""
    tensors = pairs()
    del tensors[key(module(0, "q_proj"), "B")]
    tensors[key(module(1, "v_proj"), "A")] = torch.ones(4, 5)
    tensors[key("model.layers.7.mlp.up_proj", "A")] = torch.ones(4, 72)
    tensors["strange"] = torch.ones(1)

    message = refusal(tmp_path, tensors)

    assert "missing: model.layers.0.self_attn.q_proj.lora_B" in message
    assert "model.layers.1.self_attn.v_proj.lora_A F32 [4, 5] for [4, 72]" in message
    assert "model.layers.7.mlp.up_proj, strange" in message


def test_a_matrix_the_config_wants_and_the_file_lacks_is_missing(tmp_path):
    """A file that was cut short does not pass for a smaller adapter."""
    message = refusal(tmp_path, pairs(leaves=("q_proj",)), leaves=("q_proj", "up_proj"))

    assert "model.layers.0.mlp.up_proj.lora_A" in message


def test_a_matrix_the_config_does_not_name_is_left_over(tmp_path):
    """What training did not change is not changed here."""
    assert "model.layers.0.mlp.up_proj" in refusal(tmp_path, pairs(), leaves=LEAVES[:5])


def test_an_adapter_for_a_larger_model_is_refused_before_anything_is_read(tmp_path):
    """Shapes come from headers."""
    larger = random_pairs(shapes_of(CONFIG | {"hidden_size": 144}))

    assert "[4, 144] for [4, 72]" in refusal(tmp_path, larger)


def test_a_folder_without_the_files_says_which(tmp_path):
    """The config, then the weights, of which only safetensors are read."""
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json is missing"):
        open_adapter(tmp_path, targets())
    write_adapter(tmp_path, pairs())
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors is missing"):
        open_adapter(tmp_path, targets())


def test_a_damaged_file_is_named(tmp_path):
    """Cut in the middle."""
    write_adapter(tmp_path, pairs())
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])

    with pytest.raises(ModelLoadError, match="damaged or incomplete"):
        open_adapter(tmp_path, targets())


# From the hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that has the adapter; what was asked of it is returned."""
    asked = []
    folder = tmp_path / "snapshot"

    def snapshot_download(repo, **settings):
        asked.append({"repo": repo, **settings})
        if settings["local_files_only"] and not folder.exists():
            raise errors.LocalEntryNotFoundError("nothing is cached")
        return str(write_adapter(folder, pairs()))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    return asked


def find(model_id: str | Path, **settings) -> Path:
    return locate_adapter(ModelSource(model_id=model_id, **settings), None)


def test_a_hub_id_is_downloaded_at_its_revision(hub, tmp_path):
    """Two files and no more, into the model's cache."""
    assert find("org/sql", revision="v2", cache_path="/cache") == tmp_path / "snapshot"

    (asked,) = hub
    assert (asked["repo"], asked["revision"], asked["cache_dir"]) == ("org/sql", "v2", "/cache")
    assert asked["allow_patterns"] == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_commit_that_is_cached_needs_no_network(hub):
    """The first time it is fetched; later only the cache is asked."""
    find("org/sql", revision=COMMIT)
    find("org/sql", revision=COMMIT)

    assert [asked["local_files_only"] for asked in hub] == [True, False, True]


def test_a_folder_is_never_looked_up_on_the_hub(hub, tmp_path):
    """One with the shape of a hub id wins over the hub."""
    write_adapter(tmp_path / "org" / "sql", pairs())

    assert find("org/sql") == Path("org/sql")
    assert not hub


@pytest.mark.parametrize("place", ["/no/such/folder", "no such id", "file"])
def test_a_place_that_is_no_folder_says_where_it_was_looked_for(hub, tmp_path, place):
    """A file is none either."""
    (tmp_path / "file").write_text("x")

    with pytest.raises(ModelLoadError, match=r"is no folder \(looked in"):
        find(place)


def test_offline_and_not_cached_says_how_to_fetch_it(hub, monkeypatch):
    """As for a model."""
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)

    with pytest.raises(ModelLoadError, match="hf download org/sql"):
        find("org/sql")


def test_the_config_is_json_with_anything_else_in_it(tmp_path):
    """What PEFT writes besides does not matter."""
    write_adapter(tmp_path, pairs(), megatron_core="megatron.core", fan_in_fan_out=False, eva=None)
    values = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))

    assert values["megatron_core"]
    assert open_adapter(tmp_path, targets()).rank == 4
