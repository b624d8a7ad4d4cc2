"""The examples run as they stand, and print what they promise."""

from __future__ import annotations

import io
import logging
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from mistralrs_sdk.kernels import native
from tests.adapter_files import tiny_adapter
from tests.embedding_models import embedding_folder
from tests.model_helpers import tiny_folder
from tests.script_model import script_folder
from tests.tiny_models import write_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
NOT_EXAMPLES = {"demo_model", "mcp_server"}

PARIS = r"The capital of France is Paris\."
ON_THE_DEMO_MODEL = {
    "getting_started/text_generation": rf"{PARIS}\n.*Shakespeare.*\n[\d.]+ tokens per second",
    "getting_started/streaming": r"\S",
    "getting_started/batching": rf"France: {PARIS}\n(.*\n){{7}}[\d.]+ tokens per second",
    "getting_started/text_models": r"<Model .*LlamaForCausalLM.*\nAnswer: .*Sun",
    "getting_started/blocking_model": r"\S.*\ncat: The plural of cat is cats\.\nhouse: .*\nwater: ",
    "getting_started/openai_requests": (
        r'\{"role": "assistant", "content": "The capital of Japan is Tokyo\."\}\n'
        r"('.*' -[\d.]+\n){3}\{\"role\": \"assistant\", \"content\": .*\}\n"
        r"(\{\"content\": .*\}\n)*"
    ),
    "getting_started/gguf_locally": rf"weights(.*\n)+{PARIS}",
    "getting_started/runner": rf"{PARIS}\n[\d.]+ tokens per second\n.*\S",
    "advanced/tools": r'population\(\{"city": "Paris"\}\) is 2\.1 million\n.*2\.1 million',
    "advanced/allowed_tools": (
        r"only the weather: get_weather\(.*Oslo.*\n"
        r"this one: get_time\(.*Oslo.*\nnone: Oslo"
    ),
    "advanced/tool_callback": (
        r"\[temperature: calling\]\n\[temperature: complete\]\n.*21(.*\n)+"
        r'temperature\(.*Paris.*\) gave \{"city": "Paris", "degrees": 21, "unit": "celsius"\}'
    ),
    "advanced/mcp_client": (
        r"library_opening_hours: Find out .*\n"
        r'library_opening_hours\(\{"day": "Monday"\}\) gave open from 9 to 18 on Monday\n.*\S'
    ),
    "advanced/agent": (
        r'1\. weather\(\{"city": "Oslo"\}\): It rains in Oslo\.\n'
        r"text_response after 2 answers\n.*\S"
    ),
    "advanced/agent_streaming": (
        r"calling population\npopulation gave 10\.1 million people live in Lima\n(.*\n)+text_resp"
    ),
    "advanced/approval": r"delete\(.*\): denied\nthe model was told: Error: This file is needed\.",
    "advanced/code_execution": (
        r'about to run: \{"code": .*1 \+ 2.*\n'
        r'it gave: \{"status": "success", .*3.*\}\nanswer: '
    ),
    "advanced/shell": r'"sh skills/.*\} gave \{"exit_code": 0, "stdout": "Hello, .*\}\nanswer: ',
    "advanced/grammar": r"sky\? (red|green|blue)  .*\n.* in 19\d\d  .*\n.*meow\? cat",
    "advanced/json_schema": r'\{"country": ?".*"Europe".*\nstop: the capital is Paris',
    "advanced/llguidance_grammar": (
        r"[1-9] (\w| )+, [1-9] (\w| )+, [1-9] (\w| )+\n(not )?guilty because of [a-z ]+\.\n"
    ),
    "advanced/logits_processor": (rf"as it is: {PARIS}\nwithout Paris: (?!.*Paris).*\nloud: .*!"),
    "advanced/paged_attn": r"(\d+) prompt tokens, 0 .*\n.* [1-9]\d* from .*\n128 blocks, 0 in use",
    "advanced/plan": r"weights +[\d.]+ MiB(.*\n)+.*4: 8 sequences .*\n.*64: \d+ .*\nrefused: ",
    "advanced/error_handling": (
        r"ConfigError: .*\nModelLoadError: .*no/such/folder.*\nRequestError: .*regex(.*\n)+"
        r"InferenceError: .*deadline.*so far: '.*\nQueueFullError: 2 of 4, .*\nEngineClosedError: "
    ),
    "advanced/file_logging": rf"{PARIS}\n.* holds:\n.*WARNING mistralrs_sdk.*enable_thinking",
    "advanced/sessions": (
        r"anna: .*\(0 of.*\nanna: .*\([1-9]\d* of.*\ncopy: .*\([1-9]\d* of.*\n"
        r"sessions: \['copy', 'restored'\]\n"
        r"  user: .*\n  assistant: .*\n  user: .*\n  assistant: "
    ),
    "advanced/cancellation": (
        r"\d+ run, \d+ wait\n\[5, 'canceled', 'timed out'\]\n"
        rf"0 run, 0 wait, 0 blocks in use\n{PARIS}"
    ),
    "advanced/topology": rf"weights .* Q8_0 x14, Q5_0 x1; .*\n{PARIS}",
    "advanced/multi_model": (
        rf"fast is loaded, careful is loaded; .* careful\nfast: {PARIS}\n"
        rf".*careful is unloaded; .* fast\ncareful: {PARIS}\nfast is loaded; .* fast"
    ),
    "advanced/pydantic_ai_agent": (
        r"Place\(country='France'.*\nuser-prompt: .*\ntool-call: .*Lima.*\n"
        r"tool-return: 10\.1 million\ntext: .*10\.1 million.*\n\S.*\n\d+ tokens"
    ),
    "advanced/openai_agents_agent": (
        r"Place\(country='France'.*\ntool_call_item: .*Lima.*\n"
        r"tool_call_output_item: 10\.1 million\n.*\n.*10\.1 million.*\n\S.*\n\d+ tokens"
    ),
    "advanced/langchain_chat": (
        rf"{PARIS}\n.*Tokyo.*\nPlace\(country='France'.*\n.*Lima.* 10\.1 million\n(.*\n)+\S"
    ),
    "cookbook/agent": r"\[findings: .*main has no docstring.*\]\n(.*\n)+\d answers, text_response",
    "cookbook/structured": r"(Ticket\(customer='.*priority=<Priority\.\w+: .*\n){2}",
}
"""Examples that need nothing, and what is to be found in their output."""
WITH_ARGUMENTS = {
    "getting_started/gguf",
    "getting_started/embedding",
    "advanced/isq",
    "advanced/imatrix",
    "advanced/lora",
    "advanced/batching_embeddings",
    "cookbook/multiturn",
    "cookbook/rag",
}
"""Examples with a test of their own below."""
TESTED_ELSEWHERE = {"advanced/perplexity", "advanced/ray_serve"}
ALL = {*ON_THE_DEMO_MODEL, *WITH_ARGUMENTS, *TESTED_ELSEWHERE}

Run = Callable[..., str]
needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels here")
NEED_NATIVE = {"advanced/topology"}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path) -> Iterator[Run]:
    """Runs an example as `python name.py arguments` does, and returns what it printed."""
    logger = logging.getLogger("mistralrs_sdk")
    level = logger.level
    monkeypatch.setenv("CANDLE_NUM_THREADS", "1")  # tests share the cores: none to wait for

    def run(name: str, *arguments: object, typed: str = "") -> str:
        file = EXAMPLES / f"{name}.py"
        monkeypatch.syspath_prepend(file.parent)
        monkeypatch.delitem(sys.modules, "demo_model", raising=False)
        monkeypatch.setattr(sys, "argv", [str(file), *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        runpy.run_path(str(file), run_name="__main__")
        return capsys.readouterr().out

    yield run
    logger.setLevel(level)


@pytest.mark.real_model
@pytest.mark.timeout(300)  # loads the model and answers, maybe on a busy machine
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=needs_native if n in NEED_NATIVE else ()) for n in ON_THE_DEMO_MODEL],
)
def test_example_prints_what_it_promises(name, demo_model, run):
    """Without arguments, on the demo model."""
    out = run(name)

    assert re.search(ON_THE_DEMO_MODEL[name], out), out


@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_a_gguf_file_is_named_by_its_repository_and_name(demo_model, run):
    """A folder may stand for a repository of the hub."""
    assert re.search(PARIS, run("getting_started/gguf", demo_model.parent, demo_model.name))


@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_the_conversation_knows_earlier_turns_until_an_empty_line(demo_model, run):
    """Prompts grow with each turn, are partly cached, and start anew after an empty line."""
    out = run("cookbook/multiturn", typed="Hi!\nWhat did I say?\n\nHi!\n")

    prompts = re.findall(r"\((\d+) of (\d+) prompt tokens were cached\)", out)
    (_, first), (cached, second), (_, third) = [(int(a), int(b)) for a, b in prompts]
    assert first == third < second
    assert 0 < cached < second


@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_rag_answers_each_question_from_a_passage(demo_model, run, tmp_path):
    """Two models behind one handle: one finds a passage, the other answers."""
    out = run("cookbook/rag", embedding_folder(tmp_path / "embedder"))

    assert len(re.findall(r"\?\n  found: .+\n  answer: .+\n", out)) == 2, out


def test_embeddings_are_compared_with_the_question(run, tmp_path):
    """The size of the vectors, and a cosine for each sentence."""
    out = run("getting_started/embedding", embedding_folder(tmp_path / "embedder"))

    assert re.match(r"64 dimensions\n", out)
    cosines = [float(value) for value in re.findall(r"^  (-?\d\.\d{3}) ", out, re.MULTILINE)]
    assert len(cosines) == 3
    assert all(-1 <= cosine <= 1 for cosine in cosines)


def test_a_batch_of_embeddings_equals_one_alone(run, tmp_path):
    """A hundred vectors; that of the first text is what it is alone."""
    out = run("advanced/batching_embeddings", embedding_folder(tmp_path / "embedder"))

    assert out.startswith("100 vectors of 64 values\n")
    (difference,) = re.findall(r"at most (\S+)", out)
    assert float(difference) < 1e-5


@needs_native
def test_the_weights_are_requantised_while_the_model_runs(run):
    """Four bits at first, then eight."""
    out = run("advanced/isq", tiny_folder())

    first, second = re.findall(r"^weights .*", out, re.MULTILINE)
    assert "HQQ4" in first
    assert "HQQ4" not in second
    assert "Q8_0" in second


@needs_native
def test_an_importance_matrix_is_used(run, tmp_path):
    """Both losses are printed."""
    write_tokenizer(tmp_path)
    tokenizer = byte_tokenizer(tmp_path)
    folder = script_folder(tmp_path / "model", [5, 6], tokenizer=tokenizer)
    matrices = [f"blk.{layer}.attn_{part}.weight" for layer in (0, 1) for part in "qkv"]

    out = run("advanced/imatrix", write_imatrix(tmp_path / "imatrix.gguf", matrices), folder)

    losses = re.findall(r"^(with|without) the importance matrix: \d+\.\d+ nats", out, re.MULTILINE)
    assert losses == ["without", "with"], out


def test_an_adapter_is_loaded_chosen_and_unloaded(run, tmp_path):
    """It changes the answers of requests that choose it, until it is gone."""
    out = run("advanced/lora", tiny_folder(), tiny_adapter(tmp_path / "adapter", size=0.5))

    assert out.startswith("first: rank 4, ")
    base, adapted = re.findall(r"^(?:None|first): (['\"].*)", out, re.MULTILINE)
    assert base != adapted
    assert "not_found: " in out


def test_every_example_has_a_test():
    """An example that nothing runs breaks unseen."""
    found = {str(file.relative_to(EXAMPLES).with_suffix("")) for file in EXAMPLES.glob("*/*.py")}
    examples = {name for name in found if name.partition("/")[2] not in NOT_EXAMPLES}

    assert examples == ALL


def test_every_example_is_in_the_table():
    """The README names each file once, in the part of its rung."""
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)/(\w+)\.py\) \|", text, re.MULTILINE)

    assert all(shown == name for shown, _, name in listed)
    names = [f"{folder}/{name}" for _, folder, name in listed]
    assert sorted(names) == sorted(ALL)


def test_the_rungs_share_one_way_to_find_a_model():
    """A script sees the files beside it only: each folder has the same copy."""
    copies = {file.read_text(encoding="utf-8") for file in EXAMPLES.glob("*/demo_model.py")}

    assert len(copies) == 1
    assert len(list(EXAMPLES.glob("*/demo_model.py"))) == 3


def byte_tokenizer(folder: Path):
    """The tokenizer that was written there."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def write_imatrix(path: Path, matrices: list[str]) -> Path:
    """An importance matrix as llama.cpp writes it, for inputs of 256 values."""
    writer = gguf.GGUFWriter(path, arch="")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 1)
    for name in matrices:
        sums = np.linspace(0.1, 9, 256, dtype=np.float32).reshape(1, -1)
        writer.add_tensor(f"{name}.in_sum2", sums)
        writer.add_tensor(f"{name}.counts", np.ones((1, 1), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
