"""Products of the native kernels next to torch's, and next to what memory and arithmetic allow.

    python benchmarks/kernels.py [--shape 576x1536] [--rows 1 8] [--types Q4_1 F16] [--rounds 7]

All methods take turns on the same input; each cycles through so many copies of its weight that it
comes from memory, as in a model. Printed are medians: time of a call, billions of operations (a
multiplication and an addition are two) and weight bytes per second, and the part of the read
bandwidth measured in the same run. Shapes are in_features x out_features.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from mistralrs_sdk.kernels import matmul, native
from mistralrs_sdk.machine import default_num_threads
from mistralrs_sdk.quant.ggml import GGML_TYPES

SHAPES = ("576x1536", "1536x576", "576x960", "576x49152", "2560x9728")
ROWS = (1, 2, 8, 32, 128, 512)
COLD_BYTES = 96 << 20
"""Weights of one method together: several times what a cache holds."""
ROUND_SECONDS = 0.01


@attrs.frozen(kw_only=True)
class Method:
    """A way to multiply: a call per copy of the weight."""

    name: str
    calls: Sequence[Callable[[Tensor], Tensor]]
    num_bytes: int
    """Of one copy."""


def read_bandwidth(rounds: int) -> float:
    """Bytes per second that all threads together read from memory."""
    values = torch.ones(64 << 20)
    times = [seconds(lambda: values.sum(), 1) for _ in range(rounds)]
    return values.nbytes / min(times)


def native_method(ggml_type: str, n: int, k: int, *, threads: int) -> Method:
    kind = next(kind for kind in GGML_TYPES.values() if kind.name == ggml_type)
    if ggml_type == "F16":
        raw = (torch.randn(n, k) * 0.02).half()
    else:
        blocks = torch.randint(0, 256, (n * k // kind.block_size, kind.block_bytes))
        raw = blocks.to(torch.uint8)
        scales = torch.full((len(raw), 2), 0.01, dtype=torch.float16).view(torch.uint8)
        width = 4 if ggml_type == "Q4_1" else 2
        raw[:, :width] = scales[:, :width]
    first = matmul.pack(raw, ggml_type, (n, k))
    copies = [first]
    while len(copies) * first.num_bytes < COLD_BYTES:
        copies.append(attrs.evolve(first, data=first.data.clone()))
    return Method(
        name=f"native {ggml_type}",
        calls=[lambda x, w=w: matmul.linear(x, w, num_threads=threads) for w in copies],
        num_bytes=first.num_bytes,
    )


def torch_methods(n: int, k: int) -> list[Method]:
    """F.linear in float32, and fbgemm's float16 product where this torch has it."""
    weight = torch.randn(n, k) * 0.02
    copies = [weight.clone() for _ in range(1 + COLD_BYTES // weight.nbytes)]
    methods = [
        Method(
            name="torch f32",
            calls=[lambda x, w=w: functional.linear(x, w) for w in copies],
            num_bytes=weight.nbytes,
        )
    ]
    try:
        packed = [
            torch.ops.quantized.linear_prepack_fp16(weight, None)
            for _ in range(1 + COLD_BYTES * 2 // weight.nbytes)
        ]
    except (RuntimeError, AttributeError):
        return methods  # built without fbgemm
    product = torch.ops.quantized.linear_dynamic_fp16
    calls = [lambda x, w=w: product(x, w) for w in packed]
    return [*methods, Method(name="fbgemm f16", calls=calls, num_bytes=weight.nbytes // 2)]


def seconds(call: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def measure(methods: Sequence[Method], x: Tensor, *, rounds: int) -> list[float]:
    """Median seconds of a call of each method."""
    turns = [0] * len(methods)

    def one(index: int) -> Tensor:
        calls = methods[index].calls
        turns[index] += 1
        return calls[turns[index] % len(calls)](x)

    counts = []
    for index in range(len(methods)):
        one(index)
        once = seconds(lambda index=index: one(index), 1)
        counts.append(max(1, int(ROUND_SECONDS / once)))
    times: list[list[float]] = [[] for _ in methods]
    for _ in range(rounds):
        for index, count in enumerate(counts):
            times[index].append(seconds(lambda index=index: one(index), count))
    return [statistics.median(spent) for spent in times]


def benchmark(
    shapes: Sequence[str],
    rows: Sequence[int],
    types: Sequence[str],
    *,
    rounds: int,
    threads: int,
) -> None:
    """Measure every shape and row count and print a line for each method."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    bandwidth = read_bandwidth(rounds)
    print(f"kernels: {native.reason()}; {threads} threads, medians of {rounds} rounds")
    print(f"read bandwidth: {bandwidth / 1e9:.1f} GB/s")
    for shape in shapes:
        k, n = map(int, shape.split("x"))
        methods = [native_method(name, n, k, threads=threads) for name in types]
        methods += torch_methods(n, k)
        for count in rows:
            times = measure(methods, torch.randn(count, k), rounds=rounds)
            for method, spent in zip(methods, times, strict=True):
                read = method.num_bytes / spent
                print(
                    f"{shape:>10} {count:4} rows  {method.name:12} {spent * 1e6:9.0f} us "
                    f"{2 * count * n * k / spent / 1e9:7.1f} GOP/s {read / 1e9:6.1f} GB/s "
                    f"{read / bandwidth:5.0%} of the bandwidth",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="in_features x out_features")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--types", nargs="+", default=matmul.PACKABLE, choices=matmul.PACKABLE)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=default_num_threads())
    options = parser.parse_args()
    if not native.available():
        parser.exit(1, f"there is nothing to measure: {native.reason()}\n")
    benchmark(
        options.shape,
        options.rows,
        options.types,
        rounds=options.rounds,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
