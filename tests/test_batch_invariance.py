"""Logits of a packed model do not depend on what shares a step, bit for bit, replayed or not."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from mistralrs_sdk.attention.cpu import CpuBackend
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.engine import model_runner
from mistralrs_sdk.engine.model_runner import ModelRunner
from mistralrs_sdk.engine.request import SampledToken
from mistralrs_sdk.engine.scheduler import Scheduled
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.engine.step_tapes import MAX_ROWS
from mistralrs_sdk.kernels import native
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import Linear, MergedLinear
from mistralrs_sdk.layers.norm import RMSNorm
from mistralrs_sdk.models import build_model, read_config
from mistralrs_sdk.models.decoder import CausalLM
from mistralrs_sdk.quant.packed import PackedMethod
from tests.checkpoint_files import config_for
from tests.engine_helpers import make_request
from tests.model_helpers import prompt

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")

BLOCK, BLOCKS_EACH, STEPS = 8, 5, 6
WATCHED = prompt(21, seed=0)
KINDS = ["F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@functools.cache
def model_of(*kinds: str) -> CausalLM:
    """A tiny llama whose matrices have these types in turn, also the parts of a fused one."""
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = build_model(read_config(config_for("llama", **sizes, **heads)))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    kind = itertools.cycle(kinds)
    for module in model.modules():
        if isinstance(module, (Linear, Embedding)):
            merged = isinstance(module, MergedLinear)
            rows = module.parts.values() if merged else [module.out_features]
            method = PackedMethod.of([(next(kind), count) for count in rows])
            method.from_dense(module, cast(Tensor, module.weight))
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
    return model


def runner_of(model: CausalLM, num_seqs: int, *, taped: bool) -> ModelRunner:
    cache = PagedKVCache(
        model.specs,
        num_blocks=1 + BLOCKS_EACH * num_seqs,
        block_size=BLOCK,
        dtype=torch.float16,
        device="cpu",
    )
    backend, device = CpuBackend(cache), torch.device("cpu")
    runner = ModelRunner(model=model, backend=backend, device=device, block_size=BLOCK)
    if not taped:
        runner.tapes = None
    return runner


def in_the_middle(prompts: list[list[int]]) -> tuple[EngineSequence, list[EngineSequence]]:
    """The sequence of the first prompt, and all, with neighbours on both sides of it."""
    sequences = []
    for i, ids in enumerate(prompts):
        sequence = EngineSequence.from_request(i, make_request(ids), 0)
        sequence.blocks = list(range(1 + BLOCKS_EACH * i, 1 + BLOCKS_EACH * (i + 1)))
        sequences.append(sequence)
    first, *others = sequences
    half = len(others) // 2
    return first, [*others[:half], first, *others[half:]]


@pytest.fixture
def logits_of(monkeypatch):
    """A function that runs prompts together and returns the logits of the first one's tokens."""
    steps: list[Tensor] = []

    def keep(logits: Tensor, rows: Sequence[object]) -> list[SampledToken]:
        steps.append(logits.clone())
        return [SampledToken(best) for best in logits.argmax(-1).tolist()]

    monkeypatch.setattr(model_runner, "sample", keep)

    def run(model: CausalLM, prompts: list[list[int]], *, chunk: int = 99, taped: bool) -> Tensor:
        runner = runner_of(model, len(prompts), taped=taped)
        watched, order = in_the_middle(prompts)
        result: list[Tensor] = []
        while len(result) < STEPS:
            items = [Scheduled(s, min(chunk, s.num_uncomputed_tokens)) for s in order]
            drawing = [item.sequence for item in items if item.samples]
            tokens = runner.run(items)
            if watched in drawing:
                result.append(steps[-1][drawing.index(watched)])
            for item, token in zip(items, tokens, strict=True):
                item.sequence.num_computed_tokens += item.num_tokens
                if token is not None:
                    item.sequence.tokens.append(token.token_id)
        if taped and len(prompts) <= MAX_ROWS:
            assert runner.tapes is not None
            assert runner.tapes._steps[len(prompts)].tape is not None, "nothing was replayed"
        return torch.stack(result)

    return run


def company(count: int) -> list[list[int]]:
    """The watched prompt and others of many lengths, so that they decode while some still read."""
    return [WATCHED, *(prompt(1 + 5 * i % 17, seed=i) for i in range(1, count))]


@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), ("Q4_K", "Q6_K", "F16", "Q8_0")])
def test_logits_do_not_depend_on_company_chunks_or_replays(logits_of, kinds):
    """Alone, as one of 3, of 32 and of 40, with a prompt read whole or in pieces."""
    model = model_of(*kinds)
    alone = logits_of(model, [WATCHED], taped=False)

    assert alone.isfinite().all()
    for taped in (True, False):
        for count, chunk in ((1, 99), (1, 5), (1, 1), (3, 99), (3, 4), (32, 99), (40, 6)):
            together = logits_of(model, company(count), chunk=chunk, taped=taped)
            assert torch.equal(together, alone), (taped, count, chunk)


@pytest.mark.parametrize("kind", ["F16", "Q4_1", "Q6_K"])
def test_logits_do_not_depend_on_the_number_of_threads(logits_of, kind):
    """However the rows and columns are divided, each sum has its order."""
    model, threads = model_of(kind), torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results += [logits_of(model, company(count), taped=True) for count in (1, 9)]
    finally:
        torch.set_num_threads(threads)

    assert all(torch.equal(result, results[0]) for result in results)
