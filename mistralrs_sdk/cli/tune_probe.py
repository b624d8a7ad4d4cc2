"""What `tune` measures: a slice of a model, kept in several ways, built and asked for tokens."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from mistralrs_sdk import InferenceError, ModelBuilder, ModelLoadError
from mistralrs_sdk.cli.bench_numbers import Answer
from mistralrs_sdk.cli.bench_targets import InProcess
from mistralrs_sdk.cli.bench_work import make_jobs
from mistralrs_sdk.cli.tune_shape import Shape, Types, read_bytes, slice_of
from mistralrs_sdk.cli.tune_stand_in import write_stand_in

if TYPE_CHECKING:
    from mistralrs_sdk import Model

CLIENTS = (1, 8)
"""How many requests at once decoding is measured with."""
SLICE_BYTES = 192 * 2**20
"""Of a slice that a step reads: more than most caches hold, and loaded in half a second."""
SECONDS = 7.5
"""After so long no further slice is built. They are measured one after the other: beside others a
small model would not find its weights in the cache, as it does when it runs."""

_MOST_ROUNDS = 5
_PROMPT_TOKENS = 128
_PROMPT = {1: 4, 8: 8}
_RECORDED = 4
"""Steps of what is asked first: they are recorded, kernels chosen and buffers made."""
_STEPS = (12, 128)
"""At least and at most in a round, and as many as take `_ROUND_SECONDS` if that lies between."""
_ROUND_SECONDS = 0.4
_NOTHING = Shape(
    layers=1, hidden=64, wide=64, heads=1, kv_heads=1, head_dim=64, vocab=256, tied=True
)
"""A model that computes next to nothing: what its steps take, steps of every model take besides."""
_FAR = 4
"""Times a slice are more bytes than any cache holds."""
_READ_SECONDS = 0.06
_NOTICED = 1.25


@attrs.frozen(kw_only=True)
class Way:
    """One way to keep the weights."""

    types: Types
    """Those in the file that is measured."""
    bits: int | None = None
    """What the builder quantises it to; None: as it does by itself."""
    kept: float = 1.0
    """For each byte in the file, how many the model has in memory."""


@attrs.frozen(kw_only=True)
class Times:
    """Seconds that a model takes."""

    steps: tuple[float, ...]
    """Of a step in which each of so many clients (`CLIENTS`) gets a token."""
    prompt: float
    """Of a prompt, until its first token."""

    @property
    def decode_rates(self) -> tuple[float, ...]:
        """Tokens a second of all clients together."""
        return tuple(clients / step for clients, step in zip(CLIENTS, self.steps, strict=True))

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return _PROMPT_TOKENS / self.prompt


def whole_model(part: Times, nothing: Times, *, read: float, computed: float) -> Times:
    """What a model takes, from a slice of it and a model that computes nothing.

    Steps grow with the bytes they read, `read` times the slice's, and prompts with the values in
    layers, `computed` times as many, but for what a model takes that computes nothing.
    """
    pairs = zip(part.steps, nothing.steps, strict=True)
    return Times(
        steps=tuple(_grown(step, fixed, read) for step, fixed in pairs),
        prompt=_grown(part.prompt, nothing.prompt, computed),
    )


def uncached(part: Times, size: int, *, near: float, far: float) -> Times:
    """What a slice takes whose weights no cache holds, from what one took that reads `size` bytes.

    So many bytes are read at `near` bytes a second, many more at `far`: if a cache holds the slice,
    the difference is waited for besides.
    """
    if near < _NOTICED * far:
        return part
    waiting = size * (1 / far - 1 / near)
    return attrs.evolve(part, steps=tuple(step + waiting for step in part.steps))


async def probe(
    shape: Shape,
    ways: Sequence[Way],
    builder_of: Callable[[Path, Path], ModelBuilder],
    *,
    device: str,
    free_bytes: int,
    slice_bytes: int = SLICE_BYTES,
) -> list[Times | None]:
    """Measure a model of this shape in each way; None for what there was no time or room for.

    `builder_of` makes a builder with the model's settings for another file, and its tokenizer;
    `free_bytes` are free on the device. The first way is tried in any case.

    Raises:
        InferenceError: a slice was built and does not answer.
    """
    started = time.perf_counter()
    nothing = await _measured(_NOTHING, Types.alike(_NOTHING, "F16"), None, builder_of, until=0)
    if nothing is None:
        return [None] * len(ways)
    slices = [slice_of(shape, w.types, most_bytes=int(slice_bytes / w.kept)) for w in ways]
    reads = [read_bytes(*part) for part in slices]
    sizes = [int(read * way.kept) for read, way in zip(reads, ways, strict=True)]
    sizes.append(_FAR * slice_bytes)
    speeds = [1.0] * len(sizes)
    if any(part != shape for part, _ in slices) and max(sizes) < free_bytes // 2:
        speeds = await asyncio.to_thread(_read_speeds, sizes, device)
    found: list[Times | None] = []
    for number, (way, (part, types)) in enumerate(zip(ways, slices, strict=True)):
        until = started + SECONDS * (number + 1) / len(ways)
        times = None
        if number == 0 or time.perf_counter() < started + SECONDS:
            times = await _measured(part, types, way.bits, builder_of, until=until)
        if times is not None:
            if part != shape:
                times = uncached(times, sizes[number], near=speeds[number], far=speeds[-1])
            read = read_bytes(shape, way.types) / reads[number]
            computed = shape.layer_values / part.layer_values
            times = whole_model(times, nothing, read=read, computed=computed)
        found.append(times)
    return found


async def _measured(
    shape: Shape,
    types: Types,
    bits: int | None,
    builder_of: Callable[[Path, Path], ModelBuilder],
    *,
    until: float,
) -> Times | None:
    """Medians of as many rounds as there is time for, one at least; None if there is no room."""
    try:
        built = await _built(shape, types, bits, builder_of)
    except ModelLoadError:
        return None
    async with built as model:
        target = await InProcess.of(model, name="what tune measures with")
        first = [await _last_answer(target, clients, _RECORDED) for clients in CLIENTS]
        fewest, most = _STEPS
        seconds = first[0].times[-1] - first[0].sent
        steps = min(most, max(fewest, int(_ROUND_SECONDS * _RECORDED / seconds)))
        rounds = [await _times(target, steps)]
        while len(rounds) < _MOST_ROUNDS and time.perf_counter() < until:
            rounds.append(await _times(target, steps))
    steps = zip(*[times.steps for times in rounds], strict=True)
    return Times(
        steps=tuple(statistics.median(seconds) for seconds in steps),
        prompt=statistics.median(times.prompt for times in rounds),
    )


async def _built(
    shape: Shape,
    types: Types,
    bits: int | None,
    builder_of: Callable[[Path, Path], ModelBuilder],
) -> Model:
    with tempfile.TemporaryDirectory(prefix="mistralrs-tune-") as folder:
        files = await asyncio.to_thread(write_stand_in, Path(folder), shape, types)
        builder = builder_of(*files).with_max_num_seqs(max(CLIENTS)).with_prefix_cache_n(0)
        if bits is not None:
            builder = builder.with_auto_isq(bits)
        return await builder.with_progress(False).build()


async def _times(target: InProcess, steps: int) -> Times:
    """One round: an answer of so many steps, several at once, and a prompt."""
    alone = await _last_answer(target, 1, steps)
    together = [await _last_answer(target, clients, _STEPS[0]) for clients in CLIENTS[1:]]
    (answer,) = await _answers(target, [(_PROMPT_TOKENS, 1)])
    return Times(
        steps=tuple(_step_seconds(found) for found in (alone, *together)),
        prompt=answer.times[0] - answer.sent,
    )


async def _last_answer(target: InProcess, clients: int, steps: int) -> Answer:
    """Of so many answers at once the one that began last: from then on all decode."""
    answers = await _answers(target, [(_PROMPT[clients], 1 + steps)] * clients)
    return max(answers, key=lambda answer: answer.times[0])


async def _answers(target: InProcess, lengths: Sequence[tuple[int, int]]) -> list[Answer]:
    jobs = make_jobs(lengths, target.ids, seed=len(lengths))
    answers = await asyncio.gather(*[target.answer(job) for job in jobs])
    for answer in answers:
        if answer.error is not None or not answer.times:
            raise InferenceError(f"{target.name} does not answer: {answer.error or 'no tokens'}")
    return answers


def _step_seconds(answer: Answer) -> float:
    """Of the later two thirds: a cache then holds what it can of a small model.

    A slow reader gets several tokens in one piece, as many in each on average.
    """
    pieces = len(answer.times) - 1
    if pieces < 3:
        return (answer.times[-1] - answer.sent) / answer.new_tokens
    early = pieces // 3
    interval = (answer.times[-1] - answer.times[early]) / (pieces - early)
    return interval * pieces / (answer.new_tokens - 1)


def _read_speeds(sizes: Sequence[int], device: str) -> list[float]:
    """Bytes a second at which so many of them are read again and again, at best."""
    import torch

    data = torch.ones(max(sizes) // 4, device=device)
    found: list[float] = []
    for size in sizes:
        part = data[: size // 4]
        times: list[float] = []
        while len(times) < 3 or sum(times) < _READ_SECONDS:
            started = time.perf_counter()
            float(part.sum())  # on an accelerator too the number is waited for
            times.append(time.perf_counter() - started)
        found.append(size / min(times))
    return found


def _grown(measured: float, fixed: float, ratio: float) -> float:
    return fixed + max(0.0, measured - fixed) * ratio
