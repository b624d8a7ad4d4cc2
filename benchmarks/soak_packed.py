"""The soak as models run by default: packed weights, recorded steps, adapters, constraints.

No float64 model can say what these must answer. But a row's bits do not depend on its company, so
each request is asked alone first, of an idle engine with room for all and without a prefix cache,
and under traffic it must get the same answer, to the token and to the bit of each log probability.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jsonschema
from soak_cases import (
    Case,
    Ending,
    TinyModel,
    draw_request,
    shared_prefixes,
    tiny_models,
    with_stop,
)
from soak_requests import logprobs_of, settings_of, text_of

from mistralrs_sdk import Constraint, Model, ModelBuilder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.adapter_files import tiny_adapter

ADAPTERS = ("first", "second")

_REGEXES = (
    r"[a-z]{1,30}",
    r"(the answer is (yes|no|maybe), because )[a-z ]{0,20}\.",
    r"\d{4}-\d{2}-\d{2}( \d{2}:\d{2}:\d{2})?",
)
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "population": {"type": "integer"},
            "capital_city": {"enum": ["Berlin", "Paris", "Rome"]},
        },
        "required": ["population", "capital_city"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {"type": "object", "properties": {"is_open": {"type": "boolean"}}},
        "maxItems": 3,
    },
    {"enum": [None, True, "quite a long string that leaves no choice", [1, 2, 3]]},
)
_CONSTRAINTS: tuple[tuple[Constraint, Callable[[str], Any]], ...] = (
    *((Constraint.Regex(r), re.compile(r).fullmatch) for r in _REGEXES),
    *((Constraint.JsonSchema(s), lambda text, s=s: _is_valid(text, s)) for s in _SCHEMAS),
)
"""Constraints, and what says whether a text matches."""


def packed(tiny: TinyModel, threads: int) -> ModelBuilder:
    """As it comes, with two adapters."""
    builder = ModelBuilder(tiny.folder).with_num_threads(threads)
    for alias in ADAPTERS:
        builder = builder.with_lora_adapter(alias, tiny.folder.with_name(f"{tiny.name}-{alias}"))
    return builder


async def make_packed_model(
    name: str, folder: Path, *, num_cases: int, rng: random.Random, threads: int
) -> TinyModel:
    """Write the checkpoint `name` into `folder`, its adapters beside it, and answer its cases."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tiny_models.tiny_checkpoint(name, folder)
    for number, alias in enumerate(ADAPTERS):
        tiny_adapter(folder.with_name(f"{name}-{alias}"), name, seed=number, size=0.2)
    tiny = TinyModel(name, folder, AutoTokenizer.from_pretrained(folder), ())
    prefixes = shared_prefixes(rng)
    cases = []
    async with await packed(tiny, threads).with_prefix_cache_n(0).build() as model:
        for _ in range(num_cases):
            case = await _answered(model, _drawn(rng, tiny, prefixes))
            if case.constraint is None and (changed := with_stop(rng, tiny, case)) is not case:
                case = await _answered(model, changed)
            cases.append(case)
    return attrs.evolve(tiny, cases=tuple(cases))


def _drawn(rng: random.Random, tiny: TinyModel, prefixes: list[str]) -> Case:
    """A request, often held to something, often with an adapter."""
    case = draw_request(rng, tiny.tokenizer, prefixes)
    constraint = rng.choice(_CONSTRAINTS)[0] if rng.random() < 0.4 else None
    changes: dict[str, Any] = {"return_logprobs": rng.random() < 0.2}
    if constraint is not None:
        changes |= {"max_len": rng.choice((8, 40, 80)), "ignore_eos": False}
    return attrs.evolve(
        case,
        sampling=attrs.evolve(case.sampling, **changes),
        constraint=constraint,
        adapter=rng.choice((None, *ADAPTERS)),
    )


async def _answered(model: Model, case: Case) -> Case:
    """Ask, while nobody else does; what a constraint holds must match it."""
    asked = settings_of(case)
    if case.text is None:
        answer: Any = await model.send_completion_request(case.prompt_ids, asked)
    else:
        answer = await model.send_chat_request(asked.add_message("user", case.text))
    for choice in answer.choices:
        _check_constraint(case, text_of(choice), choice.finish_reason)
    alone = len(answer.choices) == 1
    endings = [
        Ending(
            text_of(choice),
            choice.finish_reason,
            choice.stop_reason,
            answer.usage.completion_tokens if alone else None,
            logprobs_of(choice),
        )
        for choice in answer.choices
    ]
    return attrs.evolve(case, endings=tuple(endings))


def _check_constraint(case: Case, text: str, finish_reason: str) -> None:
    """Refuse an answer that ended where it does not match: the soak could not go on."""
    matches = dict(_CONSTRAINTS).get(case.constraint) if case.constraint else None
    if matches is not None and finish_reason == "stop" and not matches(text):
        raise AssertionError(f"{text!r} does not match {case.constraint}")


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
