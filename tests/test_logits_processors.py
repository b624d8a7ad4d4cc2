"""Logits processors: what they see, what they change, and what happens when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from mistralrs_sdk import Constraint, InferenceError, Model, RequestBuilder
from mistralrs_sdk.engine.sampler import SamplerRow, sample
from mistralrs_sdk.sampling_params import SamplingParams
from tests.engine_helpers import GREEDY
from tests.model_helpers import assert_idle, tiny_builder


def only(token: int):
    """A processor after which nothing but `token` can come."""

    def keep(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        kept = torch.full_like(logits, -torch.inf)
        kept[token] = 0.0
        return kept

    return keep


def asked(max_len: int = 8) -> RequestBuilder:
    request = RequestBuilder().add_message("user", "hello").set_sampler_max_len(max_len)
    return request.set_sampler_ignore_eos(True)


async def text(model: Model, request: RequestBuilder) -> str:
    return (await model.send_chat_request(request)).choices[0].message.content


def row(**settings) -> SamplerRow:
    """A greedy row whose prompt is 1, 2 and whose output is 3."""
    sampling = {**{f: getattr(GREEDY, f) for f in ("top_k", "top_p", "min_p")}}
    fields = {key: settings.pop(key) for key in ("processors",) if key in settings}
    params = SamplingParams(
        **{
            "temperature": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            **sampling,
            **settings,
        }
    )
    return SamplerRow(
        sampling=params, seed=0, choice=0, position=3, prompt_ids=(1, 2), output_ids=[3], **fields
    )


def test_a_processor_sees_the_row_after_penalties_and_bias():
    """It gets float32 logits [vocab] with penalties and bias applied, and all ids so far."""
    seen = []

    def look(logits, ids):
        seen.append((logits.clone(), ids))
        return logits

    changed = row(
        processors=(look,),
        frequency_penalty=0.5,
        repetition_penalty=2.0,
        logits_bias={4: 1.5, 99: 1.0},
    )
    sample(torch.tensor([[4.0, -1.0, 3.0, 2.0, 0.0]]), [changed])

    ((logits, ids),) = seen
    assert logits.dtype is torch.float32
    assert logits.tolist() == [4.0, -2.0, 1.5, 0.75, 1.5]
    assert ids == [1, 2, 3]


def test_processors_run_in_order_and_before_the_temperature():
    """Each gets what the one before returned; the draw is from the last one's row."""
    processors = (lambda logits, ids: logits + 1, lambda logits, ids: -logits)

    (token,) = sample(torch.tensor([[1.0, 5.0, -3.0]]), [row(processors=processors)])

    assert token.token_id == 2


def test_penalties_are_not_applied_twice():
    """The draw after a processor has no penalties of its own left, at every step."""
    changed = row(processors=(lambda logits, ids: logits,), frequency_penalty=1.0)
    logits = torch.tensor([[0.0, 0.0, 0.0, 3.5, 2.0]])

    assert sample(logits.clone(), [changed])[0].token_id == 3  # 3.5 - 1 is still the largest
    changed.advance([1, 2, 3, 3])
    assert sample(logits.clone(), [changed])[0].token_id == 4


def test_other_rows_are_left_as_they_were():
    """Rows without processors are neither copied nor changed."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()

    drawn = sample(logits, [row(), row(processors=(only(7),)), row()])

    assert torch.equal(logits[0], before[0])
    assert torch.equal(logits[2], before[2])
    assert [d.token_id for d in drawn] == [int(before[0].argmax()), 7, int(before[2].argmax())]


def test_log_probabilities_are_those_of_the_model():
    """What a processor changed does not show in them."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    expected = torch.log_softmax(logits[0], dim=-1)[7].item()

    (drawn,) = sample(logits, [row(processors=(only(7),), return_logprobs=True)])

    assert drawn.logprobs.logprob == pytest.approx(expected, abs=1e-5)


def raises(logits, ids):
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (raises, "logits processor raises raised KeyError: 'no such thing'"),
        (lambda logits, ids: logits[:5], r"returned shape \[5\] for \[50\]"),
        (lambda logits, ids: None, "returned NoneType, not a row of logits"),
        (lambda logits, ids: "x", "returned str, not a row of logits"),
        (lambda logits, ids: logits * torch.nan, r"returned NaN or \+inf"),
        (lambda logits, ids: logits + torch.inf, r"returned NaN or \+inf"),
        (lambda logits, ids: logits - torch.inf, "every logit is -inf"),
    ],
)
def test_a_processor_that_fails_takes_its_row_alone(processor, message):
    """The row gets the message as its error; its neighbours draw as ever."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    best = int(logits[1].argmax())

    failed, fine = sample(logits, [row(processors=(processor,)), row()])

    assert failed.token_id == -1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failed.error)
    assert (fine.token_id, fine.error) == (best, None)


def test_numpy_rows_are_taken():
    """A processor may work in NumPy and return its array."""
    (drawn,) = sample(torch.zeros(1, 50), [row(processors=(lambda logits, ids: np.eye(50)[9],))])

    assert drawn.token_id == 9


async def test_a_processor_steers_the_answer():
    """What it allows is what comes, at every step; what it sees grows by a token each."""
    lengths = []

    def watch(logits, ids):
        lengths.append(len(ids))
        return logits

    async with await tiny_builder().build() as model:
        request = asked(5).add_logits_processor(only(80)).add_logits_processor(watch)
        steered = await text(model, request)
        free = await text(model, asked(5))

    assert len(set(steered)) == 1
    assert steered != free
    assert lengths == list(range(lengths[0], lengths[0] + 5))


async def test_a_processor_that_raises_ends_its_request_alone():
    """The others go on, and the error says which processor and why."""
    async with await tiny_builder().build() as model:
        alone = await text(model, asked())
        bad = asked().add_logits_processor(raises)
        found = await asyncio.gather(
            text(model, asked()), text(model, bad), text(model, asked()), return_exceptions=True
        )
        await assert_idle(model)

    assert found[0] == found[2] == alone
    assert isinstance(found[1], InferenceError)
    assert "logits processor raises raised KeyError" in str(found[1])


async def test_a_processor_cannot_lift_a_constraint():
    """What the constraint bans stays banned, whatever a processor returns."""
    async with await tiny_builder().build() as model:
        request = asked().set_constraint(Constraint.Regex("(yes|no)"))
        answer = await text(model, request.add_logits_processor(lambda logits, ids: logits * 0 + 1))

    assert answer in ("yes", "no")


@pytest.mark.parametrize(
    "error",
    [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()],
    ids=repr,
)
def test_a_processor_that_would_end_its_thread_fails_its_own_row(error):
    """What is no Exception, as sys.exit() raises, is the row's error like any other."""

    def leave(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        raise error

    logits = torch.zeros(2, 8)
    logits[1, 5] = 1.0

    failed, other = sample(logits, [row(processors=(leave,)), row()])

    assert type(error).__name__ in (failed.error or "")
    assert other.token_id == 5


class Unwilling:
    """An array that cannot be read."""

    def __array__(self, *args: object, **settings: object) -> np.ndarray:
        raise KeyError("nothing here")


@pytest.mark.parametrize("result", [torch.zeros(8).to_sparse(), Unwilling()], ids=["sparse", "bad"])
def test_a_result_that_cannot_be_read_fails_its_own_row(result):
    """A result that torch cannot take as a plain row fails nobody else."""
    failed, other = sample(
        torch.zeros(2, 8), [row(processors=(lambda logits, ids: result,)), row()]
    )

    assert "not a row of logits" in (failed.error or "")
    assert other.error is None
