"""The work of `peers.py`: prompts drawn once, as token ids and as text, and what came back when."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from tokenizers import Tokenizer

SHARED = 512
"""Tokens of the prefix that requests share."""
KINDS = ("prefill", "decode", "mix", "prefix")

_WORD = re.compile(" [a-z]{3,}")
_ENOUGH_WORDS = 2000


@attrs.frozen(kw_only=True)
class Ask:
    """One request: greedy, and exactly `new_tokens` long."""

    prompt_ids: tuple[int, ...] = attrs.field(converter=tuple)
    text: str
    """The same prompt: encoding it gives `prompt_ids`."""
    new_tokens: int


@attrs.frozen(kw_only=True)
class Load:
    """Requests of `at_once` clients: each sends the next one when its last is answered."""

    name: str
    at_once: int
    asks: tuple[Ask, ...]

    @property
    def kind(self) -> str:
        return self.name.split()[0]

    @property
    def longest(self) -> int:
        """Tokens that the longest sequence comes to."""
        return max(len(ask.prompt_ids) + ask.new_tokens for ask in self.asks)


@attrs.frozen(kw_only=True)
class Answer:
    """When a request was sent and when its tokens came, in seconds of one clock."""

    sent: float
    arrivals: tuple[float, ...] = attrs.field(converter=tuple)
    """One per piece of text: a token, or several that came together."""
    tokens: int


@attrs.frozen(kw_only=True)
class Sizes:
    """How long prompts and answers are: (prompt tokens, new tokens) of each request."""

    prefill: tuple[int, ...]
    decode: tuple[int, int]
    at_once: tuple[int, ...]
    mix: tuple[tuple[int, int], ...]
    prefix: tuple[int, int, int]
    """Requests, tokens of each behind the shared ones, and new ones."""


def full_sizes() -> Sizes:
    """The sizes of a real run."""
    draw = random.Random(4)
    return Sizes(
        prefill=(512, 2048),
        decode=(128, 129),
        at_once=(1, 8, 32),
        mix=tuple((draw.randint(32, 512), draw.randint(16, 128)) for _ in range(32)),
        prefix=(16, 32, 32),
    )


def quick_sizes() -> Sizes:
    """Sizes that show whether everything runs."""
    draw = random.Random(4)
    return Sizes(
        prefill=(128, 512),
        decode=(32, 17),
        at_once=(1, 4),
        mix=tuple((draw.randint(16, 128), draw.randint(4, 16)) for _ in range(8)),
        prefix=(4, 8, 4),
    )


def plain_words(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are a space and lower-case letters, and stay themselves when encoded again."""
    words = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token])
        if _WORD.fullmatch(text) and tokenizer.encode(text, add_special_tokens=False).ids == [
            token
        ]:
            words.append(token)
            if len(words) == _ENOUGH_WORDS:
                return words
    if len(words) < 100:
        raise ValueError(
            f"the tokenizer has {len(words)} tokens that are whole words, too few to make prompts "
            "of: take a model with a byte-level or sentencepiece vocabulary"
        )
    return words


def make_loads(
    tokenizer: Tokenizer, *, kinds: Sequence[str], sizes: Sizes, seed: int
) -> list[Load]:
    """Draw the prompts: the same lengths for every seed, other words, no two prompts alike.

    `kinds` are of `KINDS`, or whole names of loads ("mix 8").

    Raises:
        ValueError: the tokenizer does not give a prompt's text back as its ids.
    """
    words = plain_words(tokenizer)
    draw = random.Random(seed)

    def ask(prompt_tokens: int, new_tokens: int, start: tuple[int, ...] = ()) -> Ask:
        ids = (*start, *draw.choices(words, k=prompt_tokens - len(start)))
        text = tokenizer.decode(list(ids))
        if tuple(tokenizer.encode(text, add_special_tokens=False).ids) != ids:
            raise ValueError(f"the text of a prompt is not encoded as its {len(ids)} tokens again")
        return Ask(prompt_ids=ids, text=text, new_tokens=new_tokens)

    def load(name: str, at_once: int, *asks: Ask) -> Load:
        return Load(name=name, at_once=at_once, asks=asks)

    loads = [load(f"prefill {n}", 1, ask(n, 1)) for n in sizes.prefill]
    loads += [
        load(f"decode {n}", n, *(ask(*sizes.decode) for _ in range(n))) for n in sizes.at_once
    ]
    loads += [load(f"mix {n}", n, *(ask(*lengths) for lengths in sizes.mix)) for n in sizes.at_once]
    count, tail, new_tokens = sizes.prefix
    shared = tuple(draw.choices(words, k=SHARED))
    for name, start in (("shared", shared), ("apart", ())):
        asks = [ask(SHARED + tail, new_tokens, start) for _ in range(count)]
        loads.append(load(f"prefix {name}", count, *asks))
    return [made for made in loads if made.kind in kinds or made.name in kinds]


def common_start(prompts: Sequence[Sequence[int]]) -> Sequence[int]:
    """The tokens with which all of several prompts start; the last token of each stays its own."""
    first = prompts[0]
    if len(prompts) == 1:
        return ()
    shared = min(len(prompt) for prompt in prompts) - 1
    for prompt in prompts[1:]:
        different = (i for i in range(shared) if prompt[i] != first[i])
        shared = next(different, shared)
    return first[:shared]


def write_work(path: Path, rounds: Sequence[Sequence[Load]]) -> None:
    """Write the loads of each round as JSON."""
    path.write_text(json.dumps([[attrs.asdict(load) for load in loads] for loads in rounds]))


def read_loads(made: Iterable[Mapping[str, Any]]) -> list[Load]:
    """Loads from what `attrs.asdict` made of them."""
    return [Load(**{**load, "asks": tuple(Ask(**ask) for ask in load["asks"])}) for load in made]


def read_work(path: Path) -> list[dict[str, Load]]:
    """Read what `write_work` wrote: for each round its loads by name."""
    rounds = json.loads(path.read_text())
    return [{load.name: load for load in read_loads(loads)} for loads in rounds]
