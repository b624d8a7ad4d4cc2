"""Models for the tests of the frameworks: one calls a tool and then answers, one talks on."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mistralrs_sdk import BlockingModel, MemoryGpuConfig, ModelBuilder, PagedAttentionMetaBuilder
from tests.checkpoint_files import change_json
from tests.script_model import script_folder
from tests.test_model_tools import pieces_tokenizer
from tests.tiny_models import tiny_checkpoint

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{{ '</think>' if enable_thinking is defined and not enable_thinking }}"
    "{{ '<result>' if messages[-1].role == 'tool' else '\n' }}"
)
CALLING = [
    "<think>",
    "\nwhere ",
    "to?",
    "\n</think>",
    "\n\nLet me",
    " look.",
    "\n<tool_call>",
    '\n{"name": "weather", ',
    '"arguments": {"ci',
    'ty": "Oslo"}}',
    "\n</tool_call>",
]
"""One token each; what is asked for first."""
ANSWERING = ["It ", "rains", " there."]
"""What is said after the tool's result."""
ARGUMENTS = '{"city": "Oslo"}'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def rounds_builder(
    folder: Path, calling: list[str] = CALLING, answering: list[str] = ANSWERING
) -> ModelBuilder:
    """A model that answers with the first pieces, and after a tool's result with the others."""
    pieces = [*calling, "<|im_end|>", "<result>", *answering]
    tokenizer = pieces_tokenizer(pieces, ("<|im_end|>",))
    script: list[Any] = [tokenizer.token_to_id(piece) for piece in pieces]
    path = script_folder(folder, script, tokenizer=tokenizer)
    change_json(path / "config.json", max_position_embeddings=1024)
    change_json(path / "tokenizer_config.json", chat_template=TEMPLATE)
    return ModelBuilder(path).with_force_cpu().with_num_threads(1).with_dtype("f32")


class Listed:
    """A stream of chunks that are there already: none waits for another, none is merged."""

    def __init__(self, chunks: Iterable[Any]) -> None:
        self._chunks = iter(chunks)

    async def __anext__(self) -> Any:
        for chunk in self._chunks:
            return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._chunks = iter(())


def talking_builder(folder: Path) -> ModelBuilder:
    """A tiny model that talks on and on, if it is asked to ignore its end."""
    path = tiny_checkpoint("llama", folder)
    change_json(path / "config.json", max_position_embeddings=20_000)
    paged = PagedAttentionMetaBuilder().with_gpu_memory(MemoryGpuConfig.ContextSize(20_000))
    builder = ModelBuilder(path).with_force_cpu().with_num_threads(1).with_dtype("f32")
    return builder.with_paged_attn(paged.build())


def assert_blocking_idle(model: BlockingModel) -> None:
    """Nothing runs, waits or holds blocks, within a second."""
    deadline = time.monotonic() + 1
    while (stats := model.stats()).running or stats.waiting:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert stats.used_blocks == 0
