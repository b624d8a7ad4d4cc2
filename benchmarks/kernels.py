"""Products of the native kernels next to torch's, and next to what memory and arithmetic allow.

    python benchmarks/kernels.py [--shape 576x1536] [--rows 1 8] [--types Q4_1 F16] [--rounds 7]

All methods take turns on the same input; each cycles through so many copies of its weight that it
comes from memory, as in a model. Printed are medians: time of a call, billions of operations (a
multiplication and an addition are two) and weight bytes per second, and the part of the limit: the
read bandwidth or the rate of the multiplying instructions (`kernel_limits.cpp`), whichever makes a
call take longer; both are measured in the same run. Shapes are in_features x out_features.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from mistralrs_sdk.kernels import matmul, native
from mistralrs_sdk.machine import default_num_threads

SHAPES = ("768x1536", "1536x768", "768x49152", "2560x9728")
ROWS = (1, 8, 32, 512)
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
    floats: bool
    """Whether it multiplies floats."""


def read_bandwidth(rounds: int) -> float:
    """Bytes per second that all threads together read from memory."""
    values = torch.ones(64 << 20)
    times = [seconds(lambda: values.sum(), 1) for _ in range(rounds)]
    return values.nbytes / min(times)


def product_rates(rounds: int, *, threads: int) -> Mapping[bool, float]:
    """Operations per second of all threads on registers, of floats (True) and of 8-bit integers;
    infinite where this processor has no instruction for them that we know of."""
    source = Path(__file__).with_name("kernel_limits.cpp")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "limits.so"
        command = [native.find_compiler(os.environ), *native.FLAGS, str(source), "-o", str(file)]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(file))
    rates = {}
    for floats, function in ((True, library.float_products), (False, library.integer_products)):
        function.argtypes, function.restype = (ctypes.c_int64, ctypes.c_int), ctypes.c_int64
        work = partial(function, 1 << 20, threads)
        done = work()
        best = min(seconds(work, 1) for _ in range(4 * rounds))
        rates[floats] = done / best if done else float("inf")
    return rates


def native_method(ggml_type: str, n: int, k: int, *, threads: int) -> Method:
    # bytes below 64 are no infinities, wherever a scale lies; the time does not depend on them
    size = matmul.packed_bytes(ggml_type, (n, k))
    data = torch.randint(0, 64, (1 + COLD_BYTES // size, size), dtype=torch.uint8)
    copies = [matmul.PackedWeight(data=one, ggml_type=ggml_type, shape=(n, k)) for one in data]
    return Method(
        name=f"native {ggml_type}",
        calls=[lambda x, w=w: matmul.linear(x, w, num_threads=threads) for w in copies],
        num_bytes=size,
        floats=ggml_type == "F16",
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
            floats=True,
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
    fbgemm = Method(name="fbgemm f16", calls=calls, num_bytes=weight.nbytes // 2, floats=True)
    return [*methods, fbgemm]


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
    rates = product_rates(rounds, threads=threads)
    print(
        f"limits: {bandwidth / 1e9:.1f} GB/s read, {rates[False] / 1e9:.0f} GOP/s of integers, "
        f"{rates[True] / 1e9:.0f} GOP/s of floats"
    )
    for shape in shapes:
        k, n = map(int, shape.split("x"))
        methods = [native_method(name, n, k, threads=threads) for name in types]
        methods += torch_methods(n, k)
        for count in rows:
            times = measure(methods, torch.randn(count, k), rounds=rounds)
            for method, spent in zip(methods, times, strict=True):
                operations = 2 * count * n * k
                least = max(method.num_bytes / bandwidth, operations / rates[method.floats])
                print(
                    f"{shape:>10} {count:4} rows  {method.name:12} {spent * 1e6:9.0f} us "
                    f"{operations / spent / 1e9:7.1f} GOP/s {method.num_bytes / spent / 1e9:6.1f} "
                    f"GB/s {least / spent:5.0%} of the limit",
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
