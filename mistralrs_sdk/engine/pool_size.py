"""How many blocks the KV pool gets, and what context they can serve."""

from __future__ import annotations

import logging
import math

import attrs

from mistralrs_sdk.config import MemoryGpuConfig
from mistralrs_sdk.errors import ConfigError, ModelLoadError

logger = logging.getLogger("mistralrs_sdk.engine")

GIB = 2**30
AUTO_CPU_BYTES = 4 * GIB
"""Most RAM the pool takes on a CPU unless a size is asked for."""
AUTO_GPU_FRACTION = 0.9

KNOBS = (
    "PagedAttentionMetaBuilder().with_gpu_memory(...): MemoryGpuConfig.MbAmount(n), "
    "MemoryGpuConfig.Utilization(f) or MemoryGpuConfig.ContextSize(tokens)"
)


@attrs.frozen(kw_only=True)
class DeviceMemory:
    """What the device has, in bytes, once the weights are loaded."""

    free: int
    total: int
    is_cpu: bool

    @property
    def reserve(self) -> int:
        """Kept free for activations and others: 2 percent, at least 512 MiB."""
        return max(self.free // 50, GIB // 2)


@attrs.frozen(kw_only=True)
class PoolSize:
    """The pool's blocks, the null block included, and the context it is for."""

    num_blocks: int
    max_model_len: int
    reason: str
    """Where the size came from, in words."""


def choose_pool_size(
    *,
    wanted: MemoryGpuConfig | None,
    block_size: int,
    bytes_per_token: int,
    max_num_seqs: int,
    model_context: int,
    max_model_len: int | None,
    memory: DeviceMemory,
) -> PoolSize:
    """Size the pool for `max_num_seqs` sequences of the longest length, as far as memory goes.

    Sizes in MiB or tokens are taken as they are, or refused if they do not fit; a fraction shrinks
    to what fits. A pool smaller than the model's context shortens the context, with a warning;
    one smaller than the `max_model_len` the user asked for is refused.

    Raises:
        ConfigError: the pool cannot hold one sequence of the asked length.
        ModelLoadError: the asked size does not fit into the free memory.
    """
    length = model_context if max_model_len is None else max_model_len
    block_bytes = block_size * bytes_per_token
    useful = max_num_seqs * -(-length // block_size) * block_bytes
    safe = max(memory.free - memory.reserve, 0)
    kind = "auto" if wanted is None else wanted.kind
    amount = 0 if wanted is None else wanted.amount
    if kind == "auto" and memory.is_cpu:
        size = min(useful, AUTO_CPU_BYTES, memory.free // 2)
        reason = (
            "what max_num_seqs sequences of max_model_len can use, "
            "at most 4 GiB and half of the free RAM"
        )
    elif kind in ("auto", "utilization"):
        fraction = AUTO_GPU_FRACTION if kind == "auto" else amount
        used = 0 if memory.is_cpu else memory.total - memory.free
        base = memory.free if memory.is_cpu else memory.total
        size = min(int(base * fraction) - used, safe)
        reason = f"Utilization({fraction})"
    else:
        tokens = math.ceil(amount / block_size) * block_size
        size = tokens * bytes_per_token if kind == "context" else int(amount) * 2**20
        reason = f"ContextSize({amount})" if kind == "context" else f"MbAmount({amount})"
        if size > safe:
            raise ModelLoadError(
                f"the KV cache ({reason}) takes {size / GIB:.2f} GiB but only {safe / GIB:.2f} GiB "
                f"are safely free; lower it with {KNOBS}"
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
        raise ConfigError(f"{problem}; set a shorter with_max_model_len or a larger pool: {KNOBS}")
    logger.warning("%s: the context is limited to %d; for more, set %s", problem, capacity, KNOBS)
    return PoolSize(num_blocks=usable + 1, max_model_len=capacity, reason=reason)
