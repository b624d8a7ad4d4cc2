"""`Model.describe()`: every resolved setting and where it came from, for people to read."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from mistralrs_sdk.chat.answer_format import AnswerFormat
from mistralrs_sdk.config import EngineConfig
from mistralrs_sdk.cpu_threads import format_cpulist
from mistralrs_sdk.engine.build import EngineInfo
from mistralrs_sdk.loading.checkpoint import Checkpoint

_SHOWN_ELSEWHERE = {"paged_attn"}
_SAMPLING_DEFAULTS = {
    "do_sample",
    "min_p",
    "repetition_penalty",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
}


def describe(info: EngineInfo, checkpoint: Checkpoint, answers: AnswerFormat | None = None) -> str:
    """Lay the settings out as three columns: name, value, where it came from.

    `answers` says how a model that chats is read; None for one that does not.
    """
    rows = [*_model_rows(info, checkpoint), *_setting_rows(info), *_text_rows(checkpoint)]
    if answers is not None:
        rows += _answer_rows(answers)
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows]
    return "\n".join(line.rstrip() for line in lines)


def _model_rows(info: EngineInfo, checkpoint: Checkpoint) -> Iterator[tuple[str, str, str]]:
    yield "model", checkpoint.name, "user"
    yield "architecture", info.architecture, "model"
    yield "parameters", f"{info.num_parameters / 1e6:.1f} M", "model"
    yield "format", checkpoint.format, "model"
    loaded = f"{info.weights}; loaded in {info.load_seconds:.1f} s"
    yield "weights", _mib(info.weight_bytes), loaded


def _setting_rows(info: EngineInfo) -> Iterator[tuple[str, str, str]]:
    defaults = EngineConfig()
    for field in attrs.fields(EngineConfig):
        if field.name in _SHOWN_ELSEWHERE:
            continue
        value = getattr(info.config, field.name)
        origin = info.origins.get(field.name) or (
            "default" if value == getattr(defaults, field.name) else "user"
        )
        yield field.name, str(getattr(value, "value", value)), origin
    if info.cpu_affinity is not None:
        yield "cpu affinity", format_cpulist(info.cpu_affinity), info.origins["cpu_affinity"]
    yield "attention", info.attention, info.origins.get("attention", "automatic")
    paged = info.config.paged_attn
    if info.config.no_kv_cache:
        yield "KV cache", "none", "user"
        return
    per_token = f"{info.kv_bytes_per_token} bytes in {info.kv_dtype.value}"
    if paged is None:
        yield "KV cache", "dense, per sequence, grown by 512 tokens", "user"
        yield "KV per token", per_token, info.origins["kv_dtype"]
        return
    assert paged != "auto", "resolved at build"
    tokens = info.num_blocks * paged.block_size
    size = tokens * info.kv_bytes_per_token
    shape = f"{info.num_blocks} blocks of {paged.block_size} = {tokens} tokens, {_mib(size)}"
    yield "KV cache", shape, info.origins["paged_attn"]
    yield "KV per token", per_token, info.origins["kv_dtype"]


def _text_rows(checkpoint: Checkpoint) -> Iterator[tuple[str, str, str]]:
    files = checkpoint.tokenizer
    yield "chat template", "yes" if files.chat_template else "none", files.template_source or ""
    yield "BOS", f"{files.bos_token!r}{', added to raw text' if files.adds_bos else ''}", "model"
    yield "end tokens", ", ".join(map(str, sorted(files.eos_token_ids))) or "none", "model"
    for name, value in sorted(checkpoint.generation_config.items()):
        if name in _SAMPLING_DEFAULTS:
            yield f"default {name}", str(value), "generation_config.json"


def _answer_rows(answers: AnswerFormat) -> Iterator[tuple[str, str, str]]:
    tags = answers.reasoning
    why_tools, why_reasoning = answers.reasons
    yield "tool calls", answers.tools.name, why_tools
    yield "reasoning", "none" if tags is None else f"{tags.opens} ... {tags.closes}", why_reasoning


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
