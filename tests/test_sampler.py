"""The sampler: which token comes out, and what it may depend on."""

from __future__ import annotations

import math
import random
from collections import Counter

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk.engine import sampler
from mistralrs_sdk.engine.sampler import SamplerRow, dry_penalties, sample, uniform
from mistralrs_sdk.sampling_params import DrySamplingParams, SamplingParams

INF = math.inf


def row(*, seed=0, choice=0, position=None, prompt=(), output=(), breakers=(), **params):
    return SamplerRow(
        sampling=SamplingParams(**params).resolve({}),
        seed=seed,
        choice=choice,
        position=len(prompt) + len(output) if position is None else position,
        prompt_ids=list(prompt),
        output_ids=list(output),
        dry_breakers=frozenset(breakers),
    )


def logits_of(*probabilities):
    return torch.tensor([probabilities]).log()


def noise(rows, vocab, *, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draws(logits, count=400, **params):
    """How often each token comes out over `count` positions."""
    rows = [row(position=position, **params) for position in range(count)]
    return Counter(token.token_id for token in sample(logits.expand(count, -1), rows))


def greedy(logits, **context):
    return sample(logits, [row(top_k=1, **context)])[0].token_id


# ---- greedy


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1e-8}, {"top_k": 1}])
def test_greedy_takes_the_largest_logit(params):
    """Temperature 0 and top_k 1 are the same: the most likely token."""
    logits = noise(4, 500)

    tokens = sample(logits, [row(seed=i, **params) for i in range(4)])

    assert [token.token_id for token in tokens] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [{"temperature": 1e-6}, {"top_p": 1e-9}, {"top_p": 0.0}])
def test_settings_close_to_greedy_are_greedy(params):
    """A tiny temperature or top_p neither overflows nor leaves anything but the best token."""
    logits = noise(1, 5000) * 10

    assert draws(logits, 50, **params).keys() == {logits.argmax().item()}


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"top_k": 2, "top_p": 0.1}])
def test_ties_go_to_the_lowest_id(params):
    """Among equal logits the lowest id ranks first, in every path."""
    logits = torch.zeros(1, 3000)
    logits[0, 700:2900:2] = 1.0

    assert draws(logits, 20, **params).keys() == {700}


def test_top_k_cuts_ties_by_id():
    """Top-k keeps exactly k tokens; of those equal at its edge the lowest ids stay."""
    logits = torch.zeros(1, 3000)
    logits[0, 50] = 1.0

    assert draws(logits, top_k=4).keys() == {0, 1, 2, 50}


def test_top_k_ranks_scattered_ties_by_id():
    """Also ties that the ranking sees whole come in the order of their ids."""
    logits = -torch.arange(3000.0)[None] / 3000
    equals = list(range(2900, 0, -150))
    logits[0, equals] = 1.0

    assert draws(logits, top_k=4).keys() == set(sorted(equals)[:4])


# ---- filters


def test_top_p_is_a_share_of_what_top_k_left():
    """Top-k 2 leaves .7; top-p .5 of it is reached by the first token alone."""
    assert draws(logits_of(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5).keys() == {0}


def test_top_p_keeps_the_token_that_reaches_it():
    """.4 is short of .6, so the second token stays, the third does not."""
    assert draws(logits_of(0.2, 0.4, 0.1, 0.3), top_p=0.6).keys() == {1, 3}


def test_min_p_drops_a_token_at_its_bound():
    """A token must be strictly more likely than min_p times the most likely one."""
    logits = torch.tensor([[0.0, 0.0, -math.log(4), -math.log(2)]])

    assert draws(logits, min_p=math.exp(-math.log(4)) + 1e-6).keys() == {0, 1, 3}
    assert draws(torch.zeros(1, 4), min_p=1.0).keys() == {0, 1, 2, 3}


def test_min_p_of_one_keeps_the_most_likely_token():
    """No setting leaves nothing to draw from."""
    assert draws(logits_of(0.5, 0.3, 0.2), min_p=1.0).keys() == {0}


def test_top_p_counts_the_mass_of_the_whole_vocabulary():
    """The many unlikely tokens that are never ranked count: ten of 20 here lie in the tail."""
    logits = torch.full((1, 4010), math.log(10 / 4000))
    logits[0, 500:510] = 0.0

    assert draws(logits, top_p=0.39).keys() == set(range(500, 508))


def test_top_p_reaches_past_the_tokens_ranked_at_first():
    """A nucleus wider than the first ranking is found all the same."""
    logits = torch.zeros(1, 4000)
    logits[0, 2000:] = -40.0

    seen = draws(logits, 2000, top_p=0.75)

    assert max(seen) == 1499
    assert len(seen) > 900


@pytest.mark.parametrize("top_k", [-1, 0, 3000, 10**9])
def test_top_k_of_the_whole_vocabulary_changes_nothing(top_k):
    """Off values and values past the vocabulary draw what no top_k draws."""
    logits = noise(8, 3000)

    without = sample(logits, [row(seed=3, position=i) for i in range(8)])

    assert sample(logits, [row(seed=3, position=i, top_k=top_k) for i in range(8)]) == without


BIASES = st.integers(-300, 300).map(lambda steps: steps * 0.01371)  # no ties by rounding
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.137, 0.71, 1.0, 2.9]),
        "top_k": st.sampled_from([0, 2, 3, 7, 30]),
        "top_p": st.sampled_from([0.0, 0.1713, 0.5137, 0.9119, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01371, 0.2773, 0.7137]),
        "frequency_penalty": st.sampled_from([0.0, 0.37, -0.21]),
        "presence_penalty": st.sampled_from([0.0, 0.43]),
        "repetition_penalty": st.sampled_from([1.0, 1.31, 0.83]),
        "logits_bias": st.dictionaries(st.integers(0, 23), BIASES, max_size=3),
        "dry_params": st.sampled_from([None, DrySamplingParams(multiplier=0.61)]),
    }
)
IDS = st.lists(st.integers(0, 25), max_size=12)  # 24 and 25 lie outside the vocabulary


def weights_by_hand(logits, item):
    """What the documented steps leave of each token, in the order of the draw."""
    params, context = item.sampling, [*item.prompt_ids, *item.output_ids]
    x = list(logits)
    losses = slow_dry(context, params.dry_params or DrySamplingParams(), item.dry_breakers)
    for token, count in Counter(item.output_ids).items():
        loss = count * params.frequency_penalty + params.presence_penalty
        losses[token] = losses.get(token, 0.0) + loss
    for token, loss in losses.items():
        if token < len(x):
            x[token] -= loss
    for token in set(context):
        if token < len(x):
            positive = x[token] > 0
            factor = params.repetition_penalty
            x[token] = x[token] / factor if positive else x[token] * factor
    for token, bias in (params.logits_bias or {}).items():
        x[token] += bias
    weights = {i: math.exp((value - max(x)) / params.temperature) for i, value in enumerate(x)}
    filtered = 0 < params.top_k < len(x) or params.top_p < 1
    order = sorted(weights, key=lambda i: (-weights[i], i)) if filtered else list(weights)
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        mass, kept, total = sum(weights[i] for i in order), [], 0.0
        for i in order:
            if kept and total >= params.top_p * mass:
                break
            kept.append(i)
            total += weights[i]
        order = kept
    return {i: weights[i] for i in order if weights[i] > params.min_p}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(PARAMS, IDS, IDS, st.integers(0, 10**6), st.lists(st.integers(-999, 999), min_size=24))
def test_every_draw_is_the_one_the_documented_steps_give(params, prompt, output, seed, values):
    """The sampler agrees with the steps of docs/sampling.md written out one by one."""
    logits = torch.tensor([values[:24]]) * 0.00731
    item = row(seed=seed, prompt=prompt, output=output, breakers=(3,), **params)
    left = weights_by_hand(logits[0].tolist(), item)
    target = uniform(seed, 0, item.position) * sum(left.values())

    token = sample(logits, [item])[0].token_id

    assert token in left
    ids = list(left)
    before = sum(left[i] for i in ids[: ids.index(token)])
    slack = 1e-4 * sum(left.values())
    assert before - slack <= target < before + left[token] + slack


# ---- penalties


def test_frequency_and_presence_do_not_see_the_prompt():
    """The first token is chosen as if there were no frequency or presence penalty."""
    logits = torch.tensor([[1.0, 3.0, 2.5]])
    penalties = {"frequency_penalty": 2.0, "presence_penalty": 2.0}

    assert greedy(logits, prompt=(1, 1, 1), **penalties) == 1
    assert greedy(logits, prompt=(1, 1, 1), output=(1,), **penalties) == 2


def test_frequency_counts_and_presence_does_not():
    """Three occurrences cost three times the frequency penalty and one presence penalty."""
    logits = torch.tensor([[5.0, 3.5]])

    assert greedy(logits, output=(0, 0, 0), frequency_penalty=0.4) == 0
    assert greedy(logits, output=(0, 0, 0), frequency_penalty=0.6) == 1
    assert greedy(logits, output=(0, 0, 0), presence_penalty=1.4) == 0
    assert greedy(logits, output=(0, 0, 0), presence_penalty=1.6) == 1


def test_repetition_divides_positive_and_multiplies_negative_logits_once():
    """Prompt and generated ids are penalised by sign, however often they occur."""
    positive, negative = torch.tensor([[3.0, 2.1]]), torch.tensor([[-2.0, -2.9]])

    assert greedy(positive, prompt=(0, 0, 0), output=(0,), repetition_penalty=1.4) == 0
    assert greedy(positive, prompt=(0,), repetition_penalty=1.5) == 1
    assert greedy(positive, output=(0,), repetition_penalty=1.5) == 1
    assert greedy(negative, prompt=(0, 0, 0), repetition_penalty=1.4) == 0
    assert greedy(negative, prompt=(0,), repetition_penalty=1.5) == 1


def test_bias_comes_after_the_repetition_penalty():
    """A bias is added to the penalised logit and not penalised itself."""
    logits = torch.tensor([[2.0, 2.4]])

    assert greedy(logits, prompt=(0,), repetition_penalty=2.0, logits_bias={0: 1.5}) == 0
    assert greedy(logits, prompt=(0,), repetition_penalty=2.0, logits_bias={0: 1.3}) == 1


def test_ids_outside_the_vocabulary_touch_no_row():
    """A context id the model lacks is skipped: neither a crash nor a write into the next row."""
    logits = torch.tensor([[1.0, 2.0, 1.5], [3.0, 2.9, 0.0]])
    params = {
        "top_k": 1,
        "repetition_penalty": 5.0,
        "presence_penalty": 5.0,
        "logits_bias": {3: -50.0},
        "dry_params": DrySamplingParams(multiplier=50.0, allowed_length=1),
    }

    tokens = sample(logits, [row(prompt=(3, 3), output=(3, 99), **params), row(top_k=1)])

    assert [token.token_id for token in tokens] == [1, 0]


@pytest.mark.parametrize("value", [1e300, -1e300])
def test_extreme_penalties_stay_finite(value):
    """A bias or penalty beyond float32 decides the token; it does not fail the row."""
    logits = torch.tensor([[1.0, 2.0]])
    dry = DrySamplingParams(multiplier=1e300, base=1e300, allowed_length=0)

    biased = sample(logits, [row(logits_bias={0: value})])[0]
    penalised = sample(logits, [row(output=(1,), frequency_penalty=value)])[0]
    repeated = sample(logits, [row(prompt=(1, 1), dry_params=dry)])[0]
    hot = sample(logits, [row(temperature=1e300)])[0]

    assert biased.token_id == (0 if value > 0 else 1)
    assert penalised.token_id == (0 if value > 0 else 1)
    assert repeated.token_id == 0
    assert hot.error is None


def slow_dry(context, params, breakers):
    """The definition of DRY, word by word."""
    longest = {}
    for i in range(len(context) - 1):
        candidate = context[i + 1]
        if params.multiplier == 0 or context[i] != context[-1] or candidate in breakers:
            continue
        match = 1
        for back in range(1, 50):
            if i - back < 0 or context[i - back] != context[len(context) - 1 - back]:
                break
            if context[i - back] in breakers:
                break
            match += 1
        longest[candidate] = max(match, longest.get(candidate, 0))
    return {
        token: params.multiplier * params.base ** (match - params.allowed_length)
        for token, match in longest.items()
        if match >= params.allowed_length
    }


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 8),
    st.frozensets(st.integers(0, 3), max_size=2),
    st.integers(0, 4),
)
def test_dry_follows_its_definition(cycle, times, breakers, allowed_length):
    """Candidates, match lengths and penalties equal those of a literal search."""
    params = DrySamplingParams(multiplier=0.8, base=1.5, allowed_length=allowed_length)
    context = cycle * times

    penalties = dry_penalties(context, params, breakers=breakers)

    assert penalties == pytest.approx(slow_dry(context, params, breakers))


def test_dry_counts_at_most_fifty_tokens():
    """A longer repetition is not penalised more."""
    params = DrySamplingParams(multiplier=1.0, base=1.1, allowed_length=2)

    assert dry_penalties([7] * 500, params) == pytest.approx({7: 1.1**48})


def test_dry_stops_a_repetition_unless_a_breaker_lies_in_it():
    """The token that would go on with the repetition loses, except across a breaker."""
    logits = torch.tensor([[0.0, 0.0, 1.0, 0.5]])
    context = {"prompt": (0, 1, 2, 0), "output": (1,)}
    dry = DrySamplingParams(multiplier=1.0)

    assert greedy(logits, dry_params=dry, **context) == 3
    assert greedy(logits, dry_params=dry, breakers={0}, **context) == 2
    assert greedy(logits, dry_params=attrs.evolve(dry, multiplier=0.0), **context) == 2


# ---- draws and seeds


def test_draws_follow_the_distribution():
    """Over many positions each token comes out as often as its probability says."""
    probabilities = (0.5, 0.25, 0.15, 0.07, 0.03)
    count = 6000

    for params in ({}, {"top_p": 0.999}):
        seen = draws(logits_of(*probabilities), count, **params)
        chi_squared = sum(
            (seen[i] - count * p) ** 2 / (count * p) for i, p in enumerate(probabilities)
        )
        assert chi_squared < 18.5  # 4 degrees of freedom: 1 in 1000


def test_uniform_depends_on_each_of_its_inputs():
    """Seed, choice and position each give another number, large seeds included."""
    numbers = {
        uniform(seed, choice, position)
        for seed in (0, 1, 11, 2**64, 2**64 + 1)
        for choice in (0, 1, 11)
        for position in (0, 1, 11)
    }

    assert len(numbers) == 45
    assert all(0 <= number < 1 for number in numbers)


def test_uniform_never_changes():
    """A seed means the same text on every machine and in every release."""
    assert uniform(42, 0, 17) == 0.1411997412223911


def test_choices_of_one_request_differ():
    """Two choices share the seed, yet draw different tokens; the same choice repeats itself."""
    logits = torch.zeros(1, 5000).expand(4, -1)

    tokens = sample(logits, [row(seed=7, choice=choice) for choice in (0, 1, 2, 0)])

    assert tokens[0] == tokens[3]
    assert len({token.token_id for token in tokens}) == 3


KINDS = (
    {"temperature": 0.8},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.9},
    {"top_p": 0.95, "temperature": 1.3},
    {"min_p": 0.02},
    {"top_k": 1500},
    {"repetition_penalty": 1.2, "output": (1, 2, 3), "temperature": 0.7},
    {"repetition_penalty": 1.2, "top_k": 1, "prompt": (4, 5), "top_n_logprobs": 3},
    {"frequency_penalty": 0.5, "output": (1, 1, 9), "top_p": 0.8, "return_logprobs": True},
)


@pytest.mark.parametrize("vocab", [3000, 3072])
def test_a_row_does_not_depend_on_its_neighbours(vocab):
    """Alone, among 31 others, or in another order: token and log probabilities are identical."""
    logits = noise(32, vocab)
    rows = [row(seed=i, position=i * 3, **KINDS[i % len(KINDS)]) for i in range(32)]
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(32)]
    shuffled = random.Random(0).sample(range(32), 32)

    assert sample(logits, rows) == alone
    assert sample(logits[shuffled], [rows[i] for i in shuffled]) == [alone[i] for i in shuffled]
    twins = sample(logits[[5, 3, 3]], [rows[5], rows[3], rows[3]])
    assert twins == [alone[5], alone[3], alone[3]]


@pytest.mark.parametrize("params", [{}, {"top_k": 900}, {"top_p": 0.99999}, {"min_p": 1e-6}])
@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_a_token_without_probability_is_never_drawn(monkeypatch, params, u):
    """The ends of the unit interval meet the first and last possible token, no other."""
    monkeypatch.setattr(sampler, "uniform", lambda seed, choice, position: u)
    for vocab in (1, 7, 256, 1000, 2049):
        logits = noise(6, vocab, seed=vocab)
        possible = torch.rand(6, vocab, generator=torch.Generator().manual_seed(vocab)) < 0.1
        possible[:, vocab // 2] = True
        logits[~possible] = -INF

        for i, token in enumerate(sample(logits, [row(**params) for _ in range(6)])):
            assert possible[i, token.token_id]


# ---- broken logits


@pytest.mark.parametrize("params", KINDS)
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_broken_logits_fail_their_row_only(params, bad):
    """NaN or +inf in one row is that row's error; its neighbours draw what they would alone."""
    logits = noise(3, 3000)
    rows = [row(seed=i, **params) for i in range(3)]
    expected = sample(logits, rows)
    logits[1, 17] = bad

    tokens = sample(logits, rows)

    assert tokens[0] == expected[0]
    assert tokens[2] == expected[2]
    assert tokens[1].token_id == -1
    assert str(bad) in tokens[1].error


@pytest.mark.parametrize("params", KINDS)
def test_a_row_that_excludes_everything_is_an_error(params):
    """If every logit is -inf there is nothing to draw."""
    assert "every logit is -inf" in sample(torch.full((1, 3000), -INF), [row(**params)])[0].error


# ---- log probabilities


def test_logprobs_are_those_of_the_raw_logits():
    """Temperature, penalties and filters do not change them; the chosen token is always there."""
    logits = noise(1, 3000)
    expected = logits[0].double().log_softmax(-1)
    best = expected.topk(3)
    for params in KINDS:
        token = sample(logits, [row(**{**params, "top_n_logprobs": 3})])[0]

        assert token.logprobs.token_id == token.token_id
        assert token.logprobs.logprob == pytest.approx(expected[token.token_id].item(), abs=1e-5)
        assert [i for i, _ in token.logprobs.top] == best.indices.tolist()
        assert [p for _, p in token.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_each_row_gets_the_logprobs_it_asked_for():
    """None, the chosen token's only, or as many alternatives as asked and there are."""
    logits = noise(4, 5)

    tokens = sample(
        logits,
        [
            row(),
            row(return_logprobs=True),
            row(top_n_logprobs=2),
            row(top_n_logprobs=20),
        ],
    )

    assert tokens[0].logprobs is None
    assert [len(token.logprobs.top) for token in tokens[1:]] == [0, 2, 5]


def test_logprobs_are_always_finite():
    """Impossible alternatives are reported at the floor; a certain token at 0."""
    logits = torch.tensor([[-INF, 80.0, -INF]])

    token = sample(logits, [row(top_n_logprobs=3)])[0]

    assert token.logprobs.logprob == 0.0
    assert token.logprobs.top == ((1, 0.0), (0, -9999.0), (2, -9999.0))


def test_sampling_leaves_the_logits_alone():
    """The caller's logits hold the same values afterwards."""
    logits = noise(len(KINDS), 3000)
    before = logits.clone()

    sample(logits, [row(**params) for params in KINDS])

    assert torch.equal(logits, before)


def test_an_empty_batch_has_no_tokens():
    """Nothing in, nothing out."""
    assert sample(torch.empty(0, 10), []) == []
