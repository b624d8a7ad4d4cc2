"""How models that share a machine share the memory for their KV caches."""

from __future__ import annotations

from collections.abc import Sequence

from mistralrs_sdk.config import EngineConfig, MemoryGpuConfig
from mistralrs_sdk.engine.pool_size import AUTO_CPU_BYTES, MIB
from mistralrs_sdk.plan import MemoryPlan


def share_kv_memory(
    plans: Sequence[MemoryPlan], configs: Sequence[EngineConfig]
) -> list[MemoryGpuConfig | None]:
    """Return the pool size each model needs to fit beside the others; None: as it is set.

    `plans` are what each would take alone. Where the size is automatic or a fraction, the models of
    a device share what it has beside all weights and computation, in proportion to their
    `max_num_seqs`; on a CPU an automatic size is part of the 4 GiB, or half of the free RAM, that
    one model would have. An amount in MiB is taken as far as it fits, any other size as it is: who
    writes one means this model.
    """
    models = list(zip(plans, map(_asked, configs), strict=True))
    sizes: list[MemoryGpuConfig | None] = []
    for plan, asked in models:
        size = None
        if plan.cache == "paged" and _is_shared(asked):
            neighbours = [model for model in models if model[0].device == plan.device]
            share = _share(plan, asked, neighbours)
            if share < plan.kv_bytes:
                size = MemoryGpuConfig.BestEffortMbAmount(max(share // MIB, 1))
        elif plan.cache == "paged" and asked is not None and asked.kind == "mb":
            size = MemoryGpuConfig.BestEffortMbAmount(int(asked.amount))
        sizes.append(size)
    return sizes


def _share(
    plan: MemoryPlan,
    asked: MemoryGpuConfig | None,
    neighbours: Sequence[tuple[MemoryPlan, MemoryGpuConfig | None]],
) -> int:
    """Bytes for the pool of one model among those on its device, itself included."""
    taken, sequences, alone = 0, 0, []
    for other, wish in neighbours:
        own = other.taken_bytes
        taken += own
        if other.cache == "paged" and _is_shared(wish):
            sequences += other.max_num_seqs
            alone.append(own + other.kv_bytes)
        elif other.cache == "paged":
            taken += other.kv_bytes
    if asked is None and plan.device == "cpu":
        budget = min(AUTO_CPU_BYTES, (plan.free_bytes - taken) // 2)
    else:
        budget = min(alone) - taken
    return max(budget, 0) * plan.max_num_seqs // sequences


def _asked(config: EngineConfig) -> MemoryGpuConfig | None:
    paged = config.paged_attn
    return None if paged is None or paged == "auto" else paged.gpu_memory


def _is_shared(asked: MemoryGpuConfig | None) -> bool:
    return asked is None or asked.kind == "utilization"
