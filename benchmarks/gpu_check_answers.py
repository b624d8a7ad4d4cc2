"""Greedy answers of a model asked one request at a time, and whether others are the same.

Two computations of the same logits differ in their last digits, so where two tokens are nearly
equally likely either may be drawn: a tie. An answer is compared up to its first tie that fell the
other way; a difference anywhere else is an error.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from gpu_check_report import Check

from mistralrs_sdk import Model, SamplingParams
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.request import Request, RequestOutput

TIES = {"f32": 0.005, "bf16": 0.3}
"""Log probabilities closer than this are a tie, in the tiny model, whose logits reach 15.

On a CPU no difference in bf16 was above 0.125, among 8,000 answers that were compared."""
EXAMPLES = 3

_ids = itertools.count()


@attrs.frozen(kw_only=True)
class Answer:
    """What a prompt was answered with, alone."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    """By token, of the most likely ones at each place."""

    def starts_with(self, ids: Sequence[int], *, tie: float) -> int | None:
        """How many of `ids` are those of the answer, up to a tie; None if one is wrong."""
        for place, (found, wanted) in enumerate(zip(ids, self.ids, strict=False)):
            if found != wanted:
                likely = self.logprobs[place]
                near = found in likely and likely[wanted] - likely[found] < tie
                return place if near else None
        return len(ids)

    def first_tie(self, *, tie: float) -> int:
        """The first place where two tokens are as good; the length of the answer if none is."""
        for place, likely in enumerate(self.logprobs):
            first, second = sorted(likely.values(), reverse=True)[:2]
            if first - second < tie:
                return place
        return len(self.ids)


@attrs.define
class Tally:
    """How answers compared."""

    tie: float
    requests: int = 0
    tokens: int = 0
    ties: int = 0
    wrong: list[str] = attrs.field(factory=list)
    counts: Counter[str] = attrs.field(factory=Counter)

    def compare(self, answer: Answer, ids: Sequence[int], *, length: int | None, what: str) -> None:
        """Compare an answer of `length` tokens; None: of any length, as it was cut short."""
        self.requests += 1
        equal = answer.starts_with(ids, tie=self.tie)
        if equal is not None and equal < len(ids):
            self.ties += 1  # from there on it goes its own way, and may end elsewhere
        elif equal is not None and length not in (None, len(ids)):
            equal = None
        if equal is None:
            self.wrong.append(f"{what}: {list(ids)} is not {list(answer.ids[:length])}")
        else:
            self.tokens += equal

    def report(self, check: Check) -> None:
        """All that was counted, and examples of what is wrong."""
        text = f"{self.requests} answers, {self.tokens} tokens equal, {self.ties} left at a tie"
        counts = "".join(f", {count} {what}" for what, count in self.counts.items())
        numbers = {"requests": self.requests, "tokens": self.tokens, "ties": self.ties}
        check.expect(not self.wrong, f"{text}{counts}, {len(self.wrong)} wrong", **numbers)
        for example in self.wrong[:EXAMPLES]:
            check.say(example[:300])


def prompts(count: int, *, longest: int, vocab: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of 3 tokens and more, half of which begin with one of three prefixes."""
    rng = random.Random(seed)
    draw = lambda n: tuple(rng.choices(range(3, vocab), k=n))  # noqa: E731 (a shorthand)
    prefixes = [draw(longest // 2) for _ in range(3)]
    return [
        (rng.choice(prefixes) if i % 2 else ()) + draw(rng.randint(3, longest // 2))
        for i in range(count)
    ]


def greedy(prompt: Sequence[int], max_tokens: int, **more: Any) -> Request:
    """A request for the most likely tokens, with an id of its own."""
    given = {"top_k": 1} | more.pop("sampling", {})
    sampling = SamplingParams(**given).resolve({})
    return Request(
        id=next(_ids), prompt_ids=tuple(prompt), sampling=sampling, max_tokens=max_tokens, **more
    )


def drive(engine: Engine, requests: Sequence[Request]) -> dict[int, list[RequestOutput]]:
    """Give the engine all of them at once and step until they are answered; on its thread."""
    found: dict[int, list[RequestOutput]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].append(output)
    return found


def ids_of(outputs: Sequence[RequestOutput]) -> list[int]:
    """The tokens of one choice, whose outputs these are.

    Raises:
        RuntimeError: the request failed.
    """
    if outputs and outputs[-1].error is not None:
        raise RuntimeError(f"a request failed: {outputs[-1].error}")
    return [token for output in outputs for token in output.token_ids]


async def answers_alone(
    model: Model, prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> list[Answer]:
    """Ask for each answer when nothing else runs, with the likely tokens at each place."""

    def ask(engine: Engine) -> list[Answer]:
        return [answer_alone(engine, prompt, max_tokens) for prompt in prompts]

    # not public: token ids are the engine's business
    return await model.inner().thread.call(ask)


def answer_alone(engine: Engine, prompt: tuple[int, ...], max_tokens: int) -> Answer:
    sampling = {"return_logprobs": True, "top_n_logprobs": 5}
    request = greedy(prompt, max_tokens, sampling=sampling, use_prefix_cache=False)
    outputs = drive(engine, [request])[request.id]
    entries = [entry for output in outputs for entry in output.logprobs]
    return Answer(
        prompt=prompt,
        ids=tuple(ids_of(outputs)),
        logprobs=tuple(dict(entry.top) for entry in entries),
    )


def check_with_transformers(
    check: Check, answers: Sequence[Answer], place: Path, *, device: torch.device
) -> None:
    """Each token must be the most likely one after those before it, in float64, but for ties."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float64, attn_implementation="eager"
    )
    model = model.to(device).eval()
    compared, wrong = 0, 0
    for answer in answers:
        ids = torch.tensor([[*answer.prompt, *answer.ids]], device=device)
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        logits = logits[len(answer.prompt) - 1 : -1]
        best = logits.max(-1).values
        drawn = logits.gather(1, ids[0, len(answer.prompt) :, None])[:, 0]
        wrong += int((best - drawn >= TIES["f32"]).sum())
        compared += len(answer.ids)
    check.expect(not wrong, f"{compared} tokens, {wrong} wrong", tokens=compared, wrong=wrong)
