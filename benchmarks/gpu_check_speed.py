"""Steps of the models, their time as a part of what the device allows, and the host's share."""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import attrs
import torch
from gpu_check_answers import drive, greedy
from gpu_check_machine import Limits, measure_limits, synchronize
from gpu_check_models import Shape, builder, checkpoint
from gpu_check_report import Book, Check, LeftOutError

from mistralrs_sdk import Model, ModelBuilder
from mistralrs_sdk.engine.engine import Engine

SYNC_WARNING = "called a synchronizing CUDA operation"
DECODE_TARGETS = {1: 0.75, 64: 0.70}
PREFILL_TARGET = 0.60
HOST_TARGET_MS = {64: 1.0}
WARM_STEPS = 8
MOST_TOKENS = 2048
"""Of an answer: it must not end while others are still at their prompts."""


@attrs.frozen(kw_only=True)
class Loads:
    """What is measured."""

    batches: tuple[int, ...]
    prompt: int
    """Tokens each decoding sequence begins with."""
    steps: int
    prefill: tuple[int, int]
    """Prompts at once, and tokens of each."""
    compared: tuple[int, ...]
    """The batches that are measured with graphs off and with FlashInfer off."""


FULL = Loads(batches=(1, 8, 64, 256), prompt=256, steps=64, prefill=(8, 2048), compared=(1, 64))
TINY = Loads(batches=(1, 4), prompt=12, steps=4, prefill=(2, 48), compared=(4,))


@attrs.frozen(kw_only=True)
class Costs:
    """What a step has to read and to multiply."""

    num_bytes: int
    """Of all weights that a step reads: the embedding is only looked up in."""
    layer_params: int
    head_params: int
    kv_bytes: int
    """Of one token."""
    attention_width: int
    """Of all layers together: heads times their size."""

    def decode_seconds(self, limits: Limits, *, batch: int, context: float) -> float:
        """The least time of a step of `batch` sequences with `context` tokens each."""
        params = self.layer_params + self.head_params
        operations = 2 * batch * params + 4 * batch * context * self.attention_width
        read = self.num_bytes + batch * context * self.kv_bytes
        return max(read / limits.read, operations / limits.multiply)

    def prefill_seconds(self, limits: Limits, *, count: int, tokens: int) -> float:
        """The least time for `count` prompts of `tokens` tokens."""
        operations = 2 * count * (tokens * self.layer_params + self.head_params)
        operations += 2 * count * tokens**2 * self.attention_width  # half of it is masked
        return operations / limits.multiply


async def check_speed(
    book: Book, work: Path, *, device: torch.device, shape: Shape, loads: Loads, variants: bool
) -> None:
    """Measure a model; with `variants` also without graphs and without FlashInfer."""
    limits = measure_limits(device, tiny=device.type == "cpu")
    judged = device.type == "cuda"
    place: list[Path] = []
    with book.check("weights made on the device") as check:
        place.append(checkpoint(shape, work, device=device))
        check.say(f"{shape.num_bytes / 2**30:.1f} GiB in bfloat16")
    if not place:
        return
    base = builder(
        place[0], device=device, dtype="bf16", seqs=max(loads.batches), prefix_cache=False
    )
    kinds: list[tuple[str, ModelBuilder, tuple[int, ...]]] = [("", base, loads.batches)]
    if variants:
        graphless = base.with_cuda_graphs(False)
        kinds.append((", graphs off", graphless, loads.compared))
        kinds.append((", FlashInfer off", base.with_flashinfer(False), loads.compared))
    for what, made, batches in kinds:
        await _measure(book, made, what, batches=batches, loads=loads, limits=limits, judged=judged)


async def _measure(
    book: Book,
    made: ModelBuilder,
    what: str,
    *,
    batches: Sequence[int],
    loads: Loads,
    limits: Limits,
    judged: bool,
) -> None:
    models: list[Model] = []
    try:
        with book.check(f"build{what}") as check:
            models.append(await made.build())
            await describe(check, models[0])
        if not models:
            return
        model = models[0]
        costs = await model.inner().thread.call(lambda engine: costs_of(engine, model))
        for batch in batches:
            with book.check(f"decode, {batch} at once{what}") as check:
                found = await _on_engine(model, decode, batch, loads)
                target = DECODE_TARGETS.get(batch) if judged and not what else None
                report_decode(check, found, costs, limits, target=target)
            if not what and batch == max(loads.compared):
                with book.check(f"host time, {batch} at once") as check:
                    report_host(check, found, judged=judged)
                with book.check("no hidden waits in decode steps") as check:
                    report_waits(check, await _on_engine(model, hidden_waits, batch, loads))
        with book.check(f"prefill{what}") as check:
            count, tokens = loads.prefill
            seconds = await _on_engine(model, prefill, count, tokens)
            least = costs.prefill_seconds(limits, count=count, tokens=tokens)
            text = (
                f"{count} prompts of {tokens}: {count * tokens / seconds:.0f} tokens/s, "
                f"{least / seconds:.0%} of the limit of products"
            )
            numbers = {"tokens_per_second": count * tokens / seconds, "part": least / seconds}
            if judged and not what:
                check.expect(
                    least / seconds >= PREFILL_TARGET,
                    f"{text}, target {PREFILL_TARGET:.0%}",
                    **numbers,
                )
            else:
                check.say(text, **numbers)
    finally:
        for model in models:
            await model.aclose()


async def describe(check: Check, model: Model) -> None:
    """What the model runs on, and where its memory went."""
    info = model.inner().info
    graphs = "graphs" if info.config.cuda_graphs else "no graphs"
    check.say(f"{info.attention}, {graphs}, loaded in {info.load_seconds:.1f} s")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        check.say(f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB left free", free=free)


def costs_of(engine: Engine, model: Model) -> Costs:
    """Count the weights of the layers and of the head."""
    module = engine.runner.model
    head = list((module.lm_head or module.model.embed_tokens).parameters())
    layers = list(module.model.layers.parameters())
    return Costs(
        num_bytes=sum(p.numel() * p.itemsize for p in layers + head),
        layer_params=sum(p.numel() for p in layers),
        head_params=sum(p.numel() for p in head),
        kv_bytes=model.inner().info.kv_bytes_per_token,
        attention_width=sum(spec.num_heads * spec.head_dim for spec in module.specs),
    )


@attrs.frozen(kw_only=True)
class Decoded:
    """Steps that were measured."""

    batch: int
    context: float
    """Tokens of a sequence, in the middle of the measurement."""
    step_seconds: float
    host_seconds: float
    """Of a step, without what the host waited."""
    waits: float
    """Times that the host waited in a step."""


def decode(engine: Engine, batch: int, loads: Loads) -> Decoded:
    """Let `batch` sequences decode together; on the engine's thread."""
    with _decoding(engine, batch, loads) as device:
        synchronize(device)
        with waiting() as waited:
            started = time.perf_counter()
            tokens = sum(
                len(output.token_ids) for _ in range(loads.steps) for output in engine.step()
            )
            seconds = time.perf_counter() - started
        lengths = [len(sequence) for sequence in engine.scheduler.running]
    if tokens != loads.steps * batch:
        raise RuntimeError(f"{tokens} tokens came of {loads.steps} steps of {batch} sequences")
    return Decoded(
        batch=batch,
        context=statistics.mean(lengths) - loads.steps / 2,
        step_seconds=seconds / loads.steps,
        host_seconds=(seconds - waited.seconds) / loads.steps,
        waits=waited.count / loads.steps,
    )


def hidden_waits(engine: Engine, batch: int, loads: Loads) -> list[str]:
    """What torch says of operations in decode steps that wait for all the device has to do."""
    with _decoding(engine, batch, loads) as device:
        if device.type != "cuda":
            raise LeftOutError("the host computes here")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(loads.steps):
                    engine.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return [
        f"{Path(warning.filename).name}:{warning.lineno}"
        for warning in caught
        if SYNC_WARNING in str(warning.message)
    ]


def prefill(engine: Engine, count: int, tokens: int) -> float:
    """The median seconds for `count` prompts; on the engine's thread."""
    times = []
    for seed in range(4):
        prompts = _prompts(engine, count, tokens, seed=seed)
        started = time.perf_counter()
        drive(engine, [greedy(prompt, 1) for prompt in prompts])
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def report_decode(
    check: Check, found: Decoded, costs: Costs, limits: Limits, *, target: float | None
) -> None:
    """Tokens per second, and the part of the limit."""
    least = costs.decode_seconds(limits, batch=found.batch, context=found.context)
    part, rate = least / found.step_seconds, found.batch / found.step_seconds
    text = (
        f"{1000 * found.step_seconds:.2f} ms a step, {rate:.0f} tokens/s, "
        f"{part:.0%} of the limit of {1000 * least:.2f} ms"
    )
    numbers = {"step_seconds": found.step_seconds, "tokens_per_second": rate, "part": part}
    if target is None:
        check.say(text, **numbers)
    else:
        check.expect(part >= target, f"{text}, target {target:.0%}", **numbers)


def report_host(check: Check, found: Decoded, *, judged: bool) -> None:
    """What the host does in a step beside waiting for the device."""
    if not judged:
        raise LeftOutError("the host computes here")
    host = 1000 * found.host_seconds
    text = f"{host:.2f} ms a step, in which the host waits {found.waits:.1f} times"
    target = HOST_TARGET_MS.get(found.batch, float("inf"))
    check.expect(host < target, f"{text}, target {target:g} ms", host_ms=host, waits=found.waits)


def report_waits(check: Check, places: Sequence[str]) -> None:
    """Where decode steps wait though nobody asked them to."""
    some = ", ".join(sorted(set(places))[:8])
    check.expect(not places, f"{len(places)} waits" + (f": {some}" if some else ""))


@attrs.define
class Waited:
    """How long, and how often, the host waited for an event."""

    seconds: float = 0.0
    count: int = 0


@contextmanager
def waiting() -> Iterator[Waited]:
    """Note meanwhile what is waited for events of the device: all that the engine waits for."""
    waited, original = Waited(), torch.cuda.Event.synchronize

    def noted(event: torch.cuda.Event) -> None:
        started = time.perf_counter()
        original(event)
        waited.seconds += time.perf_counter() - started
        waited.count += 1

    with mock.patch.object(torch.cuda.Event, "synchronize", noted):
        yield waited


@contextmanager
def _decoding(engine: Engine, batch: int, loads: Loads) -> Iterator[torch.device]:
    """`batch` sequences that all decode, and go on; they are ended afterwards."""
    prompts = _prompts(engine, batch, loads.prompt, seed=batch)
    requests = [greedy(prompt, MOST_TOKENS) for prompt in prompts]
    first: set[int] = set()
    for request in requests:
        engine.add(request)
    try:
        while len(first) < batch:
            first |= {output.request_id for output in engine.step()}
        for _ in range(WARM_STEPS):
            engine.step()
        yield engine.runner.device
    finally:
        for request in requests:
            engine.abort(request.id)
        while engine.has_work:
            engine.step()


def _prompts(engine: Engine, count: int, tokens: int, *, seed: int) -> list[list[int]]:
    rng, vocab = random.Random(seed), engine.runner.model.config.vocab_size
    return [rng.choices(range(10, vocab), k=tokens) for _ in range(count)]


async def _on_engine(model: Model, function: Callable, *args: object):
    return await model.inner().thread.call(lambda engine: function(engine, *args))
