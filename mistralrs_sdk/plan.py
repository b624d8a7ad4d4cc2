"""`MemoryPlan`: what a model would take, worked out before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import attrs

from mistralrs_sdk.device_map import DeviceMap
from mistralrs_sdk.errors import ConfigError

_SHOWN_LENGTHS = (512, 2048, 8192)


@attrs.frozen(kw_only=True)
class DevicePlan:
    """What one device holds of a model whose layers are on several; sizes are in bytes."""

    device: str
    layers: tuple[int, ...]
    """Ascending."""
    holds_rest: bool
    """Whether what is in no layer is there: embedding, last norm and head."""
    free_bytes: int
    """Before anything is loaded."""
    weight_bytes: int
    activation_bytes: int
    """Of a step, estimated or measured as in the whole plan."""
    attention_bytes: int
    """FlashInfer's workspace and wrappers; 0 where it does not attend."""
    kv_bytes: int
    """Its part of the pool."""

    @property
    def total_bytes(self) -> int:
        """All of them together."""
        return self.weight_bytes + self.activation_bytes + self.attention_bytes + self.kv_bytes

    def __str__(self) -> str:
        parts = {
            "weights": self.weight_bytes,
            "step": self.activation_bytes,
            "FlashInfer": self.attention_bytes,
            "KV cache": self.kv_bytes,
        }
        sizes = ", ".join(f"{name} {_mib(size)}" for name, size in parts.items() if size)
        rest = " and what is in none" if self.holds_rest else ""
        return f"{len(self.layers)} layers{rest}: {sizes}; {_mib(self.free_bytes)} free"


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """Bytes a model, its computation and its KV cache take; `print(plan)` shows a table.

    Made by `await ModelBuilder(...).plan()`, which sizes everything as `build()` does. What is no
    size in bytes is a count, or a length in tokens.
    """

    name: str
    architecture: str
    device: str
    dtype: str
    free_bytes: int
    """Free on the device before anything is loaded."""
    num_parameters: int
    weight_bytes: int
    weights: str
    """The types the matrices are kept in, and how many there are of each."""
    activation_bytes: int
    """Temporary computation of a step, estimated from the batch limits unless it was measured."""
    reserve_bytes: int
    """Kept free besides when the KV cache is sized."""
    cache: Literal["paged", "dense", "none"]
    """A pool of blocks, a cache per sequence that grows, or no cache."""
    kv_bytes_per_token: int
    kv_growth: int
    """Tokens a sequence takes at once: those of a block, or by which an unpaged cache grows."""
    num_blocks: int
    """Usable blocks of the pool; 0 if the cache is not paged."""
    kv_bytes: int
    """The pool with its null block; unpaged: what the sequences' caches may take together."""
    kv_reason: str
    """Where that size came from."""
    max_model_len: int
    max_model_len_reason: str
    """user, model, or that the KV cache limits it."""
    max_num_seqs: int
    max_num_batched_tokens: int
    adapter_bytes: int = 0
    """The LoRA adapters that are loaded with the model."""
    activations_measured: bool = False
    """Whether `activation_bytes` is what a step took on the device."""
    attention_bytes: int = 0
    """FlashInfer's workspace and the buffers of its wrappers; 0 where it does not attend."""
    graph_bytes: int = 0
    """What CUDA graphs keep, as an estimate; 0 without them."""
    device_map: DeviceMap | None = None
    """Which layers go to which device, or would go if several devices are there but not asked for.

    With several, the numbers of bytes are of all of them together."""
    is_mapped: bool = False
    """Whether `build()` places the layers so; if not, they are all on `device`."""
    devices: tuple[DevicePlan, ...] = ()
    """Each device's part, if `build()` places the layers on several."""

    @property
    def block_size(self) -> int | None:
        """Tokens per block; None if the cache is not paged."""
        return self.kv_growth if self.cache == "paged" else None

    @property
    def taken_bytes(self) -> int:
        """What there must be room for besides the KV cache."""
        weights = self.weight_bytes + self.adapter_bytes
        return weights + self.activation_bytes + self.attention_bytes + self.graph_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens the KV cache holds, all sequences together; 0 without one."""
        if self.cache == "paged":
            return self.num_blocks * self.kv_growth
        return self.kv_bytes // self.kv_bytes_per_token if self.cache == "dense" else 0

    def sequences_of(self, n_tokens: int) -> int:
        """How many sequences of that many tokens, prompt and completion, memory holds at once.

        Not limited by `max_num_seqs`; without a KV cache nothing else limits, and that is returned.
        0 if a sequence may not become that long.

        Raises:
            ConfigError: `n_tokens` is below 1.
        """
        if n_tokens < 1:
            raise ConfigError(f"n_tokens ({n_tokens}) must be at least 1")
        if n_tokens > self.max_model_len:
            return 0
        if self.cache == "none":
            return self.max_num_seqs
        pieces = -(-n_tokens // self.kv_growth)
        if self.cache == "paged":
            return self.num_blocks // pieces
        return self.kv_bytes // (pieces * self.kv_growth * self.kv_bytes_per_token)

    def __str__(self) -> str:
        rows = list(self._rows())
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{name:<{widths[0]}}  {value:>{widths[1]}}  {why}" for name, value, why in rows]
        return "\n".join(line.rstrip() for line in lines)

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        yield "model", self.architecture, self.name
        yield "device", self.device, f"{_mib(self.free_bytes)} free"
        if self.device_map is not None and self.is_mapped:
            yield "layers", f"{len(self.device_map.placed)} runs", self._map()
            for each in self.devices:
                yield each.device, _mib(each.total_bytes), str(each)
        elif self.device_map is not None:
            yield "layers", "one device", f"{self.device} only; by size they would go {self._map()}"
        millions = f"{self.num_parameters / 1e6:.1f} M parameters, {self.weights}"
        yield "weights", _mib(self.weight_bytes), millions
        if self.adapter_bytes:
            yield "adapters", _mib(self.adapter_bytes), "loaded with the model"
        yield (
            "activations",
            _mib(self.activation_bytes),
            f"{'measured' if self.activations_measured else 'estimate'}: "
            f"{self.max_num_batched_tokens} tokens a step, {self.max_num_seqs} sequences",
        )
        if self.attention_bytes:
            yield "FlashInfer", _mib(self.attention_bytes), "its workspace and wrappers"
        if self.graph_bytes:
            yield "CUDA graphs", _mib(self.graph_bytes), "estimate"
        yield "reserve", _mib(self.reserve_bytes), "kept free"
        yield "KV cache", _mib(self.kv_bytes), self._cache()
        yield "KV per token", f"{self.kv_bytes_per_token} bytes", "model"
        yield "context", str(self.max_model_len), self.max_model_len_reason
        if self.cache != "none":
            lengths = {n for n in _SHOWN_LENGTHS if n < self.max_model_len} | {self.max_model_len}
            for n in sorted(lengths):
                yield "sequences", str(self.sequences_of(n)), f"of {n} tokens fit"

    def _map(self) -> str:
        assert self.device_map is not None, "asked for only if there is one"
        return "; ".join([f"to {self.device_map}", *self.device_map.warnings])

    def _cache(self) -> str:
        if self.cache != "paged":
            return self.kv_reason
        shape = f"{self.num_blocks} blocks of {self.block_size} = {self.num_tokens} tokens"
        return f"{shape}; {self.kv_reason}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
