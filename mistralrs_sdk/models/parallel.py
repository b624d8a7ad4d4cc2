"""One rank's share of a model: which heads, inner columns and words it has, and the model of it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import nn

from mistralrs_sdk.distributed import TensorParallel
from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.layers.attention import Attention
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.mlp import GatedMLP
from mistralrs_sdk.layers.parallel import (
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from mistralrs_sdk.models import build_model
from mistralrs_sdk.models.config import ModelConfig
from mistralrs_sdk.models.decoder import CausalLM

_BORDERS = (256, 32, 1)
"""Where the inner size of an MLP is divided: at multiples of the first that leaves every rank some.

The blocks of all quantised types end there, so that models whose blocks do not divide evenly are
divided unevenly."""


@attrs.frozen(kw_only=True)
class Share:
    """What one rank has of a model."""

    heads: range
    kv_heads: range
    """Several ranks have the same ones if there are fewer than ranks."""
    inner: range
    """Columns inside of the MLP."""
    vocab: range


@attrs.frozen
class Part:
    """The part of a checkpoint's tensor that a rank reads; None for all."""

    rows: range | None = None
    columns: range | None = None


def share_of(config: ModelConfig, parallel: TensorParallel) -> Share:
    """The share of one rank.

    Raises:
        ConfigError: heads, words or inner columns cannot be divided over so many ranks.
    """
    rank, size = parallel.rank, parallel.size
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size:
        raise _indivisible(config, size, f"{heads} attention heads")
    if kv_heads % size and size % kv_heads:
        raise _indivisible(config, size, f"{kv_heads} heads of keys and values")
    per_rank = -(-config.vocab_size // size)
    if per_rank * (size - 1) >= config.vocab_size or config.intermediate_size < size:
        raise ConfigError(
            f"tensor_parallel ({size}) leaves a rank without a share: the model has "
            f"{config.vocab_size} words and {config.intermediate_size} columns inside its MLP"
        )
    first_kv = rank * kv_heads // size
    return Share(
        heads=range(rank * heads // size, (rank + 1) * heads // size),
        kv_heads=range(first_kv, first_kv + max(kv_heads // size, 1)),
        inner=_inner(config.intermediate_size, parallel),
        vocab=range(rank * per_rank, min((rank + 1) * per_rank, config.vocab_size)),
    )


def share_on_meta(whole: CausalLM, parallel: TensorParallel) -> CausalLM:
    """Make a rank's model of the whole one, with its parameters on "meta".

    Its `config` has the numbers of the share, but for the vocabulary, of which rank 0 gets all
    scores.

    Raises:
        ConfigError: as `share_of`.
    """
    with torch.device("meta"):
        return _build_share(whole.config, parallel)


def _build_share(config: ModelConfig, parallel: TensorParallel) -> CausalLM:
    share = share_of(config, parallel)
    own = attrs.evolve(
        config,
        num_heads=len(share.heads),
        num_kv_heads=len(share.kv_heads),
        intermediate_size=len(share.inner),
    )
    model = build_model(own)
    for module in model.modules():
        if isinstance(module, Attention):
            module.o_proj = _row_parallel(module.o_proj, config.o_bias, parallel)
        elif isinstance(module, GatedMLP):
            module.down_proj = _row_parallel(module.down_proj, config.mlp_bias, parallel)
    embedding = model.model.embed_tokens
    assert isinstance(embedding, Embedding), "what a decoder begins with"
    model.model.embed_tokens = VocabParallelEmbedding(
        config.vocab_size,
        config.hidden_size,
        scale=embedding.scale,
        vocab=share.vocab,
        parallel=parallel,
    )
    if model.lm_head is not None:
        model.lm_head = VocabParallelHead(
            config.hidden_size, config.vocab_size, vocab=share.vocab, parallel=parallel
        )
    return model


def parts_of(model: CausalLM, parallel: TensorParallel) -> Mapping[str, Part]:
    """What a rank reads of the tensors it does not read whole, by their names in a checkpoint.

    `model` is the whole model.

    Raises:
        ConfigError: as `share_of`.
    """
    share, size = share_of(model.config, parallel), model.config.head_dim
    heads, kv_heads = (_rows(own, size) for own in (share.heads, share.kv_heads))
    parts: dict[str, Part] = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
            last = {"o_proj": heads}
        elif isinstance(module, GatedMLP):
            rows = {"gate_proj": share.inner, "up_proj": share.inner}
            last = {"down_proj": share.inner}
        else:
            continue
        for leaf, own in rows.items():
            parts[f"{name}.{leaf}.weight"] = parts[f"{name}.{leaf}.bias"] = Part(rows=own)
        for leaf, own in last.items():
            parts[f"{name}.{leaf}.weight"] = Part(columns=own)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        parts[name] = Part(rows=share.vocab)
    return parts


def _rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _inner(columns: int, parallel: TensorParallel) -> range:
    border = next(b for b in _BORDERS if columns % b == 0 and columns // b >= parallel.size)
    units = columns // border
    start, stop = (rank * units // parallel.size for rank in (parallel.rank, parallel.rank + 1))
    return range(start * border, stop * border)


def _row_parallel(layer: nn.Module, bias: bool, parallel: TensorParallel) -> RowParallelLinear:
    sizes = layer.in_features, layer.out_features
    assert all(isinstance(size, int) for size in sizes), "a linear layer"
    return RowParallelLinear(*sizes, bias=bias, parallel=parallel)  # type: ignore[arg-type]


def _indivisible(config: ModelConfig, size: int, what: str) -> ConfigError:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    possible = ", ".join(
        str(count)
        for count in range(1, heads + 1)
        if heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)
    )
    return ConfigError(
        f"tensor_parallel ({size}) does not divide it: the model has {what}; "
        f"possible are {possible}"
    )
