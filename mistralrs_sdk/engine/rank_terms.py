"""What all ranks of a model keep to: equal settings, one pool, and how long they wait."""

from __future__ import annotations

import hashlib

import attrs

from mistralrs_sdk.engine.model_runner import ModelRunner
from mistralrs_sdk.engine.settle import Settled
from mistralrs_sdk.plan import MemoryPlan

CLOSE_TIMEOUT_S = 5.0
"""How long ranks may take to end when they are told to."""
NOTICE_S = 2.0
"""How long a lost connection may take to be noticed, and a rank's last output to be read."""


def fingerprint(settled: Settled) -> str:
    """Equal on ranks that hold shares of one model and run it in one way."""
    plan, config = settled.plan, settled.config
    parts = (
        plan.architecture,
        plan.num_parameters,
        str(settled.dtype),
        str(settled.kv_dtype),
        settled.packing,
        plan.cache,
        plan.kv_growth,
        sorted({kind for form in settled.forms.values() for kind in form.types}),
        str(config.isq),
        config.max_num_seqs,
        config.cuda_graphs,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def with_pool(plan: MemoryPlan, num_blocks: int, max_model_len: int, context: int) -> MemoryPlan:
    """The plan with the pool and the context that all ranks have room for."""
    if (num_blocks, max_model_len) == (plan.num_blocks, plan.max_model_len):
        return plan
    reason = plan.max_model_len_reason
    if max_model_len < plan.max_model_len:
        reason = f"limited by the KV cache of another rank (the model has {context})"
    return attrs.evolve(
        plan,
        num_blocks=num_blocks,
        kv_bytes=(num_blocks + 1) * plan.kv_growth * plan.kv_bytes_per_token,
        kv_reason=f"{plan.kv_reason}; the least of all ranks",
        max_model_len=max_model_len,
        max_model_len_reason=reason,
    )


def in_step(runner: ModelRunner) -> ModelRunner:
    """A runner of one rank: a tape would leave out what the ranks say to each other."""
    runner.tapes = None
    if runner.graphs is not None:
        runner.graphs.together = True
    return runner
