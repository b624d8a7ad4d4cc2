"""Several adapters in one step: what a sequence gets depends on its own only, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
import pytest
import torch
from torch import Tensor

from mistralrs_sdk.attention.cpu import CpuBackend
from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.engine import model_runner
from mistralrs_sdk.engine.adapters import AdapterLease, ResidentAdapter
from mistralrs_sdk.engine.model_runner import ModelRunner, adapter_spans
from mistralrs_sdk.engine.request import SampledToken
from mistralrs_sdk.engine.scheduler import Scheduled
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.kernels import native
from mistralrs_sdk.layers.lora import LoraLayers, LoraPair
from tests.adapter_files import LEAVES
from tests.engine_helpers import make_request
from tests.model_helpers import prompt
from tests.test_batch_invariance import model_of

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")

CPU = torch.device("cpu")
BLOCK, BLOCKS_EACH, STEPS = 8, 4, 4
WATCHED = prompt(13, seed=0)
KINDS = ("Q4_K", "Q6_K", "F16", "Q8_0")


@functools.cache
def layers() -> LoraLayers:
    return LoraLayers(model_of(*KINDS), packed=True, dtype=torch.float32, device=CPU)


@functools.cache
def adapter(name: str) -> ResidentAdapter:
    """An adapter of every matrix ("a"), of some ("b"), of one of them with a high rank ("c")."""
    leaves, rank = {"a": (LEAVES, 8), "b": (("q_proj", "v_proj", "down_proj"), 4)}.get(
        name, (("up_proj",), 40)
    )
    generator = torch.Generator().manual_seed(ord(name))
    pairs = {
        target: LoraPair(
            a=torch.randn(rank, size.in_features, generator=generator) * 0.1,
            b=torch.randn(size.out_features, rank, generator=generator) * 0.1,
            scale=1.5,
        )
        for target, size in layers().targets.items()
        if target.endswith(leaves)
    }
    return ResidentAdapter(generation=name, weights=layers().make(pairs), rank=rank, bytes=0)


def sequence_of(number: int, ids: Sequence[int], name: str | None) -> EngineSequence:
    lease = None if name is None else AdapterLease(name, adapter(name))
    request = attrs.evolve(make_request(list(ids)), adapter=lease)
    sequence = EngineSequence.from_request(number, request, 0)
    sequence.blocks = list(range(1 + BLOCKS_EACH * number, 1 + BLOCKS_EACH * (number + 1)))
    return sequence


def runner_of(num_seqs: int, *, with_layers: bool = True, taped: bool = True) -> ModelRunner:
    cache = PagedKVCache(
        model_of(*KINDS).specs,
        num_blocks=1 + BLOCKS_EACH * num_seqs,
        block_size=BLOCK,
        dtype=torch.float16,
        device="cpu",
    )
    runner = ModelRunner(
        model=model_of(*KINDS),
        backend=CpuBackend(cache),
        device=CPU,
        block_size=BLOCK,
        lora=layers() if with_layers else None,
    )
    if not taped:
        runner.tapes = None
    return runner


@pytest.fixture
def logits_of(monkeypatch):
    """A function that runs (prompt, adapter) pairs together and returns the first one's logits."""
    steps: list[Tensor] = []
    order: list[object] = []

    def keep(logits: Tensor, rows: Sequence[object]) -> list[SampledToken]:
        steps.append(logits.clone())
        order[:] = rows
        return [SampledToken(best) for best in logits.argmax(-1).tolist()]

    monkeypatch.setattr(model_runner, "sample", keep)

    def run(
        asked: Sequence[tuple[Sequence[int], str | None]],
        *,
        chunk: int = 99,
        runner: ModelRunner | None = None,
    ) -> Tensor:
        runner = runner or runner_of(len(asked))
        sequences = [sequence_of(i, ids, name) for i, (ids, name) in enumerate(asked)]
        watched, *others = sequences
        half = len(others) // 2
        scheduled = [*others[:half], watched, *others[half:]]
        result: list[Tensor] = []
        while len(result) < STEPS:
            items = [Scheduled(s, min(chunk, s.num_uncomputed_tokens)) for s in scheduled]
            tokens = runner.run(items)
            if watched.sampler_row is not None and watched.sampler_row in order:
                result.append(steps[-1][order.index(watched.sampler_row)])
            for item, token in zip(items, tokens, strict=True):
                item.sequence.num_computed_tokens += item.num_tokens
                if token is not None:
                    item.sequence.tokens.append(token.token_id)
        return torch.stack(result)

    return run


def company(name: str | None, *others: str | None) -> list[tuple[list[int], str | None]]:
    """The watched prompt under `name`, and other prompts, each with the next of these adapters."""
    rest = [(prompt(1 + 5 * i % 11, seed=i), other) for i, other in enumerate(others, start=1)]
    return [(WATCHED, name), *rest]


@pytest.mark.parametrize("name", [None, "a", "b", "c"])
def test_a_sequence_does_not_depend_on_the_adapters_beside_it(logits_of, name):
    """Alone, beside its own adapter, beside others and the base, read whole or in pieces."""
    alone = logits_of(company(name))

    assert alone.isfinite().all()
    for others in ([name], ["a", None], ["c", "b", None, "a", "b", name], [None] * 3 + ["a"] * 9):
        for chunk in (99, 4):
            assert torch.equal(logits_of(company(name, *others), chunk=chunk), alone)


def test_adapters_give_other_logits_and_the_base_model_its_own(logits_of):
    """The base model's are those of a runner without adapters, replayed from tapes or not."""
    found = [logits_of(company(name, "a", "b")) for name in (None, "a", "b", "c")]

    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            assert not torch.equal(one, other)
    plain = logits_of(company(None, None, None), runner=runner_of(3, with_layers=False))
    assert torch.equal(found[0], plain)
    assert torch.equal(logits_of(company(None, None, None)), plain)


def test_one_tape_is_replayed_with_any_adapters(logits_of):
    """Which rows have which adapter is no part of it; neither is that some have none."""
    runner = runner_of(4)
    mixes = [
        ("a", "b", None, "a"),
        ("b", None, "c", "c"),
        ("c", "c", "c", "c"),
        ("a", None, None, "b"),
    ]
    for mix in mixes:
        asked = company(*mix)

        found = logits_of(asked, runner=runner)

        assert torch.equal(found, logits_of(asked, runner=runner_of(4, taped=False)))
    assert runner.tapes is not None
    assert {key for key, step in runner.tapes._steps.items() if step.tape is not None} == {-4}


def test_tokens_come_back_in_the_order_of_the_sequences(logits_of):
    """Whatever order they were computed in; a prompt that is not finished draws nothing."""
    names = ["b", None, "a", "b", "a"]
    runner_tokens: list[list[int]] = []
    for chosen in (names, [None] * 5):
        tokens = logits_of([(prompt(9, seed=i), name) for i, name in enumerate(chosen)])
        runner_tokens.append(tokens.argmax(-1).tolist())
    alone = logits_of([(prompt(9, seed=0), "b")]).argmax(-1).tolist()

    assert runner_tokens[0] == alone != runner_tokens[1]


def test_the_rows_of_one_adapter_are_one_span():
    """Prompts and decodes alike; rows of the base model are in none."""
    items = [
        Scheduled(sequence_of(i, prompt(9), name), tokens)
        for i, (name, tokens) in enumerate([(None, 3), ("a", 2), ("a", 1), ("b", 4)])
    ]

    spans = adapter_spans(items)

    assert spans == [(3, 6, adapter("a").weights), (6, 10, adapter("b").weights)]
