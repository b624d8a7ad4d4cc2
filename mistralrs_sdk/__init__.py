"""Run language models from Python: `await ModelBuilder("model").build()`, with the engine inside.

Names are imported when first used, so that `import mistralrs_sdk` stays instant.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from mistralrs_sdk._version import __version__

if TYPE_CHECKING:
    from mistralrs_sdk.blocking import BlockingModel
    from mistralrs_sdk.builder import ModelBuilder
    from mistralrs_sdk.builders import GgufModelBuilder, PagedAttentionMetaBuilder
    from mistralrs_sdk.chat.messages import (
        ReasoningEffort,
        TextMessageRole,
        TextMessages,
    )
    from mistralrs_sdk.chat.requests import RequestBuilder
    from mistralrs_sdk.chat.responses import (
        ChatCompletionChunkResponse,
        ChatCompletionResponse,
        Choice,
        ChunkChoice,
        CompletionChoice,
        CompletionResponse,
        Delta,
        Logprobs,
        ResponseLogprob,
        ResponseMessage,
        TopLogprob,
        Usage,
    )
    from mistralrs_sdk.chat.tools import (
        CalledFunction,
        Function,
        Tool,
        ToolCallResponse,
        ToolChoice,
    )
    from mistralrs_sdk.config import (
        EngineConfig,
        MemoryGpuConfig,
        ModelDType,
        PagedAttentionConfig,
        PagedCacheType,
        TokenSource,
    )
    from mistralrs_sdk.constraints.constraint import Constraint
    from mistralrs_sdk.engine.metrics import EngineMetrics
    from mistralrs_sdk.engine.scheduler import SchedulerStats
    from mistralrs_sdk.errors import (
        ConfigError,
        EngineClosedError,
        EngineDeadError,
        InferenceError,
        MistralRsError,
        ModelLoadError,
        QueueFullError,
        RequestError,
        UnsupportedError,
    )
    from mistralrs_sdk.isq import IsqBits, IsqType
    from mistralrs_sdk.model import Model
    from mistralrs_sdk.plan import MemoryPlan
    from mistralrs_sdk.runner import Runner
    from mistralrs_sdk.runner_requests import ChatCompletionRequest, CompletionRequest
    from mistralrs_sdk.sampling_params import (
        DrySamplingParams,
        SamplingParams,
        StopTokens,
    )
    from mistralrs_sdk.stream import ChatStream
    from mistralrs_sdk.topology import LayerTopology, Topology
    from mistralrs_sdk.which import Architecture, Which

_HOME = {
    "Architecture": "which",
    "BlockingModel": "blocking",
    "CalledFunction": "chat.tools",
    "ChatCompletionChunkResponse": "chat.responses",
    "ChatCompletionRequest": "runner_requests",
    "ChatCompletionResponse": "chat.responses",
    "ChatStream": "stream",
    "Choice": "chat.responses",
    "ChunkChoice": "chat.responses",
    "CompletionChoice": "chat.responses",
    "CompletionRequest": "runner_requests",
    "CompletionResponse": "chat.responses",
    "ConfigError": "errors",
    "Constraint": "constraints.constraint",
    "Delta": "chat.responses",
    "DrySamplingParams": "sampling_params",
    "EngineClosedError": "errors",
    "EngineConfig": "config",
    "EngineDeadError": "errors",
    "EngineMetrics": "engine.metrics",
    "Function": "chat.tools",
    "GgufModelBuilder": "builders",
    "InferenceError": "errors",
    "IsqBits": "isq",
    "IsqType": "isq",
    "LayerTopology": "topology",
    "Logprobs": "chat.responses",
    "MemoryGpuConfig": "config",
    "MemoryPlan": "plan",
    "MistralRsError": "errors",
    "Model": "model",
    "ModelBuilder": "builder",
    "ModelDType": "config",
    "ModelLoadError": "errors",
    "PagedAttentionConfig": "config",
    "PagedAttentionMetaBuilder": "builders",
    "PagedCacheType": "config",
    "QueueFullError": "errors",
    "ReasoningEffort": "chat.messages",
    "RequestBuilder": "chat.requests",
    "RequestError": "errors",
    "ResponseLogprob": "chat.responses",
    "ResponseMessage": "chat.responses",
    "Runner": "runner",
    "SamplingParams": "sampling_params",
    "SchedulerStats": "engine.scheduler",
    "StopTokens": "sampling_params",
    "TextMessageRole": "chat.messages",
    "TextMessages": "chat.messages",
    "TokenSource": "config",
    "Tool": "chat.tools",
    "ToolCallResponse": "chat.tools",
    "ToolChoice": "chat.tools",
    "TopLogprob": "chat.responses",
    "Topology": "topology",
    "UnsupportedError": "errors",
    "Usage": "chat.responses",
    "Which": "which",
}

__all__ = [
    "Architecture",
    "BlockingModel",
    "CalledFunction",
    "ChatCompletionChunkResponse",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatStream",
    "Choice",
    "ChunkChoice",
    "CompletionChoice",
    "CompletionRequest",
    "CompletionResponse",
    "ConfigError",
    "Constraint",
    "Delta",
    "DrySamplingParams",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineMetrics",
    "Function",
    "GgufModelBuilder",
    "InferenceError",
    "IsqBits",
    "IsqType",
    "LayerTopology",
    "Logprobs",
    "MemoryGpuConfig",
    "MemoryPlan",
    "MistralRsError",
    "Model",
    "ModelBuilder",
    "ModelDType",
    "ModelLoadError",
    "PagedAttentionConfig",
    "PagedAttentionMetaBuilder",
    "PagedCacheType",
    "QueueFullError",
    "ReasoningEffort",
    "RequestBuilder",
    "RequestError",
    "ResponseLogprob",
    "ResponseMessage",
    "Runner",
    "SamplingParams",
    "SchedulerStats",
    "StopTokens",
    "TextMessageRole",
    "TextMessages",
    "TokenSource",
    "Tool",
    "ToolCallResponse",
    "ToolChoice",
    "TopLogprob",
    "Topology",
    "UnsupportedError",
    "Usage",
    "Which",
    "__version__",
]

logging.getLogger("mistralrs_sdk").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
