"""`Runner`: tools, sessions, adapters and embeddings as the `mistralrs` package writes them."""

from __future__ import annotations

import json
import threading

import attrs
import pytest

from mistralrs_sdk import (
    AdapterError,
    AgentPermission,
    AgentToolApprovalDecision,
    ChatCompletionChunkResponse,
    ChatCompletionRequest,
    CompletionRequest,
    ConfigError,
    EmbeddingModelBuilder,
    EmbeddingRequest,
    McpClientConfig,
    ModelBuilder,
    ReasoningEffort,
    RequestError,
    Runner,
    ToolChoice,
    UnsupportedError,
    Which,
    runner,
)
from tests.adapter_files import tiny_adapter
from tests.embedding_models import bare_folder, embedding_folder
from tests.model_helpers import tiny_folder

TEMPLATE = """
{%- for tool in tools or [] %}{{ tool.function.name }} <tool_call>
{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}
{% endfor %}assistant: """
SWITCH = {
    "type": "function",
    "function": {
        "name": "switch",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}
MUST = {"type": "function", "function": {"name": "switch"}}
"""The first answer calls `switch`, whatever the model would say."""


def load(**arguments) -> Runner:
    return Runner(
        Which.Plain(str(tiny_folder()), adapters=[]),
        cpu=True,
        num_threads=1,
        pa_ctxt_len=2048,
        chat_template=TEMPLATE,
        **arguments,
    )


def ask(text="light?", **settings) -> ChatCompletionRequest:
    return ChatCompletionRequest(text, **{"max_tokens": 60, "top_k": 1, **settings})


@pytest.fixture(scope="module")
def calls():
    return []


@pytest.fixture(scope="module")
def tiny(calls):
    """A model whose tool `switch` notes its calls in `calls`."""

    def switch(name, arguments):
        calls.append((name, arguments, threading.current_thread().name))
        return "bright" if arguments["on"] else "dark"

    with load(tool_callbacks={"switch": switch}) as loaded:
        yield loaded


@attrs.define
class FakeModel:
    """In place of BlockingModel: keeps the builder and the requests."""

    builder: object = None

    def from_builder(self, builder):
        self.builder = builder
        return self


@pytest.fixture
def fake(monkeypatch):
    model = FakeModel()
    monkeypatch.setattr(runner, "BlockingModel", model)
    return model


@pytest.mark.parametrize("schema", [SWITCH, json.dumps(SWITCH)], ids=["dict", "json"])
def test_a_callback_gets_the_name_and_the_arguments(schema, tiny, calls):
    """It answers calls of the tool that the request describes, and the record says so."""
    calls.clear()

    response = tiny.send_chat_completion_request(ask(tool_schemas=[schema], tool_choice=MUST))

    ((name, arguments, thread),) = calls
    assert (name, set(arguments)) == ("switch", {"on"})
    assert thread != threading.current_thread().name
    (record,) = response.agentic_tool_calls
    assert record.result_content == ("bright" if arguments["on"] else "dark")
    assert response.choices[0].finish_reason in ("stop", "length")


def test_a_stream_holds_chunks_only(tiny):
    """What tools do is not told between the chunks: code for `mistralrs` expects none of that."""
    request = ask(tool_schemas=[SWITCH], tool_choice=MUST, stream=True)

    chunks = list(tiny.send_chat_completion_request(request))

    assert all(isinstance(chunk, ChatCompletionChunkResponse) for chunk in chunks)
    assert chunks[-1].usage.prompt_tokens > 0
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_a_stream_left_early_ends_its_request(tiny):
    """Closing the iterator of chunks aborts what it read from."""
    chunks = tiny.send_chat_completion_request(
        ask(stream=True, max_tokens=1500, ignore_eos=True, tool_choice=ToolChoice.NONE)
    )
    next(chunks)
    chunks.close()

    for _ in range(500):
        if not tiny.inner().stats().running:
            break
        threading.Event().wait(0.002)
    assert not tiny.inner().stats().running


def test_calls_without_a_callback_are_returned():
    """A model without callbacks gives its calls to the caller."""
    with load() as loaded:
        request = ask(tool_schemas=[SWITCH], tool_choice=MUST)
        (choice,) = loaded.send_chat_completion_request(request).choices

    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "switch"


def test_approval_is_asked_and_a_denial_reaches_the_model(tiny, calls):
    """With Ask the callback sees each call; what it denies is not executed."""
    calls.clear()
    seen = []

    def decide(approval):
        seen.append((approval.tool.label, json.loads(approval.arguments)))
        return AgentToolApprovalDecision.deny("not today")

    response = tiny.send_chat_completion_request(
        ask(
            tool_schemas=[SWITCH],
            tool_choice=MUST,
            agent_permission=AgentPermission.Ask,
            agent_approval_callback=decide,
        )
    )

    assert [label for label, _ in seen] == ["switch"]
    assert calls == []
    assert "not today" in response.agentic_tool_calls[0].result_content


def test_every_field_reaches_the_request():
    """Fields about tools, agents and reasoning become the settings of their names."""
    decide = bool
    request = ask(
        reasoning_effort=" High ",
        tool_schemas=[SWITCH],
        tool_choice="Auto",
        max_tool_rounds=3,
        tool_dispatch_url="http://localhost/tools",
        agent_approval_callback=decide,
        session_id="s",
        adapter="a",
        truncate_sequence=True,
    )

    asked = request.builder()

    assert asked.reasoning_effort is ReasoningEffort.HIGH
    assert [tool.to_dict() for tool in asked.tools] == [SWITCH]
    assert asked.tool_choice == ToolChoice.AUTO
    assert (asked.max_tool_rounds, asked.session_id) == (3, "s")
    assert asked.tool_dispatch_url == "http://localhost/tools"
    assert asked.agent_approval_callback is decide
    assert asked.agent_permission is AgentPermission.ASK
    assert (asked.adapter, asked.truncate_sequence) == ("a", True)
    assert ask(agent_permission="deny").builder().agent_permission is AgentPermission.DENY
    assert ask(reasoning_effort="none").builder().reasoning_effort is ReasoningEffort.OFF
    assert ask(tool_choice="NoTools").builder().tool_choice == ToolChoice.NONE


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tool_schemas": ["{"]}, "tool_schemas.*is no JSON"),
        ({"tool_schemas": [{"type": "x"}]}, "tool"),
        ({"tool_schemas": [SWITCH, SWITCH]}, "two tools are called 'switch'"),
        ({"tool_choice": "perhaps"}, "tool_choice 'perhaps'"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": "off", "enable_thinking": True}, "contradicts"),
        ({"max_tool_rounds": -1}, "max_tool_rounds"),
        ({"tool_dispatch_url": "ftp://x"}, "tool_dispatch_url"),
        ({"agent_permission": "maybe"}, "agent_permission"),
        ({"agent_approval_callback": 3}, "callback"),
        ({"session_id": ""}, "session_id"),
        ({"adapter": ""}, "adapter"),
    ],
)
def test_wrong_fields_are_refused_where_they_are_written(settings, named):
    """A request checks itself when it is made."""
    with pytest.raises(RequestError, match=named):
        ask(**settings)


def test_messages_are_read_when_the_request_is_sent(tiny):
    """A list that grew after the request was made is sent as it is then."""
    turns = [{"role": "user", "content": "Hello"}]
    request = ChatCompletionRequest(turns, top_k=1, max_tokens=1)
    before = tiny.send_chat_completion_request(request).usage.prompt_tokens

    turns.append({"role": "user", "content": "again"})

    assert tiny.send_chat_completion_request(request).usage.prompt_tokens > before


@pytest.mark.parametrize("callbacks", [{"a": 3}, {"a b": print}])
def test_wrong_callbacks_are_refused_before_loading(callbacks, fake):
    """A callback that cannot be called, or a name no tool may have."""
    with pytest.raises((ConfigError, RequestError), match=r"a b|callable"):
        Runner(Which.Plain("x"), tool_callbacks=callbacks)

    assert fake.builder is None


def test_mcp_servers_are_the_builders(fake):
    """mcp_client_config is what with_mcp_client takes."""
    config = McpClientConfig(servers=[])

    Runner(Which.Plain("x"), mcp_client_config=config)

    assert fake.builder == ModelBuilder("x").with_mcp_client(config)


@pytest.mark.parametrize("layers", ["0:2;1:2", ["0:2", "1:2"]])
def test_device_layers_are_one_text_or_several(layers, fake):
    """Text is not taken for a list of its characters."""
    Runner(Which.Plain("x"), num_device_layers=layers)

    assert fake.builder == ModelBuilder("x").with_device_mapping("0:2;1:2")


def test_sessions_leave_and_enter_as_json(tiny):
    """What was said in a session comes before the next turn; it can be taken elsewhere."""
    quiet = {"session_id": "s", "tool_choice": "NoTools", "max_tokens": 3}
    response = tiny.send_chat_completion_request(ask("Hello", **quiet))
    assert response.session_id == "s"

    exported = tiny.export_session("s")
    turns = json.loads(exported)["messages"]

    assert [turn["role"] for turn in turns] == ["user", "assistant"]
    tiny.import_session("copy", exported)
    assert tiny.list_session_ids() == ["s", "copy"]
    assert tiny.export_session("copy") == exported
    assert (tiny.delete_session("s"), tiny.delete_session("s")) == (True, False)
    assert tiny.export_session("s") is None
    tiny.delete_session("copy")
    with pytest.raises(RequestError, match=r"session_json.*no JSON"):
        tiny.import_session("s", "{")


def test_adapters_come_and_go(tiny, tmp_path):
    """Load, replace, list and unload under mistralrs' arguments."""
    folders = [tiny_adapter(tmp_path / name, seed=n) for n, name in enumerate("ab")]

    first = tiny.load_lora_adapter("a", folders[0])
    with pytest.raises(AdapterError, match="'a'"):
        tiny.load_lora_adapter("a", folders[1])
    with pytest.raises(AdapterError):
        tiny.load_lora_adapter("a", folders[1], expected_generation="0" * 64)
    second = tiny.load_lora_adapter("a", folders[1], expected_generation=first.generation)
    third = tiny.load_lora_adapter("a", folders[0], load_inplace=True)

    assert tiny.list_lora_adapters() == [third]
    assert third.generation == first.generation != second.generation
    answer = tiny.send_chat_completion_request(ask(adapter="a", tool_choice="NoTools"))
    assert answer.adapter_generation == third.generation
    assert tiny.lora_adapter_status().adapters == (third,)
    with pytest.raises(AdapterError):
        tiny.unload_lora_adapter("a", expected_generation=second.generation)
    assert tiny.unload_lora_adapter("a") == third
    assert tiny.list_lora_adapters() == []


def test_the_model_may_be_unloaded_meanwhile(tiny):
    """Unloaded, its memory is free; the next request loads it again."""
    name = tiny.get_default_model_id()

    tiny.unload_model(name)

    assert tiny.list_models_with_status() == [(name, "unloaded")]
    assert (tiny.list_unloaded_models(), tiny.get_model_status(name)) == ([name], "unloaded")
    assert not tiny.is_model_loaded(name)
    request = ask(tool_choice="NoTools", max_tokens=1)
    assert tiny.send_chat_completion_request_to_model(request, name).choices
    assert tiny.get_model_status(name) == "loaded"
    tiny.reload_model(name)
    tiny.set_default_model_id(name)
    assert tiny.get_model_status("other") is None
    raw = CompletionRequest("Hello", max_tokens=1)
    assert tiny.send_completion_request_to_model(raw, "default").choices
    with pytest.raises(RequestError, match="last one"):
        tiny.remove_model(name)


def test_embeddings_are_those_of_the_builder(tmp_path):
    """`Which.Embedding` loads a model that embeds; the vectors are the model's own."""
    folder = embedding_folder(tmp_path / "model", "qwen3")
    texts = ["Hello", "Hello you"]
    which = Which.Embedding(str(folder), arch="qwen3embedding", dtype="f32")

    with Runner(which, cpu=True, num_threads=1) as loaded:
        vectors = loaded.send_embedding_request(EmbeddingRequest(texts))
        ids = loaded.tokenize_text("Hello", True)
        (alone,) = loaded.send_embedding_request(EmbeddingRequest(input=[ids]))
        with pytest.raises(RequestError, match="embeds"):
            loaded.send_chat_completion_request(ask())

    assert alone == pytest.approx(vectors[0], abs=1e-6)  # alone and in a batch
    assert [len(vector) for vector in vectors] == [len(vectors[0])] * 2
    assert alone != pytest.approx(vectors[1], abs=1e-3)


def test_a_model_that_embeds_is_not_told_about_chats(fake):
    """Settings it has are the builder's; one for chats is refused by name."""
    Runner(Which.Embedding("x", tokenizer_json="t.json"), 4, num_threads=2, in_situ_quant="8")

    expected = EmbeddingModelBuilder("x").with_max_num_seqs(4).with_num_threads(2)
    assert fake.builder == expected.with_isq("8").with_tokenizer_json("t.json")
    for argument in (
        {"chat_template": "t.json"},
        {"prefix_cache_n": 0},
        {"pa_ctxt_len": 512},
        {"no_paged_attn": True},
        {"no_kv_cache": True},
        {"tool_callbacks": {"a": print}},
    ):
        with pytest.raises(ConfigError, match="no part in a model that embeds"):
            Runner(Which.Embedding("x"), **argument)


def test_a_wrong_embedding_architecture_is_an_error(tmp_path):
    """The model says what it is; a contradiction names both."""
    folder = embedding_folder(tmp_path / "model", "qwen3")

    with pytest.raises(ConfigError, match=r"arch \('embeddinggemma'\).*Qwen3"):
        Runner(Which.Embedding(str(folder), "embeddinggemma"), cpu=True, num_threads=1)
    with pytest.raises(UnsupportedError, match="'bert'"):
        Which.Embedding(str(bare_folder("qwen3")), "bert")


@pytest.mark.parametrize(
    "method",
    [
        "generate_image",
        "generate_audio",
        "begin_calibration",
        "calibration_status",
        "apply_calibration",
        "find_file",
    ],
)
def test_methods_for_what_is_not_done_say_so(method, tiny):
    """They exist, and raise by name."""
    with pytest.raises(UnsupportedError, match=method):
        getattr(tiny, method)("x")
