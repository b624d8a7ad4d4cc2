"""The comparison with other engines: its prompts, its arithmetic, and processes that fail."""

from __future__ import annotations

import importlib
from pathlib import Path

import attrs
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def module(name: str):
    return importlib.import_module(f"peers_{name}")


def word_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with 150 whole words, each of them one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{a}{b}c" for a in "abcdefghijklmno" for b in "pqrstuvwxy"]
    pieces = {word[:length] for word in words for length in (2, 3, 4)}
    vocab = {token: i for i, token in enumerate([*letters, *sorted(pieces)])}
    merges = sorted(((piece[:-1], piece[-1]) for piece in pieces), key=lambda pair: len(pair[0]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_loads(**changes) -> dict:
    """The loads of a quick run by name."""
    work = module("work")
    options = {"kinds": work.KINDS, "sizes": work.quick_sizes(), "seed": 1}
    return {load.name: load for load in work.make_loads(word_tokenizer(), **options | changes)}


def make_answer(*arrivals: float, sent: float = 0.0, tokens: int | None = None):
    count = len(arrivals) if tokens is None else tokens
    return module("work").Answer(sent=sent, arrivals=arrivals, tokens=count)


def make_runs(**rates: list[float]) -> dict[str, list[dict[str, float]]]:
    """Rounds of contenders: the keyword `ours_f16` is the contender "ours f16"."""
    return {
        name.replace("_", " "): [{"rate": rate, "others": 0.0} for rate in found]
        for name, found in rates.items()
    }


# Work


def test_a_prompts_text_is_encoded_as_its_ids():
    """Contenders that take text see the tokens that the others take."""
    tokenizer = word_tokenizer()

    asks = [ask for load in make_loads().values() for ask in load.asks]

    assert all(tokenizer.encode(ask.text).ids == list(ask.prompt_ids) for ask in asks)


def test_seeds_change_words_and_keep_lengths():
    """Rounds are alike in length, and no prompt of one is found in the cache of another."""
    one, two = make_loads(seed=1)["mix 4"], make_loads(seed=2)["mix 4"]

    def lengths(load):
        return [(len(ask.prompt_ids), ask.new_tokens) for ask in load.asks]

    assert lengths(one) == lengths(two)
    assert not {ask.prompt_ids for ask in one.asks} & {ask.prompt_ids for ask in two.asks}


def test_only_one_of_the_prefix_loads_shares_its_start():
    """Both have prompts of one length, so that only sharing can make a difference."""
    work, loads = module("work"), make_loads()
    shared, apart = ([a.prompt_ids for a in loads[f"prefix {n}"].asks] for n in ("shared", "apart"))

    assert len(work.common_start(shared)) >= work.SHARED
    assert len(work.common_start(apart)) < 5
    assert {len(ids) for ids in shared} == {len(ids) for ids in apart}


def test_the_common_start_leaves_every_prompt_a_token():
    """The last token of a prompt must be computed: its logits are wanted."""
    common_start = module("work").common_start

    assert common_start([(1, 2, 3), (1, 2, 3, 4)]) == (1, 2)
    assert common_start([(1, 2, 3)]) == ()


def test_the_work_file_gives_back_the_loads(tmp_path):
    """What a contender's process reads is what was drawn."""
    work, loads = module("work"), make_loads(kinds=("decode", "prefix"))

    work.write_work(tmp_path / "work.json", [list(loads.values())])

    assert work.read_work(tmp_path / "work.json") == [loads]


def test_work_can_be_one_load_alone():
    """Naming a load leaves the others of its kind out."""
    assert list(make_loads(kinds=("mix 4", "prefill"))) == ["prefill 128", "prefill 512", "mix 4"]


def test_a_tokenizer_without_words_is_refused():
    """Prompts are words; the message says what kind of vocabulary has some."""
    letters = {token: i for i, token in enumerate(pre_tokenizers.ByteLevel.alphabet())}

    with pytest.raises(ValueError, match="0 tokens that are whole words"):
        module("work").plain_words(Tokenizer(models.BPE(vocab=letters, merges=[])))


# Numbers


def test_decoding_counts_only_while_all_requests_decode():
    """Prompts that are still computed, and requests that decode alone at the end, count nothing."""
    early, late = make_answer(1, 2, 3, 4), make_answer(2, 3, 4, 5, 6)

    assert module("numbers").decode_rate([early, late]) == 2.0


def test_a_piece_of_text_counts_the_tokens_it_holds():
    """A rate does not depend on how many tokens come at once."""
    assert module("numbers").decode_rate([make_answer(1, 2, 3, tokens=6)]) == 4 / 2


def test_the_mix_counts_all_tokens_over_the_whole_time():
    """Waiting and prompts are part of what a user waits for; latencies count from sending."""
    load = make_loads()["mix 4"]
    answers = [make_answer(1.0, 2.0), make_answer(3.5, 3.75, 4.0, sent=3.0)]

    found = module("numbers").measure_run(load, answers)

    assert found["rate"] == 5 / 4
    assert (found["ttft_p50"], found["ttft_p99"]) == (0.5, 1.0)
    assert (found["itl_p50"], found["itl_p99"]) == (0.25, 1.0)


def test_a_prefill_counts_prompt_tokens():
    """Its only new token is the end of the time."""
    found = module("numbers").measure_run(make_loads()["prefill 128"], [make_answer(2.5, sent=0.5)])

    assert found["rate"] == 64.0


@pytest.mark.parametrize(
    ("load", "stored", "rate"),
    [
        ("decode 1", "gguf", 10.0),  # 1000 bytes at 10 kB/s
        ("decode 1", "f32", 10e3 / 4000),
        ("decode 4", "f16", 20.0),  # 4 tokens a step of 0.2 s: memory again
        ("prefill 128", "f32", 128 / (2 * (900 * 128 + 100) / 1e5)),  # arithmetic
        ("prefill 128", "q8", 128 / (2 * (900 * 128 + 100) / 4e5)),  # int8 arithmetic
        ("mix 4", "f16", None),
    ],
)
def test_the_limit_is_memory_or_arithmetic(load, stored, rate):
    """Whichever takes longer in a step; a mix has no step to speak of."""
    numbers = module("numbers")
    weights = numbers.Weights(layer_params=900, head_params=100, num_bytes=1000)
    limits = {"read": 10e3, "f32": 1e5, "int8": 4e5}

    found = numbers.limit_rate(make_loads()[load], weights, limits, stored=stored)

    assert found == pytest.approx(rate)


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    """A machine that is slow for a round is slow for both."""
    runs = make_runs(ours=[20.0, 2.0, 30.0], peer=[10.0, 1.0, 10.0])

    assert module("numbers").ratio(runs, "ours", "peer") == 2.0


def test_the_best_peer_is_never_ours():
    """The highest rate of the others, of those that ran."""
    best_of = module("numbers").best_of
    runs = make_runs(ours_f16=[9.0], llama=[2.0, 4.0, 3.0], other=[2.0], failed=[])

    assert best_of(runs, peers=True) == "llama"
    assert best_of(runs, among="ours") == "ours f16"
    assert best_of(runs, among="failed") is None


# Report


def make_result(**changes) -> dict:
    return {
        "date": "2026-01-02",
        "machine": "a CPU",
        "threads": 2,
        "model": "model.gguf",
        "versions": "torch 1",
        "weights": {"layer_params": 900, "head_params": 100, "num_bytes": 1000},
        "loads": [attrs.asdict(load) for load in make_loads().values()],
        "stored": {"ours gguf": "gguf", "llama.cpp gguf": "gguf"},
        "left_out": {"mistral.rs f32": "mistralrs is not installed: pip install mistralrs"},
        "memory": {"ours gguf": 100.0},
        "limits": {"read": 10e3, "f32": 1e5, "int8": 4e5},
        "failures": {"decode 1": {"other": "died"}},
        "runs": {
            "decode 1": {
                "ours gguf": [{"rate": 6.0, "others": 0.0}],
                "llama.cpp gguf": [{"rate": 5.0, "others": 0.0}],
                "other": [],
            }
        },
    } | changes


def test_the_report_names_ratios_limits_and_failures():
    """A table per load, who is left out and why, and whether the targets are met."""
    text = module("report").report(make_result(), markdown=True)

    assert "### decode 1" in text
    assert "| ours gguf | 6.0 | 6.0 to 6.0 | 1.20 |" in text
    assert "60%" in text
    assert "other failed: died" in text
    assert "pip install mistralrs" in text
    assert "ours gguf has 1.20 times llama.cpp gguf; target at least 1.4: MISSED" in text


def test_the_targets_name_contenders_that_exist():
    """A renamed contender cannot drop a target silently."""
    names = [contender.name for contender in module("contenders").CONTENDERS]

    for target in module("report").TARGETS:
        assert any(name.startswith(target.ours) for name in names)
        assert any(name.startswith(target.against) for name in names)


# Contenders and their processes


def test_a_missing_peer_says_how_to_install_it():
    """It is left out with that line, and nothing else stops."""
    peer = attrs.evolve(module("contenders").CONTENDERS[-1], needs="no_such_peer", install="pip x")

    assert peer.missing() == "no_such_peer is not installed: pip x"


def test_an_unknown_contender_is_refused():
    """The message lists all names."""
    with pytest.raises(ValueError, match=r"'vllm' is no contender: .*llama.cpp Q8_0"):
        module("contenders").choose(["ours", "vllm"])


class FakeWorker:
    """Answers at once, with an answer that took `seconds`, and with `others` as the disturbance."""

    def __init__(self, *, seconds: float = 1.0, fails: bool = False, others: tuple = (0.0,)):
        self.seconds, self.fails, self.others = seconds, fails, list(others)
        self.asked: list[int] = []
        self.restarts = 0

    def ask(self, round, load, *, timeout):
        self.asked.append(round)
        if self.fails:
            raise module("process").ContenderError("out of luck")
        others = self.others.pop(0) if len(self.others) > 1 else self.others[0]
        return [make_answer(self.seconds, self.seconds, tokens=100)], others

    def restart(self):
        self.restarts += 1


def measure(workers: dict[str, FakeWorker], **settings):
    """Let fake contenders do the mix, two rounds of it."""
    peers = importlib.import_module("peers")
    options = {"rounds": 2, "budget": 100.0, "retries": 0, "patience": 1.0} | settings
    return peers.measure_load(workers, make_loads()["mix 4"], peers.Settings(**options))


def test_the_first_round_only_warms_up():
    """Caches, pages and clocks are warm in every round that counts."""
    worker = FakeWorker()

    runs, _ = measure({"one": worker})

    assert worker.asked == [0, 1, 2]
    assert len(runs["one"]) == 2


def test_a_slow_contender_is_not_asked_again():
    """Past its budget it keeps the rounds that it has, be it only the first."""
    slow, slower = FakeWorker(seconds=70.0), FakeWorker(seconds=101.0)

    runs, _ = measure({"slow": slow, "slower": slower}, rounds=3)

    assert slow.asked == [0, 1, 2]
    assert slower.asked == [0]
    assert [len(found) for found in runs.values()] == [2, 1]


def test_a_contender_that_fails_starts_anew_and_sits_out_the_load():
    """The others go on, and the report gets the reason."""
    bad, good = FakeWorker(fails=True), FakeWorker()

    runs, failures = measure({"bad": bad, "good": good})

    assert failures == {"bad": "out of luck"}
    assert (bad.asked, bad.restarts) == ([0], 1)
    assert len(runs["good"]) == 2


def test_a_disturbed_run_is_repeated_with_prompts_of_its_own():
    """Of the runs the calmest counts; the same prompts would be found in a prefix cache."""
    worker = FakeWorker(others=(0.0, 0.9, 0.2, 0.0))

    runs, _ = measure({"one": worker}, retries=1)

    assert worker.asked == [0, 1, 1 + 3, 2]
    assert [run["others"] for run in runs["one"]] == [0.2, 0.0]


CONTENDER = """
import os

def start(*, place):
    return lambda load: {"decode 1": lambda: len(load.asks), "mix 4": lambda: 1 / 0,
                         "prefix apart": lambda: os._exit(7)}[load.name]()
"""


def test_a_contender_that_dies_can_start_anew(tmp_path, monkeypatch):
    """Errors and crashes come back as one kind of exception, and after either it can be asked."""
    process, work = module("process"), module("work")
    (tmp_path / "fake_contender.py").write_text(CONTENDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    work.write_work(tmp_path / "work.json", [list(make_loads().values())])
    worker = process.Worker(
        module="fake_contender",
        arguments={"place": ""},
        work=tmp_path / "work.json",
        log=tmp_path / "log",
        threads=1,
    )
    try:
        with pytest.raises(process.ContenderError, match="ZeroDivisionError: division by zero"):
            worker.ask(0, "mix 4", timeout=60)
        answer, others = worker.ask(0, "decode 1", timeout=60)
        assert (answer, others >= 0) == (1, True)
        with pytest.raises(process.ContenderError, match="died with exit code 7"):
            worker.ask(0, "prefix apart", timeout=60)
        worker.restart()
        assert worker.ask(0, "decode 1", timeout=60)[0] == 1
    finally:
        worker.close()
