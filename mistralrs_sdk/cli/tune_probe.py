"""What `tune` measures: a stand-in with layers like the model's, built and asked in some types."""

from __future__ import annotations

import asyncio
import json
import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from mistralrs_sdk import InferenceError, MemoryPlan, Model, ModelBuilder
from mistralrs_sdk.cli.bench_numbers import Answer
from mistralrs_sdk.cli.bench_targets import InProcess
from mistralrs_sdk.cli.bench_work import Job, TokenIds, make_jobs

REQUESTS = (1, 8, 32)
"""How many requests at once the rates of decoding are for."""

_LAYER_MATRICES = 7
_HEAD_DIM = 64
_LAYER_VALUES, _VOCABULARY_VALUES = 64 * 10**6, 16 * 10**6
"""At most so many in a stand-in's layers (but two layers) and vocabulary: more than caches hold."""
_IDS = TokenIds(8, 240)
_PROMPT, _FIRST = 512, 4
_NEW_TOKENS = {1: 33, 8: 17, 32: 13}
_TRIES = 2


@attrs.frozen(kw_only=True)
class Sizes:
    """How many values a model's matrices have."""

    layers: int
    """How many layers."""
    layer_values: int
    """In the matrices of one layer."""
    vocabulary_values: int
    """In the head, which may be the embedding too."""

    @property
    def read(self) -> int:
        """Values that a step multiplies with."""
        return self.layers * self.layer_values + self.vocabulary_values

    @classmethod
    def of(cls, plan: MemoryPlan, in_layers: int) -> Sizes:
        """From a plan and how many values all layers have together; seven matrices a layer."""
        matrices = sum(int(count) for count in re.findall(r" x(\d+)", plan.weights))
        layers = max(1, (matrices - 1) // _LAYER_MATRICES)
        tables = 2 if matrices - layers * _LAYER_MATRICES == 2 else 1  # a head of its own
        return cls(
            layers=layers,
            layer_values=max(1, in_layers // layers),
            vocabulary_values=max(0, plan.num_parameters - in_layers) // tables,
        )


@attrs.frozen(kw_only=True)
class Probe:
    """What a stand-in took whose weights were kept in one type."""

    weights: str
    """The type most of its values have."""
    bytes_per_value: float
    decode_seconds: tuple[float, ...]
    """Of a step of `REQUESTS` sequences, for each value it reads."""
    prefill_seconds: float
    """Of a token of a prompt, for each value in layers."""


def main_type(plan: MemoryPlan) -> str:
    """The type that most values of a model have."""
    return plan.weights.partition(" ")[0]


def stand_in_config(sizes: Sizes, *, multiple: int) -> dict[str, Any]:
    """A Llama whose layers have about as many values as the model's, and fewer of them.

    Widths are multiples of `multiple`, which some types need.
    """
    step = math.lcm(multiple, _HEAD_DIM)
    hidden = max(step, round(math.sqrt(sizes.layer_values / 12) / step) * step)
    heads = hidden // _HEAD_DIM
    kv_heads = max(n for n in range(1, max(1, heads // 3) + 1) if heads % n == 0)
    attention = 2 * hidden * (hidden + kv_heads * _HEAD_DIM)
    wide = max(step, round((sizes.layer_values - attention) / (3 * hidden) / step) * step)
    vocabulary = min(sizes.vocabulary_values, _VOCABULARY_VALUES) // hidden
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": max(256, vocabulary),
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": min(sizes.layers, max(2, _LAYER_VALUES // sizes.layer_values)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float16",
    }


async def measure(
    sizes: Sizes, types: Sequence[str], *, device: str, dtype: str | None, num_threads: int | None
) -> list[Probe]:
    """Build a stand-in in each of these types ("F16" is as floats are kept) and ask it.

    `dtype` is what the model was asked to compute in, None where it was left open.
    """
    multiple = 256 if any(name.endswith("_K") for name in types) else 64
    config = stand_in_config(sizes, multiple=multiple)
    with tempfile.TemporaryDirectory() as folder:
        await asyncio.to_thread(_write, Path(folder), config)
        builder = ModelBuilder(folder).with_progress(False).with_device(device)
        builder = builder.with_max_num_seqs(max(REQUESTS)).with_prefix_cache_n(0)
        if dtype is not None:
            builder = builder.with_dtype(dtype)
        if num_threads is not None:
            builder = builder.with_num_threads(num_threads)
        return [await _probe(builder, name, config) for name in types]


async def _probe(builder: ModelBuilder, name: str, config: dict[str, Any]) -> Probe:
    if not name.startswith(("F", "BF")):
        builder = builder.with_isq(name)
    plan = await builder.plan()
    layers = sum(math.prod(shape) for shape in _layer_shapes(config).values())
    layers *= config["num_hidden_layers"]
    read = layers + config["vocab_size"] * config["hidden_size"]
    async with await builder.build() as model:
        target = InProcess(model, name=name, ids=_IDS)
        await _answers(target, 1, prompt=_FIRST, new_tokens=4)  # the first one compiles
        decode = [await _step_seconds(target, requests) / read for requests in REQUESTS]
        prompt = min([await _prompt_seconds(target, salt) for salt in range(_TRIES)])
    return Probe(
        weights=name,
        bytes_per_value=plan.weight_bytes / plan.num_parameters,
        decode_seconds=tuple(decode),
        prefill_seconds=prompt / _PROMPT / layers,
    )


async def _step_seconds(target: InProcess, requests: int) -> float:
    """The least time of a step in which so many requests get a token each."""
    new_tokens, found = _NEW_TOKENS[requests], []
    for salt in range(_TRIES):
        answers = await _answers(
            target, requests, prompt=_FIRST, new_tokens=new_tokens, salt=salt + 1
        )
        start = max(answer.times[0] for answer in answers)
        end = max(answer.times[-1] for answer in answers)
        found.append((end - start) / (new_tokens - 1))
    return min(found)


async def _prompt_seconds(target: InProcess, salt: int) -> float:
    (answer,) = await _answers(target, 1, prompt=_PROMPT, new_tokens=1, salt=salt)
    return answer.times[0] - answer.sent


async def _answers(
    target: InProcess, requests: int, *, prompt: int, new_tokens: int, salt: int = 0
) -> list[Answer]:
    jobs: list[Job] = make_jobs([(prompt, new_tokens)] * requests, _IDS, seed=salt)
    answers = await asyncio.gather(*[target.answer(job) for job in jobs])
    for answer in answers:
        if answer.error is not None:
            raise InferenceError(f"the model that tune measures with failed: {answer.error}")
    return answers


def _layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }


def _write(folder: Path, config: dict[str, Any]) -> None:
    """Write config, weights that are cut from the same random values, and a small tokenizer."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    (folder / "config.json").write_text(json.dumps(config))
    hidden = config["hidden_size"]
    shapes = _layer_shapes(config)
    embedding = (config["vocab_size"], hidden)
    most = max(math.prod(shape) for shape in (*shapes.values(), embedding))
    random = torch.Generator().manual_seed(0)
    piece = torch.randn(min(most, 2**20), generator=random).mul_(hidden**-0.5).half()
    values = piece.repeat(-(-most // len(piece)))

    def drawn(shape: tuple[int, int]) -> torch.Tensor:
        return values[: math.prod(shape)].reshape(shape).clone()

    tensors = {"model.norm.weight": torch.ones(hidden, dtype=torch.float16)}
    tensors["model.embed_tokens.weight"] = drawn(embedding)
    for layer in range(config["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            ones = torch.ones(hidden, dtype=torch.float16)
            tensors[f"model.layers.{layer}.{name}.weight"] = ones
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = drawn(shape)
    save_file(tensors, folder / "model.safetensors")
    words = {f"w{i}": i for i in range(config["vocab_size"])}  # a token without text is not sent
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
