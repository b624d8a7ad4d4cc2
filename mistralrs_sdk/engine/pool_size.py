"""How many blocks the KV pool gets, what is kept for computation, and what context that serves."""

from __future__ import annotations

import logging
import math

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
    bytes_per_token: int,
    max_num_seqs: int,
    model_context: int,
    max_model_len: int | None,
    activation_bytes: int,
    memory: DeviceMemory,
) -> PoolSize:
    """Size the pool for `max_num_seqs` sequences of the longest length, as far as memory goes.

    `memory` is what is there once the weights are loaded; `activation_bytes` of it and its reserve
    stay free. Sizes in MiB or tokens are taken as they are, or refused if they do not fit; a
    fraction and a best effort shrink to what fits. A pool smaller than the model's context
    shortens the context, with a warning; one smaller than the `max_model_len` the user asked for
    is refused.

    Raises:
        ConfigError: the pool cannot hold one sequence of the asked length.
        ModelLoadError: the asked size, or the least of a best effort, does not fit.
    """
    length = model_context if max_model_len is None else max_model_len
    block_bytes = block_size * bytes_per_token
    safe = max(memory.free - memory.reserve - activation_bytes, 0)
    if wanted is None and memory.is_cpu:
        useful = max_num_seqs * -(-length // block_size) * block_bytes
        half = max(memory.free - activation_bytes, 0) // 2
        size = min(useful, AUTO_CPU_BYTES, half)
        reason = (
            "what max_num_seqs sequences of max_model_len can use, "
            "at most 4 GiB and half of the free RAM"
        )
    else:
        wanted = wanted or MemoryGpuConfig.Utilization(AUTO_GPU_FRACTION)
        size, reason = _asked_size(wanted, block_size, bytes_per_token, memory), str(wanted)
        if wanted.kind in ("utilization", "best_effort"):
            size = min(size - _kept_of_fraction(wanted, activation_bytes), safe)
        least = size if wanted.kind in ("mb", "context") else (wanted.minimum or 0) * MIB
        if least > safe:
            raise ModelLoadError(
                f"the KV cache ({reason}) needs {least / GIB:.2f} GiB but only {safe / GIB:.2f} "
                f"GiB are safely free beside {activation_bytes / GIB:.2f} GiB for computation; "
                f"lower it with {KNOBS}; or lower max_num_batched_tokens or max_num_seqs"
            )
    usable = max(size, 0) // block_bytes
    capacity = usable * block_size
    if capacity >= length:
        return PoolSize(num_blocks=usable + 1, max_model_len=length, reason=reason)
    problem = (
        f"the KV cache holds {capacity} tokens ({reason}), less than one sequence of "
        f"{length} tokens (each takes {bytes_per_token} bytes)"
    )
    if max_model_len is not None or not usable:
        message = f"{problem}; set a shorter with_max_model_len or a larger pool: {KNOBS}"
        if activation_bytes > safe:
            message += (
                f"; or lower max_num_batched_tokens or max_num_seqs: a step takes "
                f"{activation_bytes / GIB:.2f} GiB of {memory.free / GIB:.2f} GiB"
            )
        raise ConfigError(message)
    logger.warning("%s: the context is limited to %d; for more, set %s", problem, capacity, KNOBS)
    return PoolSize(num_blocks=usable + 1, max_model_len=capacity, reason=reason)


def _keys_in_sight(window: int | None, max_model_len: int) -> int:
    return max_model_len if window is None else min(window + SCORE_ROWS, max_model_len)


def _asked_size(
    wanted: MemoryGpuConfig, block_size: int, bytes_per_token: int, memory: DeviceMemory
) -> int:
    """Bytes that were asked for, whether they are there or not."""
    if wanted.kind == "context":
        return math.ceil(wanted.amount / block_size) * block_size * bytes_per_token
    if wanted.kind == "utilization":
        if memory.is_cpu:
            return int(memory.free * wanted.amount)
        return int(memory.total * wanted.amount) - (memory.total - memory.free)
    return int(wanted.amount) * MIB


def _kept_of_fraction(wanted: MemoryGpuConfig, activation_bytes: int) -> int:
    """A fraction is for everything, computation included; an amount is for the cache alone."""
    return activation_bytes if wanted.kind == "utilization" else 0
