"""What the sampler keeps of a sequence from step to step, and which of its two ways it takes."""

from __future__ import annotations

import gc
import weakref

import attrs
import pytest
import torch

from mistralrs_sdk.engine.model_runner import ModelRunner
from mistralrs_sdk.engine.request import Request
from mistralrs_sdk.engine.sampler import SamplerRow, sample
from mistralrs_sdk.engine.scheduler import Scheduled
from mistralrs_sdk.engine.sequence import Sequence
from mistralrs_sdk.kernels import elementwise, native
from mistralrs_sdk.sampling_params import DrySamplingParams, SamplingParams
from tests.test_sampler import KINDS, noise, row

VOCAB = 12
PENALTIES = (
    {},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.8, "presence_penalty": -0.3},
    {"repetition_penalty": 0.7, "frequency_penalty": 0.5, "logits_bias": {2: 1.5}},
    {"dry_params": DrySamplingParams(multiplier=0.9, allowed_length=1)},
    {"dry_params": DrySamplingParams(multiplier=0.9), "presence_penalty": 0.6},
)


@pytest.mark.parametrize("params", PENALTIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_is_kept_draws_what_a_new_one_would(params, temperature):
    """Counts and seen tokens grow with the output, once for each token, also several at once."""
    logits = noise(40, VOCAB)
    prompt = (3, 1, 4, 1, 5, 99)
    kept = row(seed=5, prompt=prompt, temperature=temperature, **params)
    tokens = list(prompt)

    for step in range(40):
        fresh = row(seed=5, prompt=prompt, output=tokens[6:], temperature=temperature, **params)
        expected = sample(logits[step : step + 1], [fresh])[0].token_id
        if step not in (7, 8):
            kept.advance(tokens)
            assert sample(logits[step : step + 1], [kept])[0].token_id == expected
        tokens.append(expected)

    assert len(set(tokens)) > 3


def test_sampling_again_changes_nothing():
    """A row that has not advanced draws the same token, and counts nothing twice."""
    logits = noise(1, VOCAB)
    item = row(output=(4, 4), frequency_penalty=1.0, repetition_penalty=1.1)

    assert sample(logits, [item]) == sample(logits, [item]) == sample(logits, [item])


@pytest.mark.skipif(not native.available(), reason="no native kernels here")
@pytest.mark.parametrize("params", [*KINDS, *PENALTIES])
def test_torch_and_the_kernels_draw_the_same(monkeypatch, params):
    """Where there are no kernels, the same request gives the same tokens."""
    logits = noise(6, 300)

    def tokens():
        rows = [row(seed=i, **{"output": (1, 2, 2), **params}) for i in range(6)]
        return sample(logits, rows)

    with_kernels = tokens()
    monkeypatch.setattr(elementwise, "usable", lambda x: False)

    for mine, other in zip(with_kernels, tokens(), strict=True):
        assert mine.token_id == other.token_id
        assert (mine.logprobs is None) == (other.logprobs is None)
        if mine.logprobs is not None:
            assert mine.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)
            assert [i for i, _ in mine.logprobs.top] == [i for i, _ in other.logprobs.top]


def test_numbers_beyond_every_vocabulary_mean_nothing():
    """A top_k or a biased id that no integer of the machine holds is as good as absent."""
    logits = noise(1, 50)
    plain = sample(logits, [row()])

    assert sample(logits, [row(top_k=10**30, logits_bias={10**30: 5.0})]) == plain


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_taken(dtype):
    """They are drawn from as their float32 values are."""
    logits = noise(3, 400).to(dtype)
    rows = [row(seed=i) for i in range(3)]

    assert sample(logits, rows) == sample(logits.float(), rows)


# ---- in the runner


class Backend:
    """Plans nothing."""

    supports_graphs = False

    def plan(self, batch):
        self.batch = batch


def make_sequence(number: int) -> Sequence:
    sampling = SamplingParams(repetition_penalty=1.5, temperature=0.9).resolve({})
    request = Request(
        id=number, prompt_ids=(1, 2, 3), sampling=sampling, max_tokens=99, seed=number
    )
    return attrs.evolve(Sequence.from_request(number, request, 0), blocks=[1, 2, 3, 4, 5])


def make_runner(logits) -> ModelRunner:
    return ModelRunner(
        model=lambda batch, backend: logits[: len(batch.logits_indices)],
        backend=Backend(),
        device=torch.device("cpu"),
        block_size=4,
    )


def test_the_runner_draws_what_a_new_row_would():
    """Step by step, with sequences that come later, and one that takes a break."""
    logits = noise(2, VOCAB) * 0.3
    runner = make_runner(logits)
    sequences = [make_sequence(0), make_sequence(1)]

    for step in range(12):
        chosen = sequences[:1] if step in (0, 1, 6) else sequences
        for sequence in chosen:
            sequence.num_computed_tokens = len(sequence) - 1
        drawn = runner.run([Scheduled(sequence, 1) for sequence in chosen])

        for line, (sequence, token) in enumerate(zip(chosen, drawn, strict=True)):
            fresh = SamplerRow(
                sampling=sequence.request.sampling,
                seed=sequence.request.seed,
                choice=0,
                position=len(sequence),
                prompt_ids=sequence.request.prompt_ids,
                output_ids=sequence.tokens[3:],
            )
            assert [token] == sample(logits[line : line + 1], [fresh])
            sequence.tokens.append(token.token_id)


def test_the_runner_forgets_sequences_that_are_gone():
    """What the sampler keeps of a sequence ends with it."""
    runner = make_runner(noise(1, VOCAB))
    sequence = make_sequence(0)

    runner.run([Scheduled(sequence, 3)])
    assert sequence.sampler_row is not None
    kept = weakref.ref(sequence.sampler_row)
    del sequence
    gc.collect()

    assert kept() is None


def test_a_chunk_that_draws_nothing_has_no_token():
    """A prompt whose end is not reached yet: no logits, no token, and all slots of the chunk."""
    runner = make_runner(noise(1, VOCAB))

    assert runner.run([Scheduled(make_sequence(0), 2)]) == [None]

    batch = runner.backend.batch
    assert batch.input_ids.tolist() == [1, 2]
    assert batch.slot_mapping.tolist() == [4, 5]
    assert batch.logits_indices.tolist() == []
    assert batch.logits_indices.dtype == torch.int64


def test_the_forward_computes_without_a_graph_of_gradients():
    """Whoever calls the runner need not switch them off."""
    modes = []
    runner = attrs.evolve(
        make_runner(noise(1, VOCAB)),
        model=lambda batch, backend: modes.append(torch.is_inference_mode_enabled()) or noise(1, 9),
    )

    runner.run([Scheduled(make_sequence(0), 3)])

    assert modes == [True]
    assert not torch.is_inference_mode_enabled()
