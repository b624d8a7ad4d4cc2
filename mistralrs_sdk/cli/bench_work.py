"""What `bench` sends: prompts of token ids, lengths from a mix or a file, and when they arrive."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from mistralrs_sdk import ConfigError

MIX = "mix"
"""The name that `--dataset` takes for the built-in mix."""

_MIX_PROMPT = (32, 512)
_MIX_OUTPUT = (16, 128)
_FIELDS = ("prompt_tokens", "output_tokens")


@attrs.frozen
class TokenIds:
    """The ids that prompts are made of: `count` of them from `first` on."""

    first: int = 1000
    count: int = 2048

    @classmethod
    def below(cls, vocab_size: int) -> TokenIds:
        """The usual ids, or where the vocabulary is smaller its upper two thirds."""
        if vocab_size >= 1000 + 2048:
            return cls()
        first = vocab_size // 3  # the lowest ids are often special tokens
        return cls(first, vocab_size - first)


@attrs.frozen(kw_only=True)
class Job:
    """One request: what it sends, and how many tokens it wants."""

    prompt: tuple[int, ...]
    new_tokens: int


@attrs.frozen(kw_only=True)
class Load:
    """Requests that are sent together: by so many clients, or so many a second."""

    concurrency: int | None = None
    """Clients, each of which sends its next request when the last one is answered."""
    request_rate: float | None = None
    """Requests a second on average, at random moments, however many are still running."""

    @property
    def name(self) -> str:
        """What a table calls it."""
        if self.concurrency is not None:
            return f"{self.concurrency} at once"
        return f"{self.request_rate:g} a second"


def counted_prompt(
    ids: TokenIds, length: int, *, iteration: int, case: int, salt: int = 0
) -> tuple[int, ...]:
    """Consecutive ids, so shifted that no two runs of a benchmark begin alike (mistral.rs').

    `salt` shifts all of them: a server may remember what the last benchmark sent.
    """
    start = (iteration + 1) * 131 + case * 719 + salt
    return tuple(ids.first + (start + i) % ids.count for i in range(length))


def make_jobs(
    lengths: Sequence[tuple[int, int]], ids: TokenIds, *, shared_prefix: int = 0, seed: int
) -> list[Job]:
    """Random prompts with these (prompt, output) lengths; the first ids may be the same in all.

    `shared_prefix` tokens stand before each prompt, on top of its length.
    """
    rng = random.Random(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(ids.first + rng.randrange(ids.count) for _ in range(count))

    prefix = draw(shared_prefix)
    return [Job(prompt=prefix + draw(prompt), new_tokens=new) for prompt, new in lengths]


def mix_lengths(count: int, *, seed: int) -> list[tuple[int, int]]:
    """Lengths as of mixed traffic: 32 to 512 tokens in, 16 to 128 out, short ones more often."""
    rng = random.Random(seed)
    return [(_between(rng, *_MIX_PROMPT), _between(rng, *_MIX_OUTPUT)) for _ in range(count)]


def read_lengths(file: Path) -> list[tuple[int, int]]:
    """The (prompt, output) lengths in a JSONL file, one request a line.

    A line is `{"prompt_tokens": 300, "output_tokens": 80}`; other fields are passed over.

    Raises:
        ConfigError: the file cannot be read, or a line is something else.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f'--dataset {file} cannot be read ({error}): name a JSONL file, or "{MIX}"'
        ) from error
    found = [_lengths(line, f"{file}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"--dataset {file} is empty: write one request a line")
    return found


def repeated(lengths: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """`count` of them, from the start again where they run out."""
    return [lengths[i % len(lengths)] for i in range(count)]


def arrival_times(count: int, rate: float, *, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests come, in a Poisson process of this rate."""
    rng = random.Random(seed)
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        yield now


def _between(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _lengths(line: str, place: str) -> tuple[int, int]:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place} is no JSON: {error}") from error
    prompt, new = (entry.get(name) if isinstance(entry, dict) else None for name in _FIELDS)
    if type(prompt) is int and type(new) is int and prompt > 0 and new > 0:
        return prompt, new
    raise ConfigError(
        f'{place} ({line.strip():.60}) must be like {{"prompt_tokens": 300, "output_tokens": 80}}, '
        "both at least 1"
    )
