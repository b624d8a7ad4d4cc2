"""The random checkpoints of `gpu_check.py`, made on the device, and the models built from them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor

from mistralrs_sdk import MemoryGpuConfig, ModelBuilder, PagedAttentionMetaBuilder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from gpu_check_machine import give_back
from gpu_check_report import LeftOutError
from tiny_models import write_tokenizer

SHARD_BYTES = 2 * 2**30


@attrs.frozen(kw_only=True)
class Shape:
    """A Qwen3 of this size, with heads of 128."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    tied: bool
    context: int = 8192
    spread: float = 0.02
    """Standard deviation of the weights."""

    @property
    def config(self) -> dict[str, Any]:
        """Its `config.json`."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": 128,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    @property
    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all weights."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        q, kv = self.heads * 128, self.kv_heads * 128
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            "self_attn.q_norm": (128,),
            "self_attn.k_norm": (128,),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.mlp, self.hidden),
            "mlp.up_proj": (self.mlp, self.hidden),
            "mlp.down_proj": (self.hidden, self.mlp),
        }
        for layer in range(self.layers):
            for name, shape in parts.items():
                yield f"model.layers.{layer}.{name}.weight", shape
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    @property
    def num_bytes(self) -> int:
        return sum(2 * torch.Size(shape).numel() for _, shape in self.tensors)


TOKENS = Shape(
    name="tiny", hidden=128, layers=4, heads=4, kv_heads=2, mlp=256, vocab=512, tied=True,
    context=512, spread=0.3,
)  # fmt: skip
"""For comparing tokens: weights drawn wide, so that a wrong layer changes them."""
SMALL = Shape(
    name="1.7B", hidden=2048, layers=28, heads=16, kv_heads=8, mlp=6144, vocab=151_936, tied=True
)
LARGE = Shape(
    name="8B", hidden=4096, layers=36, heads=32, kv_heads=8, mlp=12_288, vocab=151_936, tied=False
)
TINY_SMALL = attrs.evolve(SMALL, hidden=256, layers=2, heads=2, kv_heads=1, mlp=512, vocab=2048)
TINY_LARGE = attrs.evolve(
    LARGE, hidden=256, layers=3, heads=4, kv_heads=1, mlp=768, vocab=2048, context=4096
)


def checkpoint(shape: Shape, folder: Path, *, device: torch.device) -> Path:
    """The checkpoint of that shape below `folder`, made if it is not there yet; bfloat16.

    Raises:
        LeftOutError: there is no room for it.
    """
    place = folder / shape.name
    if (place / "config.json").exists():
        return place
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free
    if free < 1.2 * shape.num_bytes:
        raise LeftOutError(
            f"its weights take {shape.num_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are "
            f"free where --work is"
        )
    generator = torch.Generator(device).manual_seed(0)
    shards: dict[str, list[str]] = {}
    held: dict[str, Tensor] = {}
    size = 0

    def write() -> None:
        nonlocal size
        name = f"model-{len(shards) + 1:05d}.safetensors"
        save_file(held, place / name)
        shards[name] = list(held)
        held.clear()
        size = 0

    for name, dims in shape.tensors:
        held[name] = _weight(dims, shape.spread, generator).cpu()
        size += held[name].nbytes
        if size >= SHARD_BYTES:
            write()
    if held:
        write()
    give_back(device)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    index = {"metadata": {"total_size": shape.num_bytes}, "weight_map": weight_map}
    _write_json(place / "model.safetensors.index.json", index)
    write_tokenizer(place)
    _write_json(place / "config.json", shape.config)  # last: it says that all is there
    return place


def builder(
    place: Path,
    *,
    device: torch.device,
    dtype: str,
    seqs: int,
    kv_tokens: int | None = None,
    prefix_cache: bool = True,
) -> ModelBuilder:
    """A builder for a checkpoint; `kv_tokens` makes the cache that small."""
    made = ModelBuilder(place).with_device(device.type).with_dtype(dtype).with_max_num_seqs(seqs)
    if device.type == "cpu":
        made = made.with_num_threads(1)
    if not prefix_cache:
        made = made.with_prefix_cache_n(None)
    if kv_tokens is None:
        return made
    # small blocks: sequences then need another one often, and find none
    paged = PagedAttentionMetaBuilder().with_block_size(8)
    paged = paged.with_gpu_memory(MemoryGpuConfig.ContextSize(kv_tokens))
    return made.with_paged_attn(paged.build())


def _weight(dims: tuple[int, ...], spread: float, generator: torch.Generator) -> Tensor:
    made = torch.empty(dims, dtype=torch.float32, device=generator.device)
    if len(dims) == 1:
        return made.uniform_(0.5, 1.5, generator=generator).bfloat16()
    return made.normal_(0.0, spread, generator=generator).bfloat16()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
