"""How many blocks the KV pool gets, what is kept for computation, and what context that serves."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import attrs

from mistralrs_sdk.config import MemoryGpuConfig
from mistralrs_sdk.errors import ConfigError, ModelLoadError
from mistralrs_sdk.models.config import ModelConfig

logger = logging.getLogger("mistralrs_sdk.engine")

GIB = 2**30
MIB = 2**20
AUTO_CPU_BYTES = 4 * GIB
"""Most RAM the pool takes on a CPU unless a size is asked for."""
AUTO_GPU_FRACTION = 0.9
SCORE_ROWS = 512
"""Query rows that are attended to at once."""
_FLOAT32 = 4

KNOBS = (
    "PagedAttentionMetaBuilder().with_gpu_memory(...): MemoryGpuConfig.MbAmount(n), "
    "BestEffortMbAmount(n), Utilization(f) or ContextSize(tokens)"
)


@attrs.frozen(kw_only=True)
class DeviceMemory:
    """What a device has, in bytes."""

    free: int
    total: int
    is_cpu: bool

    @property
    def reserve(self) -> int:
        """Kept free for others and for what no estimate sees: 2 percent, at least 512 MiB."""
        return max(self.free // 50, GIB // 2)

    def after_loading(self, weight_bytes: int) -> DeviceMemory:
        """What is left once weights of that size are there."""
        return attrs.evolve(self, free=max(self.free - weight_bytes, 0))

    def limited_to(self, fraction: float) -> DeviceMemory:
        """As if the device had only that share of its memory; the rest counts as not there."""
        total = int(self.total * fraction)
        return attrs.evolve(self, total=total, free=max(self.free - (self.total - total), 0))


@attrs.frozen(kw_only=True)
class Activations:
    """Temporary memory of a step, in bytes, as an estimate."""

    mapped: int
    """Inside the layers."""
    non_mapped: int
    """Outside of them: the logits and what the sampler makes of them."""

    @property
    def total(self) -> int:
        """Both: an allocator keeps the memory of the one while the other runs."""
        return self.mapped + self.non_mapped


@attrs.frozen(kw_only=True)
class PoolPlace:
    """A device that holds the keys and values of some layers, or of all."""

    name: str
    bytes_per_token: int
    """Of its layers."""
    activation_bytes: int
    """What steps compute there, and whatever else must find room beside the pool."""
    memory: DeviceMemory
    """Once the weights are loaded."""

    @property
    def safe(self) -> int:
        """Bytes that the pool may take."""
        return max(self.memory.free - self.memory.reserve - self.activation_bytes, 0)


@attrs.frozen(kw_only=True)
class PoolSize:
    """The pool's blocks, the null block included, and the context it is for."""

    num_blocks: int
    max_model_len: int
    reason: str
    """Where the size came from, in words."""


def estimate_activations(
    model: ModelConfig,
    *,
    itemsize: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> Activations:
    """What the largest step computes besides keys and values: it grows with each of the limits.

    `itemsize` is the bytes of a value. Per token: the residual and its sum, its norm worked out in
    float32, the rotations; then either queries, keys and values, the first two normalised and then
    rotated as well, and the attention's result, or the MLP's gate, up, activation and product. Per
    step: one tile of attention, and the keys and values of the sequence it reads. Per sequence:
    float32 logits and their probabilities.
    """
    tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    residual = 2 * (itemsize + _FLOAT32) * tokens * model.hidden_size
    residual += 2 * len(set(model.ropes)) * head_dim * tokens * itemsize
    attention = (4 * heads + 4 * kv_heads) * head_dim * tokens * itemsize
    keys = max(_keys_in_sight(window, max_model_len) for window in model.windows)
    attention += 2 * keys * kv_heads * head_dim * itemsize
    # A kernel gets by with the mask; a soft cap needs the scores themselves, and their softmax.
    per_score = _FLOAT32 if model.attn_softcap is None else 3 * heads * _FLOAT32
    attention += min(SCORE_ROWS, tokens) * keys * per_score
    mlp = 4 * tokens * model.intermediate_size * itemsize
    logits = 2 * max_num_seqs * model.vocab_size * _FLOAT32
    return Activations(mapped=residual + max(attention, mlp), non_mapped=logits)


def choose_pool_size(
    *,
    wanted: MemoryGpuConfig | None,
    block_size: int,
    places: Sequence[PoolPlace],
    max_num_seqs: int,
    model_context: int,
    max_model_len: int | None,
) -> PoolSize:
    """Size the pool for `max_num_seqs` sequences of the longest length, as far as memory goes.

    Every device holds as many blocks, those of its layers; the one with least room decides. Of its
    memory the reserve and what steps compute stay free. Sizes in MiB or tokens are of the whole
    pool, and taken as they are or refused if they do not fit; a fraction, which is of each device,
    and a best effort shrink to what fits. A pool smaller than the model's context shortens the
    context, with a warning; one smaller than the `max_model_len` the user asked for is refused.

    Raises:
        ConfigError: the pool cannot hold one sequence of the asked length.
        ModelLoadError: the asked size, or the least of a best effort, does not fit.
    """
    length = model_context if max_model_len is None else max_model_len
    bytes_per_token = sum(place.bytes_per_token for place in places)
    found: list[tuple[int, str, PoolPlace]] = []
    for place in places:
        share = place.bytes_per_token / bytes_per_token
        where = f" on {place.name}" if len(places) > 1 else ""
        block_bytes = block_size * place.bytes_per_token
        if wanted is None and place.memory.is_cpu:
            useful = max_num_seqs * -(-length // block_size) * block_bytes
            half = max(place.memory.free - place.activation_bytes, 0) // 2
            size = min(useful, int(AUTO_CPU_BYTES * share), half)
            reason = (
                "what max_num_seqs sequences of max_model_len can use, "
                "at most 4 GiB and half of the free RAM"
            )
        else:
            asked = wanted or MemoryGpuConfig.Utilization(AUTO_GPU_FRACTION)
            size, reason = _fitting_size(asked, block_size, place, share=share, where=where)
        found.append((max(size, 0) // block_bytes, reason + where, place))
    usable, reason, place = min(found, key=lambda item: item[0])
    capacity = usable * block_size
    if capacity >= length:
        return PoolSize(num_blocks=usable + 1, max_model_len=length, reason=reason)
    problem = (
        f"the KV cache holds {capacity} tokens ({reason}), less than one sequence of "
        f"{length} tokens (each takes {bytes_per_token} bytes)"
    )
    if max_model_len is not None or not usable:
        message = f"{problem}; set a shorter with_max_model_len or a larger pool: {KNOBS}"
        raise ConfigError(message + _what_is_short(place))
    logger.warning("%s: the context is limited to %d; for more, set %s", problem, capacity, KNOBS)
    return PoolSize(num_blocks=usable + 1, max_model_len=capacity, reason=reason)


def _keys_in_sight(window: int | None, max_model_len: int) -> int:
    return max_model_len if window is None else min(window + SCORE_ROWS, max_model_len)


def _fitting_size(
    wanted: MemoryGpuConfig, block_size: int, place: PoolPlace, *, share: float, where: str
) -> tuple[int, str]:
    """Bytes of the pool on a device that has `share` of it, and why."""
    safe = place.safe
    size = _asked_size(wanted, block_size, place, share=share)
    if wanted.kind in ("utilization", "best_effort"):
        # A fraction is for everything, computation included; an amount is for the cache alone.
        kept = place.activation_bytes if wanted.kind == "utilization" else 0
        size = min(size - kept, safe)
    least = size if wanted.kind in ("mb", "context") else int((wanted.minimum or 0) * MIB * share)
    if least > safe:
        raise ModelLoadError(
            f"the KV cache ({wanted}) needs {least / GIB:.2f} GiB{where} but only "
            f"{safe / GIB:.2f} GiB are safely free beside {place.activation_bytes / GIB:.2f} GiB "
            f"for computation; lower it with {KNOBS}; or lower max_num_batched_tokens or "
            "max_num_seqs"
        )
    return size, str(wanted)


def _asked_size(wanted: MemoryGpuConfig, block_size: int, place: PoolPlace, *, share: float) -> int:
    """Bytes that were asked for, whether they are there or not."""
    memory = place.memory
    if wanted.kind == "context":
        return math.ceil(wanted.amount / block_size) * block_size * place.bytes_per_token
    if wanted.kind == "utilization":
        if memory.is_cpu:
            return int(memory.free * wanted.amount)
        return int(memory.total * wanted.amount) - (memory.total - memory.free)
    return int(wanted.amount * MIB * share)


def _what_is_short(place: PoolPlace) -> str:
    """What else takes the memory, if that is what leaves so little."""
    memory, said = place.memory, ""
    if place.activation_bytes > place.safe:
        said += (
            f"; or lower max_num_batched_tokens or max_num_seqs: a step takes "
            f"{place.activation_bytes / GIB:.2f} GiB of {memory.free / GIB:.2f} GiB"
        )
    if not memory.is_cpu and memory.free < memory.total // 2:
        said += (
            f"; {(memory.total - memory.free) / GIB:.2f} of {memory.total / GIB:.2f} GiB are taken "
            "by the weights and by others: models that share a device need a size each"
        )
    return said
