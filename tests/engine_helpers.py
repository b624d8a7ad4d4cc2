"""Fakes and builders shared by the engine's tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import attrs

from mistralrs_sdk.engine.block_pool import BlockPool
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.request import Request, RequestOutput, SampledToken
from mistralrs_sdk.engine.scheduler import Scheduled, Scheduler, SchedulerConfig
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.sampling_params import SamplingParams

GREEDY = SamplingParams(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
)
_ids = itertools.count()


def make_request(
    prompt: Sequence[int] | int, *, max_tokens: int = 1000, n: int = 1, stop_ids: Sequence[int] = ()
) -> Request:
    """A greedy request for a prompt, or for a distinct prompt of the given length."""
    number = next(_ids)
    ids = prompt if not isinstance(prompt, int) else [number * 1000 + i for i in range(prompt)]
    return Request(
        id=number,
        prompt_ids=tuple(ids),
        sampling=attrs.evolve(GREEDY, n_choices=n),
        max_tokens=max_tokens,
        stop_ids=frozenset(stop_ids),
    )


def make_scheduler(*, num_blocks: int = 100, block_size: int = 4, **limits) -> Scheduler:
    """A paged scheduler with roomy limits; `num_blocks` counts the usable ones."""
    defaults = {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4096,
        "max_decode_steps_before_prefill": 8,
        "max_model_len": num_blocks * block_size,
    }
    return Scheduler(SchedulerConfig(**(defaults | limits)), BlockPool(num_blocks + 1, block_size))


def next_token(tokens: Sequence[int]) -> int:
    """What the fake model says after `tokens`: depends on all of them."""
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 2654435761 + len(tokens)) % 50021


@attrs.define
class FakeRunner:
    """A model whose next token is a hash of all tokens; checks that nothing was skipped."""

    fail_when: Callable[[int], bool] = lambda step: False
    steps: list[list[tuple[int, int]]] = attrs.field(factory=list)

    def run(self, scheduled: Sequence[Scheduled]) -> list[SampledToken | None]:
        self.steps.append([(item.sequence.id, item.num_tokens) for item in scheduled])
        if self.fail_when(len(self.steps)):
            raise RuntimeError("the kernel died")
        return [
            SampledToken(next_token(item.sequence.tokens)) if item.samples else None
            for item in scheduled
        ]


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def run_to_end(engine: Engine, *, max_steps: int = 10_000) -> list[RequestOutput]:
    """Step until nothing is left, checking every invariant after each step."""
    outputs = []
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
        engine.scheduler.check()
    raise AssertionError(f"no end after {max_steps} steps")


def tokens_of(outputs: Sequence[RequestOutput], request: Request, choice: int = 0) -> list[int]:
    return [
        token
        for output in outputs
        if (output.request_id, output.choice) == (request.id, choice)
        for token in output.token_ids
    ]


def admit(scheduler: Scheduler, request: Request) -> EngineSequence:
    """Queue a request as a sequence of its own."""
    sequence = EngineSequence.from_request(next(_ids), request, 0)
    scheduler.add(sequence)
    return sequence


def step(scheduler: Scheduler) -> list[tuple[EngineSequence, int]]:
    """One pass with the fake model; returns who computed how many tokens."""
    output = scheduler.schedule()
    tokens = [next_token(i.sequence.tokens) if i.samples else None for i in output.scheduled]
    work = [(item.sequence, item.num_tokens) for item in output.scheduled]
    scheduler.update(output, tokens)
    scheduler.check()
    return work
