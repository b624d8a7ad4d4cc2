# pyright: strict
"""Every public name in a strictly checked program: read by pyright, never run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import mistralrs_sdk as m
from mistralrs_sdk import (
    ChatCompletionResponse,
    Model,
    ModelBuilder,
    RequestBuilder,
    TextMessageRole,
    TextMessages,
    tool,
)


class City(TypedDict):
    name: str
    people: int


@tool
def weather(city: str) -> str:
    """Return the weather.

    Args:
        city: where
    """
    return f"Sunny in {city}."


def map_layers(builder: ModelBuilder) -> ModelBuilder:
    runs = [m.DeviceLayerMapMetadata(0, 16), m.DeviceLayerMapMetadata("cpu", 2)]
    by_hand = m.DeviceMapSetting.Map(m.DeviceMapMetadata.from_num_device_layers(runs))
    by_size = m.DeviceMapSetting.Auto(m.AutoDeviceMapParams.Text(max_seq_len=8192))
    return builder.with_device_mapping(by_hand).with_device_mapping(by_size)


def serve_or_build(builder: ModelBuilder) -> None:
    served: bool = m.serve_rank(builder.with_tensor_parallel(2))
    print(served)


def describe_models() -> list[ModelBuilder]:
    memory: m.MemoryGpuConfig = m.MemoryGpuConfig.ContextSize(4096)
    paged: m.PagedAttentionConfig = (
        m.PagedAttentionMetaBuilder()
        .with_block_size(16)
        .with_gpu_memory(memory)
        .with_paged_cache_type(m.PagedCacheType.AUTO)
        .build()
    )
    layers = m.Topology.empty().with_range(range(4), m.LayerTopology(isq=m.IsqType.Q8_0))
    first = (
        ModelBuilder("x")
        .with_paged_attn(paged)
        .with_topology(layers)
        .with_auto_isq(m.IsqBits.FOUR)
        .with_dtype(m.ModelDType.AUTO)
        .with_token_source(m.TokenSource.CacheToken())
        .with_tool(weather)
        .with_lora_adapters([m.LoraAdapterSpec("a", "folder")])
        .with_lora_runtime_config(m.LoraRuntimeConfig(max_adapters=2))
        .with_mcp_client(
            m.McpClientConfig(
                servers=[m.McpServerConfig(name="s", source=m.McpServerSource.Process("server"))]
            )
        )
    )
    settings: m.EngineConfig = first.config
    assert settings.max_num_seqs > 0
    return [first, m.GgufModelBuilder("x", ["a.gguf"]), m.TextModelBuilder("x")]


async def load_models() -> Model:
    lora = m.LoraModelBuilder.from_text_model_builder(m.TextModelBuilder("x"))
    plan: m.MemoryPlan = await ModelBuilder("x").plan()
    devices: tuple[m.DevicePlan, ...] = plan.devices
    print(plan, devices, await lora.build())
    embedder = m.EmbeddingModelBuilder("e")
    return await m.MultiModelBuilder().add_model_with_alias("e", embedder).build()


def requests() -> list[RequestBuilder | TextMessages]:
    sampling = m.SamplingParams(
        temperature=0.5, stop_toks=m.StopTokens.Seqs(["."]), dry_params=m.DrySamplingParams()
    )
    call = m.ToolCallResponse(index=0, id="1", function=m.CalledFunction("weather", "{}"))
    asked = (
        RequestBuilder()
        .add_message(TextMessageRole.USER, "Hi")
        .add_message_with_tool_call(TextMessageRole.ASSISTANT, "", [call])
        .add_tool_message("Sunny.", "1")
        .set_sampling(sampling)
        .set_tools([weather.tool, m.Tool(m.Function("now")), m.tool_from_function(len)])
        .set_tool_choice(m.ToolChoice.REQUIRED)
        .set_constraint(m.Constraint.Regex("a+"))
        .with_reasoning_effort(m.ReasoningEffort.LOW)
        .with_agent_approval_callback(approve)
        .with_agent_permission(m.AgentPermission.Ask)
        .set_adapter("a")
    )
    media: m.MultimodalMessages = m.MultimodalMessages().add_message("user", "Hi")
    return [asked, TextMessages().add_message("user", "Hi"), RequestBuilder.from_messages(media)]


def approve(approval: m.AgentToolApproval) -> m.AgentToolApprovalDecision:
    told: m.AgentToolMetadata = approval.tool
    print(told)
    return m.AgentToolApprovalDecision.approve()


def answer_in_person(call: m.CalledFunction, context: m.ToolCallContext) -> str:
    return f"{call.name} {context.round}"


async def ask(model: Model) -> ChatCompletionResponse:
    async with await model.stream_chat_request("Hi") as stream:
        opened: m.ChatStream | m.ToolLoopStream = stream
        print(opened)
        async for item in stream:
            if isinstance(item, m.AgenticToolCallProgress):
                print(item.tool_name)
            else:
                piece: m.ChatCompletionChunkResponse = item
                part: m.ChunkChoice = piece.choices[0]
                delta: m.Delta = part.delta
                print(delta.content)
    response = await model.send_chat_request({"messages": [{"role": "user", "content": "Hi"}]})
    choice: m.Choice = response.choices[0]
    message: m.ResponseMessage = choice.message
    used: m.Usage = response.usage
    print(message.reasoning_content, used.total_tokens)
    logprobs: m.Logprobs | None = choice.logprobs
    for entry in (logprobs.content if logprobs is not None else None) or ():
        token: m.ResponseLogprob = entry
        others: Sequence[m.TopLogprob] = token.top_logprobs
        print(token.token, others)
    for record in response.agentic_tool_calls or ():
        ran: m.AgenticToolCallRecord = record
        print(ran.name)
    city: City = await model.generate_structured(City, "Name a city.")
    print(city["people"])
    return response


async def ask_raw(model: Model) -> None:
    whole: m.CompletionResponse = await model.send_completion_request("Once", best_of=2)
    first: m.CompletionChoice = whole.choices[0]
    print(first.text)
    stream: m.CompletionStream = await model.stream_completion_request("Once")
    async for chunk in stream:
        piece: m.CompletionChunkResponse = chunk
        part: m.CompletionChunkChoice = piece.choices[0]
        print(part.text)
    raw: m.RawLogits = await model.send_raw_chat_request("Hi")
    print(m.cross_entropy_loss(raw.logits[0], raw.logits[0].argmax(-1)))
    vectors = await model.generate_embeddings(m.EmbeddingRequest.builder().add_prompt("a"))
    print(vectors, m.EmbeddingRequestBuilder().add_tokens([1]))
    vector: m.EmbeddingResponse = await model.send_embedding_request(["a"])
    print(vector.dimensions)


async def look_after(model: Model) -> None:
    adapter: m.LoraAdapterInfo = await model.load_lora_adapter("a", "folder")
    policy = m.LoraAdapterLoadPolicy.CompareAndSwap(adapter.generation)
    await model.load_lora_adapter_with_policy("a", "folder", policy)
    status: m.LoraRuntimeStatus = await model.lora_adapter_status()
    resident: Sequence[m.LoraResidentGenerationInfo] = status.generations
    print(resident, m.AdapterSelection.parse("a"))
    session: m.SerializedSession = model.export_session("s")
    tools: Sequence[m.McpToolInfo] = model.list_mcp_tools()
    print(session, tools)
    state: m.ModelStatus = model.list_models_with_status()[0][1]
    now: m.SchedulerStats = await model.stats()
    counted: m.EngineMetrics = await model.metrics()
    print(state, now, counted)


async def run_agent(model: Model) -> m.AgentStopReason:
    agent: m.Agent = m.AgentBuilder(model).with_tool(weather).build()
    settings: m.AgentConfig = agent.config()
    print(settings.max_iterations)
    stream: m.AgentStream = agent.run_stream("Hi")
    async for event in stream:
        happened: m.AgentEvent = event
        match happened:
            case m.AgentTextDelta():
                print(happened.text)
            case m.AgentToolCallsStart() | m.AgentToolCallsComplete():
                pass
            case m.ToolResult():
                print(happened.tool_name)
            case m.AgentComplete():
                print(happened)
            case _:
                pass
    response: m.AgentResponse = await agent.run("Hi")
    step: m.AgentStep = response.steps[0]
    print(step)
    return response.stop_reason


def without_a_loop() -> None:
    with m.BlockingModel.from_builder(ModelBuilder("x")) as model:
        print(model.chat("Hi"))
    architecture: m.Architecture = m.Architecture.Llama
    embedding: m.EmbeddingArchitecture = m.EmbeddingArchitecture.Qwen3Embedding
    print(m.Which.Embedding("e", arch=embedding))
    with m.Runner(which=m.Which.Plain("x", arch=architecture)) as runner:
        runner.send_chat_completion_request(m.ChatCompletionRequest("Hi"))
        runner.send_completion_request(m.CompletionRequest("Hi"))
        runner.send_embedding_request(m.EmbeddingRequest(["Hi"]))


def what_may_be_raised() -> tuple[type[m.MistralRsError], ...]:
    return (
        m.AdapterError,
        m.ConfigError,
        m.DeadlineError,
        m.EngineClosedError,
        m.EngineDeadError,
        m.InferenceError,
        m.ModelLoadError,
        m.QueueFullError,
        m.RequestError,
        m.UnsupportedError,
    )


def what_is_refused() -> tuple[type[object], ...]:
    return (
        m.AnyMoeConfig,
        m.MultimodalLoaderType,
        m.SpeechLoaderType,
        m.DiffusionLoaderType,
        m.AnyMoeExpertType,
        m.SearchResult,
        m.RequestedFile,
        m.AnyMoeModelBuilder,
        m.AudioInput,
        m.DiffusionGenerationParams,
        m.DiffusionModelBuilder,
        m.GgufLoraModelBuilder,
        m.GgufXLoraModelBuilder,
        m.InputFile,
        m.MtpConfig,
        m.MultimodalModelBuilder,
        m.SearchEmbeddingModel,
        m.SpeechModelBuilder,
        m.UqffEmbeddingModelBuilder,
        m.UqffMultimodalModelBuilder,
        m.UqffTextModelBuilder,
        m.UqffWriteConfig,
        m.VideoInput,
        m.WebSearchOptions,
        m.XLoraModelBuilder,
    )


def running_code() -> tuple[m.ModelBuilder, m.RequestBuilder]:
    policy = m.SandboxPolicy(network=m.NetworkMode.NONE, max_procs=8, extra_fs_read=["/data"])
    code = m.CodeExecutionConfig(timeout_secs=10, sandbox_policy=policy)
    shell = m.ShellConfig(permission=m.AgentPermission.ASK)
    skill = m.ShellSkillMount("notes", "How notes are kept.", Path("notes"))
    asked = m.RequestBuilder().with_code_execution().with_code_execution_permission("ask")
    return (
        m.ModelBuilder("model").with_code_execution(code).with_shell_execution(shell),
        asked.with_shell_options(m.ShellOptions(skills=(skill,))),
    )


async def main() -> None:
    print(m.__version__, describe_models(), requests(), what_may_be_raised(), what_is_refused())
    print(running_code())
    async with await load_models() as model:
        print(await ask(model), await run_agent(model), answer_in_person)
        await ask_raw(model)
        await look_after(model)
    without_a_loop()


if __name__ == "__main__":
    asyncio.run(main())
