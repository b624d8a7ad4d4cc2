"""Requests to tiny models whose answers are known: computed by Hugging Face, in float64.

Those of the packed mode are answered in `soak_packed.py`. A token whose choice float32 arithmetic
could tip (two logits nearly equal, or a draw at the edge between two tokens) ends its case before
it, so that every remaining token has one right value.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from mistralrs_sdk import Constraint, SamplingParams, StopTokens
from mistralrs_sdk.engine.sampler import uniform

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import tiny_models

EOS = 2
CONTEXT = 512
SAFE_GAP = 5e-3
"""Logits closer than this are a tie; float32 differs from float64 by up to 4e-4 in these models."""
SAFE_EDGE = 1e-3
"""Random numbers closer than this to the edge between two tokens could draw either."""
SHORTEST = 3
"""Safe tokens a case must have."""


@attrs.frozen(kw_only=True)
class Case:
    """A request and the right tokens of each choice."""

    text: str | None
    """The user's turn of a chat; None for a raw prompt."""
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    answers: tuple[tuple[int, ...], ...] = ()
    """`sampling.max_len` ids per choice, end tokens ignored."""
    endings: tuple[Ending, ...] = ()
    """In their place, if what each choice came to is known as a whole."""
    constraint: Constraint | None = None
    adapter: str | None = None

    def fits(self, context: int) -> bool:
        """Whether its answer is known in an engine of this context."""
        answer = (self.sampling.max_len or 1) if self.endings else 1
        return len(self.prompt_ids) + answer <= context


@attrs.frozen
class Ending:
    """What one choice must come to."""

    text: str
    finish_reason: str
    stop_reason: str | int | None
    num_tokens: int | None
    """None where a stop string decides: then it depends on where tokens end."""
    logprobs: tuple[tuple[str, float], ...] = ()
    """Each token and its log probability, where both are known to the bit."""


@attrs.frozen(eq=False)
class TinyModel:
    """A checkpoint on disk, its tokenizer by Hugging Face, and cases for it."""

    name: str
    folder: Path
    tokenizer: Any
    cases: tuple[Case, ...]

    def ending(self, case: Case, choice: int, *, context: int) -> Ending:
        """Return how a choice ends in an engine whose context is `context` tokens."""
        if case.endings:
            return case.endings[choice]
        ids = case.answers[choice][: context - len(case.prompt_ids)]
        stops = case.sampling.stop_toks
        named = stops.ids if stops else ()
        ends = set(named) if case.sampling.ignore_eos else {EOS, *named}
        at = next((i for i, token in enumerate(ids) if token in ends), None)
        finish, reason, count = "length", None, len(ids)
        if at is not None:
            finish, reason, count = "stop", (ids[at] if ids[at] in named else None), at + 1
            ids = ids[:at]
        text = self.text_of(ids)
        for stop in stops.seqs if stops else ():
            start = text.find(stop)
            if start >= 0:
                end = start + len(stop) * case.sampling.include_stop
                return Ending(text[:end], "stop", stop, None)
        return Ending(text, finish, reason, count)

    def whole(self, case: Case, choice: int) -> str:
        """A text that every cut answer begins: it may show the start of a stop string."""
        if not case.endings:
            return self.text_of(case.answers[choice])
        ending = case.endings[choice]
        return ending.text + (ending.stop_reason if isinstance(ending.stop_reason, str) else "")

    def text_of(self, ids: tuple[int, ...]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def make_tiny_model(name: str, folder: Path, *, num_cases: int, rng: random.Random) -> TinyModel:
    """Write the checkpoint `name` of tests/tiny_models.py into `folder` and find its cases."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tiny_models.tiny_checkpoint(name, folder)
    model = TinyModel(name, folder, AutoTokenizer.from_pretrained(folder), ())
    exact = copy.deepcopy(tiny_models.tiny_model(name)).double()
    prefixes = shared_prefixes(rng)
    cases: list[Case] = []
    with warnings.catch_warnings():
        # newer transformers call it `cache`, older ones know only this name
        warnings.filterwarnings("ignore", message="`past_key_values`")
        while len(cases) < num_cases:
            case = _answered(exact, draw_request(rng, model.tokenizer, prefixes))
            if case is not None:
                cases.append(with_stop(rng, model, case))
    return attrs.evolve(model, cases=tuple(cases))


def shared_prefixes(rng: random.Random) -> list[str]:
    """Beginnings that many requests have in common."""
    return [_words(rng, rng.choice((2, 6, 12, 40))) for _ in range(6)]


def _words(rng: random.Random, count: int) -> str:
    letters = "etaoinshrdlucmfwüß😀"
    return " ".join("".join(rng.choices(letters, k=rng.randint(1, 7))) for _ in range(count))


def draw_request(rng: random.Random, tokenizer: Any, prefixes: list[str]) -> Case:
    """A request without its answers: chat or raw, greedy or seeded, often with a shared prefix."""
    start = rng.choice(prefixes) if rng.random() < 0.7 else ""
    text = f"{start} {_words(rng, rng.choice((1, 1, 3, 10)))}"
    if is_chat := rng.random() < 0.75:
        turns = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer.encode(text, add_special_tokens=False)
    settings: dict[str, Any] = {
        "max_len": rng.choice((SHORTEST, 8, 24, 64, 64)),
        "ignore_eos": rng.random() < 0.3,
        "n_choices": rng.choice((1, 1, 1, 2, 3)),
    }
    if rng.random() < 0.2:
        settings["frequency_penalty"] = 0.75
    if rng.random() < 0.5:
        settings |= {"top_k": 1}
    else:
        settings |= {
            "seed": rng.randrange(2**63),
            "temperature": rng.choice((0.3, 0.7, 1.0)),
            "top_k": rng.choice((0, 3, 8, 8)),
        }
    return Case(
        text=text if is_chat else None,
        prompt_ids=tuple(ids[: CONTEXT - 80]),
        sampling=SamplingParams(**settings),
    )


def _answered(exact: Any, case: Case) -> Case | None:
    """Add the answers, as long as every choice is safe; None if that is too short."""
    answers = [_safe_answer(exact, case, choice) for choice in range(case.sampling.n_choices)]
    length = min(map(len, answers))
    if length < SHORTEST:
        return None
    return attrs.evolve(
        case,
        sampling=attrs.evolve(case.sampling, max_len=length),
        answers=tuple(tuple(ids[:length]) for ids in answers),
    )


@torch.inference_mode()
def _safe_answer(exact: Any, case: Case, choice: int) -> list[int]:
    assert case.sampling.max_len is not None, "every case has one"
    ids: list[int] = []
    cache, new = None, list(case.prompt_ids)
    while len(ids) < case.sampling.max_len:
        result = exact(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        u = uniform(case.sampling.seed or 0, choice, len(case.prompt_ids) + len(ids))
        token, safe = _draw(result.logits[0, -1].clone(), case.sampling, ids, u=u)
        if not safe:
            break
        ids.append(token)
        new = [token]
    return ids


def _draw(
    logits: Tensor, sampling: SamplingParams, ids: list[int], *, u: float
) -> tuple[int, bool]:
    """The next token, and whether small errors of the logits leave it the same."""
    for token, count in Counter(ids).items():
        logits[token] -= count * (sampling.frequency_penalty or 0.0)
    values, order = logits.sort(descending=True, stable=True)
    gaps = values[:-1] - values[1:]
    if sampling.is_greedy:
        return int(order[0]), bool(gaps[0] > SAFE_GAP)
    assert sampling.temperature is not None, "seeded cases set it"
    if sampling.top_k:
        clear = bool(gaps[: sampling.top_k].min() > SAFE_GAP)
        values = values[: sampling.top_k]
    else:
        clear, values, order = True, logits, torch.arange(len(logits))
    through = (values / sampling.temperature).softmax(-1).cumsum(-1)
    place = min(int((through <= u).sum()), len(through) - 1)
    return int(order[place]), clear and bool((through - u).abs().min() > SAFE_EDGE)


def with_stop(rng: random.Random, model: TinyModel, case: Case) -> Case:
    """Let some cases end at a string or an id that occurs in an answer."""
    kind = rng.random()
    number = rng.randrange(case.sampling.n_choices)
    if kind < 0.15 and case.answers:
        stop = StopTokens.Ids([rng.choice(case.answers[number])])
    elif kind < 0.4:
        text = model.whole(case, number)
        spots = [i for i in range(len(text) - 1) if text[i : i + 2].isascii()]
        if not spots:
            return case
        start = rng.choice(spots)
        long = text[start : start + rng.randint(2, 5)]
        stop = StopTokens.Seqs([long if long.isascii() else long[:2]])
    else:
        return case
    sampling = attrs.evolve(case.sampling, stop_toks=stop, include_stop=rng.random() < 0.3)
    return attrs.evolve(case, sampling=sampling)
