"""Tokens drawn on the device: those of the host's sampler, and known to be so."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import pytest
import torch
from torch import Tensor

from mistralrs_sdk.engine.device_sampler import DeviceDraw, DeviceSampler, drawn_on_device
from mistralrs_sdk.engine.request import SampledToken
from mistralrs_sdk.engine.sampler import sample
from mistralrs_sdk.engine.sampler_rows import sampler_row
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.kernels import elementwise
from mistralrs_sdk.sampling_params import DrySamplingParams, SamplingParams
from tests.engine_helpers import make_request
from tests.fake_device import FakeTransfers
from tests.test_sampler import noise

INF = float("inf")


def sequence_of(number: int, length: int = 5, **params) -> EngineSequence:
    request = attrs.evolve(
        make_request(length),
        sampling=SamplingParams(**params).resolve({}),
        seed=number,
    )
    return EngineSequence.from_request(number, request, number % 3)


def some_params(choose: random.Random) -> dict:
    """Settings of every kind that the device draws with."""
    return {
        "temperature": choose.choice([0.0, 0.1, 0.7, 1.0, 1.6, 4.0]),
        "top_k": choose.choice([0, 0, 1, 5, 20, 50, 700, 2000, 10**9]),
        "top_p": choose.choice([1.0, 1.0, 0.95, 0.5, 0.999, 0.0]),
        "min_p": choose.choice([0.0, 0.0, 0.05, 0.5]),
    }


def on_host(logits: Tensor, sequences: Sequence[EngineSequence]) -> list[SampledToken]:
    return sample(logits.clone(), [sampler_row(s) for s in sequences])


def draw(logits: Tensor, sequences: Sequence[EngineSequence], *, ahead: int = 0) -> DeviceDraw:
    return DeviceSampler(FakeTransfers()).draw(logits, sequences, ahead=ahead)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("vocab", [40, 1000, 5003])
@pytest.mark.parametrize("levels", [None, 1.0, 8.0])
def test_tokens_are_those_of_the_host(monkeypatch, native, vocab, levels):
    """Row by row, whatever is filtered, tied or impossible, and however many kinds are mixed."""
    if not native:
        monkeypatch.setattr(elementwise, "usable", lambda tensor: False)
    choose = random.Random(vocab)
    for seed in range(12):
        logits = noise(24, vocab, seed=seed) * choose.choice([0.05, 1.0, 3.0])
        if levels:
            logits = (logits * levels).round() / levels
        logits[noise(24, vocab, seed=99).sigmoid() < choose.choice([0.0, 0.5])] = -INF
        sequences = [sequence_of(100 * seed + i, **some_params(choose)) for i in range(24)]

        assert draw(logits, sequences).read() == on_host(logits, sequences)


def test_a_token_is_drawn_on_the_device_before_it_is_read():
    """What the next step starts from needs no read, where no filter reaches past the ranking."""
    logits = noise(6, 5000)
    sequences = [sequence_of(i, temperature=i / 3, top_k=20) for i in range(6)]

    drawn = draw(logits, sequences)
    tokens = drawn.tokens.tolist()

    assert tokens == [token.token_id for token in drawn.read()]
    assert not drawn.redone


def test_a_token_drawn_ahead_has_the_number_of_its_own_place():
    """The random number belongs to the position, whether or not the token before it is known."""
    logits = noise(1, 5000)
    known, unknown = sequence_of(1, 6, temperature=1.0), sequence_of(1, 5, temperature=1.0)

    tokens = draw(logits, [unknown], ahead=1).tokens.tolist()

    assert tokens == draw(logits, [known]).tokens.tolist()
    assert tokens != draw(logits, [unknown]).tokens.tolist()


def test_a_nucleus_past_the_ranking_is_drawn_again():
    """The row is named: what was started from its token is wrong."""
    logits = torch.zeros(3, 5000)
    sequences = [sequence_of(i, temperature=1.0, top_p=p) for i, p in enumerate((1.0, 0.9, 1.0))]

    drawn = draw(logits, sequences)

    assert drawn.read() == on_host(logits, sequences)
    assert drawn.redone == {1}


def test_logits_that_are_overwritten_are_kept_first():
    """A replay writes to the same logits before the tokens of the last one are read."""
    logits = noise(4, 5000, seed=3) * 0.01
    before = logits.clone()
    sequences = [sequence_of(i, temperature=1.0, top_p=0.9 if i % 2 else 1.0) for i in range(4)]

    drawn = draw(logits, sequences)
    drawn.keep_logits()
    drawn.keep_logits()
    logits.zero_()

    assert drawn.read() == on_host(before, sequences)
    assert drawn.redone == {1, 3}


@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.9}, {}])
def test_a_row_that_is_not_finite_gets_the_error_of_the_host(value, params):
    """Its neighbours get their tokens, and its own stays one that can be embedded."""
    logits = noise(3, 300)
    logits[1] = value
    sequences = [sequence_of(i, **params) for i in range(3)]

    drawn = draw(logits, sequences)

    assert 0 <= drawn.tokens[1] < 300
    found = drawn.read()
    assert found[1].error is not None
    assert found == on_host(logits, sequences)


def test_settings_are_kept_only_for_sequences_that_draw():
    """What belongs to a sequence that has ended is forgotten with the next draw."""
    device = DeviceSampler(FakeTransfers())
    first, second = sequence_of(1, temperature=1.0), sequence_of(2, temperature=1.0)
    device.draw(noise(2, 50), [first, second])
    device.draw(noise(1, 50), [second])

    assert list(device._settings) == [second.id]


@pytest.mark.parametrize(
    "params",
    [
        {"return_logprobs": True},
        {"top_n_logprobs": 2},
        {"frequency_penalty": 0.5},
        {"presence_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"logits_bias": {3: 1.0}},
        {"dry_params": DrySamplingParams(multiplier=0.5)},
    ],
)
def test_what_needs_the_host_is_not_drawn_on_the_device(params):
    """Penalties over the history, biases, and log probabilities."""
    assert drawn_on_device(sequence_of(0, temperature=0.7, top_p=0.9).request)
    assert not drawn_on_device(sequence_of(0, **params).request)


def test_processors_constraints_and_raw_logits_need_the_host():
    """They read or change the logits themselves."""
    request = sequence_of(0).request
    for change in (
        {"logits_processors": (lambda row, ids: row,)},
        {"constraint": object()},
        {"raw_logits": True},
    ):
        assert not drawn_on_device(attrs.evolve(request, **change))
