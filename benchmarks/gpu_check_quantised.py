"""Weights that are kept quantised on a GPU: errors and times of their kernels, and decode steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from gpu_check_machine import best_seconds, give_back
from gpu_check_models import Shape, builder, checkpoint
from gpu_check_report import Book, Check, LeftOutError
from gpu_check_speed import Loads, decode
from torch import Tensor
from torch.nn import functional

from mistralrs_sdk import Model, ModelBuilder, UnsupportedError
from mistralrs_sdk.engine.cuda_graphs import GraphFactory
from mistralrs_sdk.quant import int4_groups, int8_rows
from mistralrs_sdk.quant.device_kind import DTYPE, DeviceKind, Parts
from mistralrs_sdk.quant.device_kinds import FLOAT8, INT8
from mistralrs_sdk.quant.int4_groups import Int4Groups

KINDS: tuple[tuple[DeviceKind, ModuleType | None], ...] = (
    (Int4Groups("Q4_K"), int4_groups),
    (Int4Groups("GPTQ", 128), int4_groups),
    (INT8, int8_rows),
    (FLOAT8, None),
)
"""Each with the file that says up to how many rows its kernel multiplies."""
ISQ = ("4", "8", "f8e4m3")
ROWS = (1, 8, 16, 64, 128, 256, 1024)
TOLERANCE = 1e-2
"""Of the size of a product: sums are rounded to bfloat16, twice at most."""
FULL_WEIGHT, TINY_WEIGHT = (12_288, 2048), (88, 512)
MANY = 1 << 30


async def check_quantised(
    book: Book,
    work: Path,
    *,
    device: torch.device,
    shape: Shape,
    loads: Loads,
    graphs: Callable[[], GraphFactory],
    tiny: bool,
) -> None:
    """Kernels one by one, then whole models beside the one in bfloat16."""
    for kind, home in KINDS:
        with book.check(f"kernels of {kind.name}") as check, torch.inference_mode():
            size = TINY_WEIGHT if tiny else FULL_WEIGHT
            compare(check, kind, home, size=size, device=device, graphs=graphs())
    give_back(device)
    place = checkpoint(shape, work, device=device)
    base = builder(place, device=device, dtype="bf16", seqs=max(loads.compared), prefix_cache=False)
    dense: dict[int, float] = {}
    with book.check("decode in bf16") as check:
        dense = await step_seconds(check, base, loads.compared, loads)
    for isq in ISQ:
        with book.check(f"decode with isq {isq}") as check:
            await compare_model(check, base.with_isq(isq), dense, loads)


def compare(
    check: Check,
    kind: DeviceKind,
    home: ModuleType | None,
    *,
    size: tuple[int, int],
    device: torch.device,
    graphs: GraphFactory,
) -> None:
    """Products with any number of rows against float32, their times beside bfloat16's, a graph."""
    rows, columns = size
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(size, generator=generator, device=device)
    packed = kind.pack([kind.encode(weight)])
    exact, dense = kind.to_dense(packed, rows=rows), weight.to(DTYPE)
    errors, times = [], []
    for count in ROWS:
        x = torch.randn((count, columns), generator=generator, device=device).to(DTYPE)
        errors.append(error_of(kind, packed, exact, x))
        usual = best_seconds(lambda x=x: functional.linear(x, dense), device)
        shown = []
        for name, few in (("kernel", MANY), ("dense", 0)) if home else (("kernel", 0),):
            with mock.patch.object(home, "FEW_ROWS", few) if home else nullcontext():
                seconds = best_seconds(
                    lambda x=x: kind.multiply(x, packed, rows=rows, bias=None), device
                )
            shown.append(f"{name} {usual / seconds:.2f}")
            check.numbers[f"{name}_{count}"] = usual / seconds
        times.append(f"{count} rows {' '.join(shown)}")
    worst = max([*errors, graph_error(kind, packed, exact, graphs, columns=columns)])
    check.expect(worst < TOLERANCE, f"errors up to {worst:.1e}, in a graph too", error=worst)
    check.say("speed as a multiple of bf16's: " + ", ".join(times))


def error_of(kind: DeviceKind, packed: Parts, exact: Tensor, x: Tensor) -> float:
    """Of a product, as a part of its size."""
    return _distance(
        kind.multiply(x, packed, rows=len(exact), bias=None), kind.inputs(x) @ exact.t()
    )


def graph_error(
    kind: DeviceKind, packed: Parts, exact: Tensor, graphs: GraphFactory, *, columns: int
) -> float:
    """Of a product that is captured for some inputs, and replayed for others."""
    x = torch.zeros((4, columns), dtype=DTYPE, device=exact.device)

    def step() -> Tensor:
        return kind.multiply(x, packed, rows=len(exact), bias=None)

    graphs.warm_up(step)
    graph = graphs.capture(step)
    x.copy_(torch.randn(x.shape, device=x.device))
    graph.replay()
    return _distance(graph.output, kind.inputs(x) @ exact.t())


async def compare_model(
    check: Check, made: ModelBuilder, dense: dict[int, float], loads: Loads
) -> None:
    """Decode steps as a multiple of bfloat16's speed."""
    if not dense:
        raise LeftOutError("there is nothing to compare with")
    try:
        found = await step_seconds(check, made, tuple(dense), loads)
    except UnsupportedError as error:
        raise LeftOutError(str(error)) from error
    for batch, seconds in found.items():
        ratio = dense[batch] / seconds
        check.say(f"{batch} at once: {ratio:.2f} of bf16's speed", **{f"ratio_{batch}": ratio})


async def step_seconds(
    check: Check, made: ModelBuilder, batches: Sequence[int], loads: Loads
) -> dict[int, float]:
    """The seconds of a decode step, by the number of sequences; steps must be replayed."""
    found = {}
    async with await made.build() as model:
        info = model.inner().info
        check.say(f"{info.weight_bytes / 2**30:.2f} GiB, loaded in {info.load_seconds:.1f} s")
        for batch in batches:
            measured = await model.inner().thread.call(
                lambda engine, batch=batch: decode(engine, batch, loads)
            )
            found[batch] = measured.step_seconds
            check.say(f"{batch} at once {1000 * measured.step_seconds:.2f} ms a step")
        await report_replays(check, model)
    return found


async def report_replays(check: Check, model: Model) -> None:
    """Decode steps were replayed, and no size has lost its graph."""
    runner: Any = await model.inner().thread.call(lambda engine: engine.runner)
    if runner.graphs is None:
        check.say("no graphs: FlashInfer does not attend")
        return
    stats = runner.graphs.stats
    check.expect(stats.replayed > 0 and not stats.disabled, f"{stats.replayed} steps replayed")


def _distance(found: Tensor, exact: Tensor) -> float:
    error = (found.float() - exact).norm() / exact.norm()
    return float(error.nan_to_num(nan=float("inf")))
