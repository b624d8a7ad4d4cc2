"""Tiny models whose weights are packed, and what the tests ask of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
from gguf import GGMLQuantizationType
from torch import Tensor, nn

from mistralrs_sdk.attention.cpu import CpuBackend
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.isq import IsqType
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import Linear
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.forms import choose_forms, quantise_target
from mistralrs_sdk.loading.loader import load_model, open_checkpoint, prepare_model
from mistralrs_sdk.models.decoder import CausalLM
from mistralrs_sdk.quant.quantise import quantise
from tests.batches import Row, make_batch
from tests.gguf_files import metadata_for, write_gguf

CPU = torch.device("cpu")
HIDDEN, MLP, VOCAB, KV = 256, 512, 40, 128
IDS = [3 + 7 * i % 30 for i in range(30)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shapes_of() -> dict[str, tuple[int, int]]:
    """The matrices of a tiny llama whose rows fill blocks of every type, by GGUF name."""
    layer = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (KV, HIDDEN),
        "attn_v": (KV, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (MLP, HIDDEN),
        "ffn_up": (MLP, HIDDEN),
        "ffn_down": (HIDDEN, MLP),
    }
    shapes = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
    return shapes | {f"blk.{i}.{n}": shape for i in range(2) for n, shape in layer.items()}


def gguf_of(path: Path, *kinds: str, vocab: int = VOCAB) -> Path:
    """A GGUF file whose matrices have these types in turn."""
    tensors: dict[str, Any] = {}
    types: dict[str, GGMLQuantizationType] = {}
    for i, (name, (rows, size)) in enumerate(shapes_of().items()):
        weight = draw(vocab if rows == VOCAB else rows, size, seed=i) * 0.06
        kind, name = kinds[i % len(kinds)], f"{name}.weight"
        if kind == "F32":
            tensors[name] = weight.numpy()
            continue
        types[name] = GGMLQuantizationType[kind]
        if kind in ("F16", "BF16"):
            stored = weight.half() if kind == "F16" else weight.bfloat16()
            tensors[name] = stored.view(torch.uint8).numpy()
        else:
            tensors[name] = quantise(weight, kind).numpy()
    norms = [f"blk.{i}.{n}_norm" for i in range(2) for n in ("attn", "ffn")]
    for i, name in enumerate(["output_norm", *norms]):
        tensors[f"{name}.weight"] = draw(HIDDEN, seed=i).abs().add(0.5).numpy()
    metadata = metadata_for(
        "llama",
        **{
            "llama.embedding_length": HIDDEN,
            "llama.feed_forward_length": MLP,
            "llama.attention.head_count": 4,
            "llama.attention.head_count_kv": 2,
            "llama.attention.key_length": 64,
            "llama.attention.value_length": 64,
        },
    )
    return write_gguf(path, "llama", metadata, tensors, types=types)


def open_path(path: Path) -> Checkpoint:
    return open_checkpoint(ModelSource(model_id=str(path)))


def load_quantised(checkpoint: Checkpoint, isq: Any, **settings: Any) -> CausalLM:
    """As `build()` does on a CPU."""
    model = prepare_model(checkpoint)
    target = quantise_target(IsqType(isq), None)
    forms = choose_forms(model, checkpoint, dtype=torch.float32, packing="native", target=target)
    return load_model(
        checkpoint, dtype=torch.float32, device=CPU, model=model, forms=forms, **settings
    )


def logits(model: CausalLM) -> Tensor:
    """After each of thirty ids."""
    cache = PagedKVCache(model.specs, num_blocks=5, block_size=8, dtype=torch.float32, device="cpu")
    backend = CpuBackend(cache)
    batch = make_batch([(Row(IDS, [1, 2, 3, 4]), len(IDS))], 8)
    batch = attrs.evolve(batch, logits_indices=torch.arange(len(IDS)))
    backend.plan(batch)
    return model(batch, backend)


def error_of(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


def packed_bytes_of(model: nn.Module) -> int:
    """Memory that the weights of a loaded model really take."""
    parameters = sum(p.nbytes for p in model.parameters())
    weights = [w for m in model.modules() for w in getattr(m, "packed", ())]
    return parameters + sum(weight.data.nbytes for weight in weights)


def dense_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every matrix as numbers."""
    layers = ((n, m) for n, m in model.named_modules() if isinstance(m, (Linear, Embedding)))
    return {name: module.method.to_dense(module) for name, module in layers}
