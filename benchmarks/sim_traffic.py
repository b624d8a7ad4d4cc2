"""Made-up traffic for the scheduler simulator: who asks what, when, and who loses patience."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator

import attrs

from mistralrs_sdk.engine.request import Request
from mistralrs_sdk.engine.sequence import Sequence
from mistralrs_sdk.sampling_params import SamplingParams

GREEDY = SamplingParams(top_k=1).resolve({})
TEXT_SPACING = 1 << 16
"""Token ids of one text start this far from the next one's: texts share nothing by chance."""

MAX_TURNS = 32


@attrs.frozen(kw_only=True)
class Traffic:
    """Requests arrive at random (Poisson); their lengths are lognormal, so a few are very long.

    A conversation starts with one of a few system prompts or with none, and goes on after its
    answer with some probability; its next prompt is all that was said so far and a new question.
    """

    requests: int = 2000
    rate: float = 8.0
    """Requests per second, follow-ups included."""
    prompt_tokens: float = 150.0
    """Median of what a user adds."""
    output_tokens: float = 150.0
    """Median of an answer."""
    prompt_spread: float = 1.0
    """Sigma of the lognormal: with 1, one prompt in a hundred is ten times the median."""
    output_spread: float = 0.7
    longest: int = 4096
    """Most tokens of a prompt with its answer."""
    system_prompts: int = 4
    system_tokens: int = 400
    system_share: float = 0.5
    """How many conversations start with one of the system prompts."""
    follow_up: float = 0.5
    """The probability that an answer is followed by another question."""
    think_seconds: float = 10.0
    """Mean time from an answer to the next question."""
    canceled: float = 0.02
    """How many requests are given up before their end unless it comes soon."""
    patience_seconds: float = 5.0
    """Mean time after which those are given up."""
    urgent: float = 0.0
    """How many requests come with a higher priority."""


@attrs.define(eq=False)
class Conversation:
    """One user's turns, drawn from a generator of its own: no setting changes what they are."""

    random: random.Random
    turns_left: int
    said: tuple[int, ...]
    """All tokens so far: the next prompt starts with them."""
    urgent: bool
    texts: Iterator[int]
    """Where the token ids of its next text start."""


class Arrivals:
    """Draws the traffic as time goes by; memory is bounded by what is alive.

    The same traffic and seed give the same conversations, whatever becomes of them.
    """

    def __init__(self, traffic: Traffic, *, seed: int) -> None:
        self._traffic = traffic
        self._seed = seed
        self._starts = random.Random(seed)
        self._numbers = itertools.count()
        self._num_conversations = 0
        self._planned = 0
        self._next_start = 0.0
        self._later: list[tuple[float, int, Conversation | Sequence]] = []
        """Next turns and lost patience, by time."""
        self._living: dict[int, Conversation] = {}
        self._plan_start(0.0)

    @property
    def next_at(self) -> float | None:
        """When something happens next; None if nothing does any more."""
        later = self._later[0][0] if self._later else math.inf
        at = min(self._next_start, later)
        return None if at == math.inf else at

    def until(self, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """What happens up to `now`: who asks, and who gives up."""
        asked: list[Sequence] = []
        given_up: list[Sequence] = []
        while (at := self.next_at) is not None and at <= now:
            if at == self._next_start:
                asked.append(self._ask(self._start(), at))
                self._plan_start(at)
                continue
            _, _, what = heapq.heappop(self._later)
            if isinstance(what, Conversation):
                asked.append(self._ask(what, at))
            elif self._living.pop(what.id, None) is not None:
                given_up.append(what)
        return asked, given_up

    def answered(self, sequence: Sequence, now: float) -> None:
        """An answer is complete: perhaps it is followed up."""
        talk = self._living.pop(sequence.id)
        talk.said = tuple(sequence.tokens)
        if talk.turns_left and len(talk.said) < self._traffic.longest // 2:
            pause = talk.random.expovariate(1 / self._traffic.think_seconds)
            self._push(now + pause, talk)

    def _plan_start(self, now: float) -> None:
        if self._planned >= self._traffic.requests:
            self._next_start = math.inf
            return
        rate = self._traffic.rate * (1 - self._traffic.follow_up)
        self._next_start = now + self._starts.expovariate(rate)

    def _start(self) -> Conversation:
        traffic, number = self._traffic, self._num_conversations
        self._num_conversations += 1
        own = random.Random(self._seed * 1_000_003 + number)
        turns = 1
        while turns < MAX_TURNS and own.random() < traffic.follow_up:
            turns += 1
        turns = min(turns, traffic.requests - self._planned)
        self._planned += turns
        said: tuple[int, ...] = ()
        if own.random() < traffic.system_share:
            start = -(own.randrange(traffic.system_prompts) + 1) * TEXT_SPACING
            said = tuple(range(start, start + traffic.system_tokens))
        return Conversation(
            own,
            turns,
            said,
            own.random() < traffic.urgent,
            itertools.count(number * MAX_TURNS * TEXT_SPACING, TEXT_SPACING),
        )

    def _push(self, at: float, what: Conversation | Sequence) -> None:
        heapq.heappush(self._later, (at, next(self._numbers), what))

    def _ask(self, talk: Conversation, at: float) -> Sequence:
        traffic = self._traffic
        talk.turns_left -= 1
        start = next(talk.texts)
        length = _length(talk.random, traffic.prompt_tokens, traffic.prompt_spread)
        text = tuple(range(start, start + min(length, traffic.longest // 4)))
        room = traffic.longest - len(talk.said) - len(text)
        answer = _length(talk.random, traffic.output_tokens, traffic.output_spread)
        number = next(self._numbers)
        request = Request(
            id=number,
            prompt_ids=talk.said + text,
            sampling=GREEDY,
            max_tokens=min(answer, room),
            priority=-1 if talk.urgent else 0,
        )
        sequence = Sequence.from_request(number, request, 0)
        sequence.arrived_at = at
        self._living[number] = talk
        if talk.random.random() < traffic.canceled:
            self._push(at + talk.random.expovariate(1 / traffic.patience_seconds), sequence)
        return sequence


def _length(source: random.Random, median: float, spread: float) -> int:
    return max(1, round(source.lognormvariate(math.log(median), spread)))
