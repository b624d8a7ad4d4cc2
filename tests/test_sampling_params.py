"""Sampling settings: resolving them, refusing bad ones, and docs/sampling.md."""

from __future__ import annotations

import math
import re
from pathlib import Path

import attrs
import pytest
import torch

from mistralrs_sdk.engine.sampler import SamplerRow, sample
from mistralrs_sdk.errors import ModelLoadError, RequestError
from mistralrs_sdk.sampling_params import DrySamplingParams, SamplingParams, StopTokens

RESOLVED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


def test_unset_values_come_from_the_generation_config():
    """What the request leaves unset the file decides, then the off value."""
    file = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "do_sample": True}

    params = SamplingParams(top_p=0.5, seed=9).resolve(file)

    assert [getattr(params, name) for name in RESOLVED] == [0.6, 20, 0.5, 0.0, 1.0, 0.0, 0.0]
    assert params.seed == 9


@pytest.mark.parametrize(
    ("request_sets", "greedy"),
    [({}, True), ({"temperature": 0.7}, False), ({"min_p": 0.1}, False), ({"seed": 1}, True)],
)
def test_do_sample_false_is_greedy_unless_the_request_shapes_the_draw(request_sets, greedy):
    """`do_sample: false` yields to a temperature, top_k, top_p or min_p of the request."""
    assert SamplingParams(**request_sets).resolve({"do_sample": False}).is_greedy is greedy


@pytest.mark.parametrize("top_k", [-1, 0])
def test_resolved_top_k_has_one_off_value(top_k):
    """-1 and 0, from the request or the file, become 0."""
    assert SamplingParams(top_k=top_k).resolve({}).top_k == 0
    assert SamplingParams().resolve({"top_k": float(top_k)}).top_k == 0


def test_suppressed_tokens_are_biased_away_unless_the_request_says_otherwise():
    """`suppress_tokens` join the request's bias, which wins for the same id."""
    params = SamplingParams(logits_bias={5: 1.0, 6: 2.0}).resolve({"suppress_tokens": [4, 5]})

    assert params.logits_bias == {4: -1e9, 5: 1.0, 6: 2.0}
    assert SamplingParams().resolve({}).logits_bias is None


@pytest.mark.parametrize(
    "file",
    [
        {"temperature": "hot"},
        {"temperature": math.nan},
        {"top_k": 2.5},
        {"top_p": 1.5},
        {"min_p": True},
        {"repetition_penalty": 0},
        {"do_sample": "no"},
        {"suppress_tokens": 3},
        {"suppress_tokens": [-1]},
    ],
)
def test_a_bad_generation_config_is_the_files_fault(file):
    """The error is not a RequestError and names file and key, even if the request overrides it."""
    (key,) = file
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json: {key}"):
        SamplingParams(temperature=1.0, top_k=3).resolve(file)


def test_ids_outside_the_vocabulary_are_refused():
    """Bias and stop ids are checked against the model; the error names the id and the range."""
    within = SamplingParams(logits_bias={9: 1.0}, stop_toks=StopTokens.Ids([9, 9]))
    within.check_vocabulary(10)

    with pytest.raises(RequestError, match=r"logits_bias token id 9 .* 0 to 8"):
        within.check_vocabulary(9)
    with pytest.raises(RequestError, match=r"stop token id 12 .* 0 to 9"):
        SamplingParams(stop_toks=StopTokens.Ids([12])).check_vocabulary(10)


@pytest.mark.parametrize("key", [-1, "AI", 1.0, True])
def test_a_bias_key_that_is_no_token_id_is_refused(key):
    """Keys of logits_bias are whole numbers from 0 up."""
    with pytest.raises(RequestError, match="logits_bias token id"):
        SamplingParams(logits_bias={key: 1.0})


def test_a_bare_string_is_not_a_list_of_stop_strings():
    """ "END" would silently mean E, N and D."""
    with pytest.raises(RequestError, match=r"write \['END'\]"):
        StopTokens.Seqs("END")


# ---- docs/sampling.md


def documented():
    """The rows of the table: name, range, off value, default, whether the file sets it."""
    page = (Path(__file__).parent.parent / "docs" / "sampling.md").read_text()
    rows = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[1].startswith("`"):
            name, bounds, off, default = (cell.strip("`") for cell in cells[1:5])
            rows.append(pytest.param(name, bounds, off, default, cells[5], id=name))
    return rows


def with_value(name, value):
    if name.startswith("dry_params."):
        dry = {"multiplier": 1.0, name.removeprefix("dry_params."): value}
        return SamplingParams(dry_params=DrySamplingParams(**dry))
    return SamplingParams(**{name: {3: value} if name == "logits_bias" else value})


WHOLE = {"top_k", "top_n_logprobs", "n_choices", "max_len", "seed", "dry_params.allowed_length"}


def next_value(name, value, towards):
    return value + math.copysign(1, towards) if name in WHOLE else math.nextafter(value, towards)


@pytest.mark.parametrize(("name", "bounds", "off", "default", "in_file"), documented())
def test_documented_ranges_are_the_real_ones(name, bounds, off, default, in_file):
    """Each edge of each range in the table is accepted or refused as it says."""
    opening, low, high, closing = re.fullmatch(r"([\[(])(.+), (.+)([\])])", bounds).groups()
    for edge, included, outward in (
        (float(low), opening == "[", -math.inf),
        (float(high), closing == "]", math.inf),
    ):
        if math.isinf(edge):
            inside, outside = math.copysign(10**9, edge), edge
        elif included:
            inside, outside = edge, next_value(name, edge, outward)
        else:
            inside, outside = next_value(name, edge, -outward), edge
        if name in WHOLE:
            inside, outside = int(inside), outside if math.isinf(outside) else int(outside)
        with_value(name, inside)
        with pytest.raises(RequestError, match=name.split(".")[-1]):
            with_value(name, outside)
    for wrong in (math.nan, "1", True):
        with pytest.raises(RequestError, match=name.split(".")[-1]):
            with_value(name, wrong)


@pytest.mark.parametrize(
    ("name", "bounds", "off", "default", "in_file"),
    [param for param in documented() if param.values[2] != "-"],
)
def test_documented_off_values_change_nothing(name, bounds, off, default, in_file):
    """A parameter at its off value draws what it draws unset."""
    value = int(off) if name in WHOLE else float(off)
    logits = torch.randn(20, 200, generator=torch.Generator().manual_seed(0))

    def tokens(params):
        resolved = params.resolve({})
        history = {"prompt_ids": (1, 2, 1), "output_ids": (2, 1), "choice": 0, "seed": 0}
        rows = [SamplerRow(sampling=resolved, position=i, **history) for i in range(20)]
        return sample(logits, rows)

    assert tokens(with_value(name, value)) == tokens(SamplingParams())


@pytest.mark.parametrize(("name", "bounds", "off", "default", "in_file"), documented())
def test_documented_defaults_are_the_real_ones(name, bounds, off, default, in_file):
    """Resolving leaves what "if unset" says, and takes from the file what the table says."""
    group, _, field = name.rpartition(".")
    value = getattr(DrySamplingParams() if group else SamplingParams().resolve({}), field)
    number = re.fullmatch(r"[0-9.]+", default)

    assert value == (float(default) if number else None)
    probe = 3 if name in WHOLE else 0.5
    from_file = SamplingParams().resolve({field: probe})
    if in_file == "yes":
        assert getattr(from_file, field) == probe
    elif in_file == "no":
        assert from_file == SamplingParams().resolve({})


def test_documented_parameters_are_all_there_are():
    """Every numeric sampling setting has its row."""
    named = {param.values[0].split(".")[0] for param in documented()}
    others = {"return_logprobs", "stop_toks", "include_stop", "ignore_eos"}

    assert named | others == {field.name for field in attrs.fields(SamplingParams)}
