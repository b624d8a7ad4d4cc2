"""The engine on a device that computes meanwhile: graphs, device draws and look-ahead together."""

from __future__ import annotations

import functools
import random

import attrs
import pytest
import torch
from torch import Tensor

from mistralrs_sdk.attention.kv_cache import PagedKVCache
from mistralrs_sdk.attention.sdpa import SdpaBackend
from mistralrs_sdk.engine.block_pool import BlockPool
from mistralrs_sdk.engine.cuda_graphs import FIRST, NOT_DECODE, GraphRunner
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.look_ahead import LookAhead
from mistralrs_sdk.engine.model_runner import ModelRunner, lay_out, lay_out_next
from mistralrs_sdk.engine.request import Request
from mistralrs_sdk.engine.scheduler import Scheduled, Scheduler, SchedulerConfig
from mistralrs_sdk.engine.sequence import Sequence
from mistralrs_sdk.sampling_params import SamplingParams
from tests.engine_helpers import make_request, run_to_end, tokens_of
from tests.fake_device import FakeGraphs, FakeTransfers
from tests.model_helpers import prompt
from tests.test_cuda_graphs import GraphedSdpa
from tests.test_model_parity import ours

CPU = torch.device("cpu")
BLOCK = 4
model_of = functools.cache(ours)

PLAIN = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.2},
    {"temperature": 1.5, "top_p": 0.9999},
    {"temperature": 1.0, "min_p": 0.02},
)
BY_HAND = (
    {"temperature": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.0, "return_logprobs": True},
)


@attrs.define
class Rig:
    """An engine over a tiny model."""

    engine: Engine
    runner: ModelRunner
    look_ahead: LookAhead | None = None
    graphs: GraphRunner | None = None
    transfers: FakeTransfers | None = None

    @classmethod
    def plain(cls, *, num_blocks: int = 99, seqs: int = 12) -> Rig:
        scheduler = scheduler_of(num_blocks, seqs)
        runner = ModelRunner(model_of("llama"), SdpaBackend(cache_of(num_blocks)), CPU, BLOCK)
        return cls(Engine(scheduler, runner), runner)

    @classmethod
    def ahead(cls, *, num_blocks: int = 99, seqs: int = 12) -> Rig:
        scheduler, transfers = scheduler_of(num_blocks, seqs), FakeTransfers()
        model, backend = model_of("llama"), GraphedSdpa(cache_of(num_blocks))
        graphs = GraphRunner(
            model,
            backend,
            device=CPU,
            max_num_seqs=seqs,
            graphs=FakeGraphs(),
            transfers=transfers,
        )
        runner = ModelRunner(model, backend, CPU, BLOCK, graphs=graphs, transfers=transfers)
        look_ahead = LookAhead(scheduler, runner)
        engine = Engine(scheduler, runner, look_ahead=look_ahead)
        return cls(engine, runner, look_ahead, graphs, transfers)

    def tokens(self, requests: list[Request]) -> list[list[list[int]]]:
        for request in requests:
            self.engine.add(request)
        outputs = run_to_end(self.engine)
        return [
            [tokens_of(outputs, request, choice) for choice in range(request.sampling.n_choices)]
            for request in requests
        ]


def cache_of(num_blocks: int) -> PagedKVCache:
    specs = model_of("llama").specs
    return PagedKVCache(
        specs, num_blocks=num_blocks + 1, block_size=BLOCK, dtype=torch.float32, device=CPU
    )


def scheduler_of(num_blocks: int, seqs: int) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=40,
        max_decode_steps_before_prefill=8,
        max_model_len=num_blocks * BLOCK,
    )
    return Scheduler(config, BlockPool(num_blocks + 1, BLOCK))


def ask(seed: int, params: dict, *, length: int = 9, max_tokens: int = 12, n: int = 1) -> Request:
    sampling = SamplingParams(n_choices=n, **params).resolve({})
    request = make_request(prompt(length, seed=seed), max_tokens=max_tokens)
    return attrs.evolve(request, sampling=sampling, seed=seed)


@pytest.mark.parametrize("params", PLAIN)
def test_tokens_are_those_of_steps_one_by_one(params):
    """Replayed, drawn on the device and launched ahead, for every kind of draw."""
    requests = [ask(seed, params, length=3 + 4 * seed, n=1 + seed % 2) for seed in range(4)]
    ahead = Rig.ahead()

    assert ahead.tokens(requests) == Rig.plain().tokens(requests)
    assert ahead.look_ahead is not None
    assert ahead.graphs is not None
    assert ahead.look_ahead.num_ahead > 5
    assert ahead.graphs.stats.replayed > 5
    assert set(ahead.graphs.stats.eager) == {FIRST, NOT_DECODE}


@pytest.mark.parametrize("seed", range(6))
def test_a_mix_has_the_tokens_of_steps_one_by_one(seed):
    """Also where rows that the host draws come and go, and blocks are short."""
    choose = random.Random(seed)
    requests = [
        attrs.evolve(
            ask(
                100 * seed + i,
                choose.choice(PLAIN + BY_HAND if seed % 2 else PLAIN),
                length=choose.randint(1, 20),
                max_tokens=choose.randint(1, 25),
            ),
            stop_ids=frozenset(range(3, choose.choice([3, 40]))),
        )
        for i in range(9)
    ]
    ahead = Rig.ahead(num_blocks=30, seqs=5)

    assert ahead.tokens(requests) == Rig.plain(num_blocks=30, seqs=5).tokens(requests)
    assert ahead.look_ahead is not None
    assert ahead.look_ahead.num_ahead > 0 or seed % 2


def test_each_step_waits_for_the_device_once():
    """And in the middle of an answer only after the next step was launched."""
    rig = Rig.ahead()
    rig.tokens([ask(seed, {"temperature": 0.8, "top_k": 20}, max_tokens=9) for seed in range(3)])

    assert rig.transfers is not None
    log = rig.transfers.log
    assert log == ["launch", "read", "launch", *["launch", "read"] * 7, "read"]


def test_a_wide_nucleus_is_right_though_the_next_step_has_overwritten_the_logits(monkeypatch):
    """Its token is drawn again from logits that were kept."""
    monkeypatch.setattr("mistralrs_sdk.kernels.row_draws.NUCLEUS", 64)
    requests = [ask(seed, {"temperature": 3.0, "top_p": 0.99}) for seed in range(3)]
    ahead = Rig.ahead()

    assert ahead.tokens(requests) == Rig.plain().tokens(requests)


def test_a_runner_draws_on_the_device_without_look_ahead_too():
    """`run` launches and reads."""
    requests = [ask(seed, PLAIN[1]) for seed in range(3)]
    ahead = Rig.ahead()
    ahead.engine = Engine(scheduler_of(99, 12), ahead.runner)

    assert ahead.tokens(requests) == Rig.plain().tokens(requests)
    assert ahead.transfers is not None
    assert ahead.transfers.log[:4] == ["launch", "read", "launch", "read"]


def test_prompt_chunks_draw_nothing():
    """A step in which no sequence reaches its end leaves the device alone."""
    rig = Rig.ahead()
    rig.engine.add(ask(1, {}, length=70))
    rig.engine.step()

    assert rig.transfers is not None
    assert rig.transfers.log == []


def test_the_next_layout_is_that_of_the_sequence_with_its_token():
    """All but the token's id, which the device knows."""
    sequences = []
    for number, length in enumerate((3, 4, 9)):
        sequence = Sequence.from_request(number, make_request(length), 0)
        sequence.num_computed_tokens = length - 1
        sequence.blocks = list(range(1 + 10 * number, 5 + 10 * number))
        sequences.append(sequence)
    found = lay_out_next(sequences, block_size=BLOCK)
    for sequence in sequences:
        sequence.num_computed_tokens += 1
        sequence.tokens.append(0)

    expected = lay_out([Scheduled(s, 1) for s in sequences], block_size=BLOCK)
    assert attrs.asdict(found) == attrs.asdict(expected)


def test_recordings_are_dropped_together():
    """When weights move, graphs and tapes hold addresses of the old ones."""
    rig = Rig.ahead()
    rig.tokens([ask(1, {})])
    assert rig.graphs is not None
    assert rig.graphs.stats.captured

    rig.runner.forget_recordings()

    assert not rig.graphs.stats.captured


def test_a_batch_is_sent_in_one_copy(monkeypatch):
    """Each copy costs more than what is in it."""
    sent: list[Tensor] = []
    rig = Rig.ahead()
    rig.runner.graphs = None
    assert rig.transfers is not None
    send = FakeTransfers.send
    monkeypatch.setattr(
        FakeTransfers, "send", lambda self, values: sent.append(values) or send(self, values)
    )
    rig.engine.add(ask(1, {"temperature": 0.0}))
    rig.engine.step()

    assert len(sent) == 1
