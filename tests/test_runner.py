"""`Runner`: code written for the `mistralrs` package, and what of it is refused."""

from __future__ import annotations

import importlib
from pathlib import Path

import attrs
import pytest

from mistralrs_sdk import (
    Architecture,
    ChatCompletionRequest,
    CompletionRequest,
    ConfigError,
    DrySamplingParams,
    EngineClosedError,
    GgufModelBuilder,
    MemoryGpuConfig,
    ModelDType,
    PagedCacheType,
    RequestError,
    Runner,
    SamplingParams,
    StopTokens,
    UnsupportedError,
    Which,
    runner,
)
from mistralrs_sdk.models import SUPPORTED
from tests.model_helpers import tiny_folder

EXAMPLES = Path(__file__).parent.parent / "examples" / "getting_started"
VARIANTS = ("XLora", "Lora", "XLoraGGUF", "LoraGGUF", "GGML", "XLoraGGML")
VARIANTS += ("LoraGGML", "MultimodalPlain", "VisionPlain", "DiffusionPlain", "Speech")
REFUSED = ("mtp_model", "mtp_n_predict", "anymoe_config")
REFUSED += ("enable_search", "search_embedding_model", "search_callback")


def load(which=None, **arguments) -> Runner:
    """A Runner of a tiny model on one thread."""
    which = which or Which.Plain(model_id=str(tiny_folder()))
    return Runner(which=which, cpu=True, num_threads=1, pa_ctxt_len=512, **arguments)


@pytest.fixture(scope="module")
def tiny():
    with load(max_seqs=4, prefix_cache_n=16) as loaded:
        yield loaded


@attrs.define
class FakeModel:
    """In place of BlockingModel: keeps the builder and the requests."""

    builder: object = None
    requests: list = attrs.field(factory=list)

    def from_builder(self, builder):
        self.builder = builder
        return self

    def send_chat_request(self, request, *, model_id):
        self.requests.append(request)


@pytest.fixture
def fake(monkeypatch):
    model = FakeModel()
    monkeypatch.setattr(runner, "BlockingModel", model)
    return model


def ask(text="Hello", **settings) -> ChatCompletionRequest:
    settings = {"max_tokens": 6, "top_k": 1, "ignore_eos": True, **settings}
    return ChatCompletionRequest(messages=[{"role": "user", "content": text}], **settings)


def refusable(cls) -> list[str]:
    """The fields of a class that must keep their default."""
    return [f.name for f in attrs.fields(cls) if f.validator is not None]


def test_a_chat_is_answered_as_the_package_writes_it(tiny):
    """Text, finish reason and usage are where code for `mistralrs` reads them."""
    response = tiny.send_chat_completion_request(ask(model="default"))

    choice = response.choices[0]
    assert choice.message.content
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert response.usage.completion_tokens == 6
    assert response.usage.total_tokens == 6 + response.usage.prompt_tokens


def test_a_streamed_chat_says_the_same(tiny):
    """With stream=True the answer is an iterator whose pieces are the whole answer."""
    whole = tiny.send_chat_completion_request(ask()).choices[0].message.content

    chunks = list(tiny.send_chat_completion_request(ask(stream=True)))

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].usage.completion_tokens == 6
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_stream_may_be_left_early(tiny):
    """A closed iterator is no obstacle to the next request."""
    chunks = tiny.send_chat_completion_request(ask(stream=True, max_tokens=400))
    next(chunks)
    chunks.close()

    assert tiny.send_chat_completion_request(ask()).choices[0].message.content


def test_a_text_is_one_user_turn(tiny):
    """A str as messages is answered as a list with that turn is."""
    turn = ask("Hello")
    text = attrs.evolve(turn, messages="Hello")

    answers = [tiny.send_chat_completion_request(r).choices[0].message for r in (turn, text)]

    assert answers[0] == answers[1]


def test_choices_and_logprobs_are_reported(tiny):
    """n_choices answers; logprobs with one alternative unless told otherwise, as in mistral.rs."""
    response = tiny.send_chat_completion_request(ask(n_choices=2, logprobs=True))

    assert [choice.index for choice in response.choices] == [0, 1]
    entry = response.choices[0].logprobs.content[0]
    assert len(entry.top_logprobs) == 1
    assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)


def test_a_completion_continues_the_raw_prompt(tiny):
    """No template: the usage counts the prompt's own tokens."""
    request = CompletionRequest("Hello", top_k=1, max_tokens=4, ignore_eos=True)

    response = tiny.send_completion_request(request)

    assert response.usage.prompt_tokens == len(tiny.tokenize_text("Hello", True))
    assert response.usage.completion_tokens == 4


def test_echo_puts_the_prompt_first(tiny):
    """echo_prompt: each text begins with the prompt, and goes on as without."""
    request = CompletionRequest("Hello", top_k=1, max_tokens=4, ignore_eos=True, n_choices=2)
    plain = tiny.send_completion_request(request)

    echoed = tiny.send_completion_request(attrs.evolve(request, echo_prompt=True))

    assert [c.text for c in echoed.choices] == ["Hello" + c.text for c in plain.choices]


def test_text_and_ids_convert(tiny):
    """tokenize_text and detokenize_text; special tokens where asked."""
    bare = tiny.tokenize_text("Hello you", False)

    assert tiny.tokenize_text("Hello you", True)[-len(bare) :] == bare
    assert tiny.detokenize_text(bare, True) == "Hello you"


def test_thinking_is_no_matter_of_raw_text(tiny):
    """A switch for chat templates is refused where there is none, instead of ignored."""
    with pytest.raises(RequestError, match="enable_thinking"):
        tiny.tokenize_text("Hello", True, enable_thinking=False)


def test_the_model_is_known_by_its_id(tiny):
    """A request may name the loaded model or "default"; anything else is refused."""
    name = str(tiny_folder())

    assert tiny.list_models() == [name]
    assert tiny.is_model_loaded(name)
    assert not tiny.is_model_loaded("other")
    assert tiny.max_sequence_length() == tiny.max_sequence_length(name) == 512
    for call in (
        lambda: tiny.send_chat_completion_request(ask(model="other")),
        lambda: tiny.send_chat_completion_request(ask(), model_id="other"),
        lambda: tiny.send_completion_request(CompletionRequest("Hello", "other")),
        lambda: tiny.tokenize_text("Hello", True, model_id="other"),
        lambda: tiny.detokenize_text([5], True, model_id="other"),
        lambda: tiny.max_sequence_length("other"),
    ):
        with pytest.raises(RequestError, match="'other' is not known"):
            call()


def test_a_closed_runner_says_so():
    """After `with`, requests raise EngineClosedError; closing again does nothing."""
    with load(Which.Plain(str(tiny_folder()), Architecture.Llama)) as loaded:
        assert loaded.is_model_loaded()
        assert "Llama" in loaded.inner().describe()

    loaded.close()
    assert not loaded.is_model_loaded()
    with pytest.raises(EngineClosedError):
        loaded.send_chat_completion_request(ask())


def test_a_wrong_architecture_is_an_error():
    """The model says what it is; a contradiction names both."""
    with pytest.raises(ConfigError, match=r"arch \('qwen3'\).*LlamaForCausalLM"):
        load(Which.Plain(str(tiny_folder()), arch="qwen3"))


def test_every_supported_architecture_has_a_name():
    """`Architecture` lists what can be built."""
    assert sorted(f"{arch}forcausallm" for arch in Architecture) == [
        name.lower() for name in SUPPORTED
    ]


def test_an_architecture_that_is_not_there_is_unsupported():
    """The error lists those there are."""
    with pytest.raises(UnsupportedError, match=r"'phi3'.*qwen3"):
        Which.Plain("x", arch="phi3")


def test_sampling_fields_have_their_mistralrs_meaning():
    """Every field lands in the SamplingParams field of its meaning."""
    request = ChatCompletionRequest(
        "Hi",
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        max_tokens=7,
        stop_seqs=["a", "b"],
        n_choices=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={3: 1.5},
        dry_multiplier=0.8,
        dry_base=2.0,
        dry_allowed_length=3,
        dry_sequence_breakers=["\n"],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=4,
    )

    assert request.sampling_params() == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        max_len=7,
        stop_toks=StopTokens.Seqs(["a", "b"]),
        n_choices=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logits_bias={3: 1.5},
        dry_params=DrySamplingParams(
            multiplier=0.8, base=2.0, allowed_length=3, sequence_breakers=["\n"]
        ),
        ignore_eos=True,
        return_logprobs=True,
        top_n_logprobs=4,
    )


def test_one_stop_sequence_may_be_a_text():
    """stop_seqs="x" is ["x"]; an empty list stops nothing."""
    stops = [CompletionRequest("Hi", stop_seqs=s).sampling_params().stop_toks for s in ("x", [])]

    assert stops == [StopTokens.Seqs(["x"]), None]


def test_the_rest_of_a_request_reaches_the_model(fake):
    """Unset sampling is the model's own; thinking, truncation and adapter are passed on."""
    Runner(Which.Plain("x")).send_chat_completion_request(
        ChatCompletionRequest("Hi", enable_thinking=False, truncate_sequence=True, adapter="a")
    )

    (request,) = fake.requests
    assert request.sampling_params == SamplingParams.neutral()
    assert request.thinking is False
    assert request.truncate_sequence
    assert request.adapter == "a"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": "x"}, "top_k"),
        ({"dry_base": 2.0}, "dry_base has no effect without dry_multiplier"),
    ],
)
def test_wrong_values_are_refused_where_they_are_written(settings, named):
    """A request checks itself when it is made."""
    with pytest.raises(RequestError, match=named):
        ChatCompletionRequest("Hi", **settings)


@pytest.mark.parametrize(
    ("cls", "field"),
    [(cls, name) for cls in (ChatCompletionRequest, CompletionRequest) for name in refusable(cls)],
)
def test_unsupported_fields_of_a_request_are_refused(cls, field):
    """A field that would be ignored raises by name; None, False and [] ask for nothing."""
    with pytest.raises(UnsupportedError, match=rf"{cls.__name__}\({field}='x'\)"):
        cls("Hi", **{field: "x"})
    for nothing in (None, False, []):
        cls("Hi", **{field: nothing})


def test_best_of_returns_the_likeliest(tiny):
    """Of best_of answers n_choices are returned; all of them were computed."""
    settings = {"temperature": 1.0, "max_tokens": 4, "ignore_eos": True}
    request = CompletionRequest("Hello", best_of=5, n_choices=2, **settings)

    response = tiny.send_completion_request(request)

    assert len(response.choices) == 2
    assert response.usage.completion_tokens == 20


@pytest.mark.parametrize("prompt", [None, 3, [5, 6]])
def test_a_prompt_that_is_no_text_is_refused(prompt):
    """Where it is written, not when it is sent."""
    with pytest.raises(RequestError, match=r"prompt.* must be a str"):
        CompletionRequest(prompt)


def test_best_of_below_n_choices_is_refused():
    """More answers cannot be returned than are made."""
    with pytest.raises(RequestError, match="best_of"):
        CompletionRequest("Hi", best_of=2, n_choices=3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_variants_of_which_are_refused_by_name(variant):
    """The error says which variants there are."""
    with pytest.raises(UnsupportedError, match=rf"Which\.{variant} .*Which\.Plain"):
        getattr(Which, variant)(model_id="x")


@pytest.mark.parametrize(
    ("cls", "field"),
    [(cls, name) for cls in (Which.Plain, Which.GGUF, Which.Embedding) for name in refusable(cls)],
)
def test_unsupported_fields_of_which_are_refused(cls, field):
    """A field that would be ignored raises by name."""
    with pytest.raises(UnsupportedError, match=rf"Which\.{cls.__name__}\({field}='x'\)"):
        cls("x", "y.gguf" if cls is Which.GGUF else None, **{field: "x"})


@pytest.mark.parametrize("argument", REFUSED)
def test_unsupported_arguments_of_runner_are_refused(argument, fake):
    """An argument that would be ignored raises by name, before anything is loaded."""
    with pytest.raises(UnsupportedError, match=rf"Runner\({argument}="):
        Runner(Which.Plain("x"), **{argument: True})

    assert fake.builder is None


@pytest.mark.parametrize("files", ["a.gguf", ["a.gguf", "b.gguf"]])
def test_gguf_files_are_named_one_or_several(files, fake):
    """quantized_filename is a name or a list of names."""
    Runner(Which.GGUF("repo", files, dtype=ModelDType.Auto, tokenizer_json="t.json"))

    names = [files] if isinstance(files, str) else files
    assert fake.builder == GgufModelBuilder("repo", names).with_tokenizer_json("t.json")


def test_which_must_be_a_variant(fake):
    """A bare model id is not enough, and the error says what is."""
    with pytest.raises(ConfigError, match=r"which \('x'\) must be Which\.Plain"):
        Runner("x")


@pytest.mark.parametrize(
    ("goal", "memory"),
    [
        (0.9, MemoryGpuConfig.Utilization(0.9)),
        (1, MemoryGpuConfig.Utilization(1)),
        ("0.5", MemoryGpuConfig.Utilization(0.5)),
        ("4GiB", MemoryGpuConfig.MbAmount(4096)),
        ("1.5 gib", MemoryGpuConfig.MbAmount(1536)),
        ("512MiB", MemoryGpuConfig.MbAmount(512)),
        ("1GB", MemoryGpuConfig.MbAmount(953)),
        ("65536tokens", MemoryGpuConfig.ContextSize(65536)),
    ],
)
def test_memory_goal_is_a_fraction_a_size_or_tokens(goal, memory, fake):
    """The three forms of mistralrs 0.9.5."""
    Runner(Which.Plain("x"), memory_goal=goal)

    assert fake.builder.config.paged_attn.gpu_memory == memory


@pytest.mark.parametrize("goal", ["", "much", "4TiBs", "1.5tokens", "-1", 0, 1.5, True, "2"])
def test_a_wrong_memory_goal_is_refused(goal, fake):
    """The error names the value or its range."""
    with pytest.raises(ConfigError, match=r"memory_goal|Utilization"):
        Runner(Which.Plain("x"), memory_goal=goal)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"no_paged_attn": True, "paged_attn": True}, "no_paged_attn and paged_attn"),
        ({"no_paged_attn": True, "pa_blk_size": 16}, "no_paged_attn and pa_blk_size"),
        ({"no_paged_attn": True, "memory_goal": 0.5}, "no_paged_attn and memory_goal"),
        ({"pa_gpu_mem": 10, "pa_ctxt_len": 10}, "pa_gpu_mem and pa_ctxt_len"),
        ({"pa_gpu_mem_usage": 0.5, "memory_goal": 0.5}, "pa_gpu_mem_usage and memory_goal"),
        ({"no_kv_cache": True, "paged_attn": True}, "no_kv_cache and paged_attn"),
        ({"max_seqs": 0}, "max_num_seqs"),
        ({"max_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
    ],
)
def test_contradictions_name_both_arguments(arguments, named, fake):
    """Refused before anything is loaded."""
    with pytest.raises(ConfigError, match=named):
        Runner(Which.Plain("x"), **arguments)

    assert fake.builder is None


def test_names_of_the_package_work_as_values(fake):
    """ModelDType.Auto and PagedCacheType.Auto are written as in mistralrs."""
    Runner(Which.Plain("x", dtype=ModelDType.Auto), pa_cache_type=PagedCacheType.Auto)

    assert fake.builder.config.dtype is ModelDType.AUTO
    assert fake.builder.config.paged_attn.cache_type is PagedCacheType.AUTO


@pytest.mark.real_model
@pytest.mark.timeout(300)  # loads the model and answers, maybe on a busy machine
def test_the_example_runs(demo_model, monkeypatch, capsys):
    """Code in the shape of the mistralrs package answers on the demo model."""
    monkeypatch.syspath_prepend(EXAMPLES)

    importlib.import_module("runner").main(str(demo_model))

    assert "The capital of France is Paris." in capsys.readouterr().out
