"""The native kernels next to torch, and next to what memory and arithmetic allow.

    python benchmarks/kernels.py [--only linear attention] [--rows 1 8] [--types Q4_1 F16]

All ways to do the same take turns; each cycles through so many copies of what it reads that it
comes from memory, as a weight in a model. Printed is a Markdown table of medians: time of a call,
bytes (weights, keys, or all that is read and written) and operations per second (a multiplication
and an addition are two), the part of the limit, and for native kernels how often they are as fast
as the best other way, the median of the rounds' ratios. The limit is the read bandwidth of huge
pages or the rate of the multiplying instructions (`kernel_limits.cpp`), whichever makes a call take
longer; both are measured in the same run. A kernel whose operations nobody counted has no limit.
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

import torch
from kernels_cases import Case, Method
from kernels_layers import adapters, attention, elementwise, products
from kernels_tokens import sampling, searches

from mistralrs_sdk.kernels import matmul, native
from mistralrs_sdk.kernels.memory import reserve
from mistralrs_sdk.machine import default_num_threads

SHAPES = ("768x1536", "1536x768", "768x49152", "2560x9728")
ROWS = (1, 8, 32, 512)
ROUND_SECONDS = 0.01
HEADER = """\
| kernel | by | us | GB/s | GOP/s | of limit | to best other |
| --- | --- | ---: | ---: | ---: | ---: | ---: |"""

Rates = Mapping[bool, float]
"""Operations per second, of floats (True) and of 8-bit integers."""


def read_bandwidth(rounds: int) -> float:
    """Bytes per second that all threads together read from huge pages at best."""
    values = reserve(1 << 28).view(torch.float32).fill_(1)
    ways = (values.sum, lambda: torch.dot(values, values))
    return values.nbytes / min(seconds(way, 1) for _ in range(rounds) for way in ways)


def product_rates(rounds: int, *, threads: int) -> Rates:
    """Operations per second of all threads on registers; infinite where this processor has no
    instruction for them that we know of."""
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


def seconds(call: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def measure(methods: Sequence[Method], *, rounds: int) -> list[list[float]]:
    """Seconds of a call of each method, one number a round."""
    turns = [0] * len(methods)

    def one(index: int) -> object:
        calls = methods[index].calls
        turns[index] += 1
        return calls[turns[index] % len(calls)]()

    counts = []
    for index in range(len(methods)):
        one(index)
        once = seconds(lambda index=index: one(index), 1)
        counts.append(max(1, int(ROUND_SECONDS / once)))
    times: list[list[float]] = [[] for _ in methods]
    for _ in range(rounds):
        for index, count in enumerate(counts):
            times[index].append(seconds(lambda index=index: one(index), count))
    return times


def report(
    case: Case, times: Sequence[Sequence[float]], *, bandwidth: float, rates: Rates
) -> list[str]:
    """A line of the table for each method of a case."""
    others = [spent for method, spent in zip(case.methods, times, strict=True) if method.peer]
    best = min(others, key=statistics.median, default=None)
    lines = []
    for method, spent in zip(case.methods, times, strict=True):
        middle = statistics.median(spent)
        least = max(method.num_bytes / bandwidth, method.operations / rates[method.floats])
        ratio = ""
        if best is not None and not method.peer:
            ratios = [theirs / ours for theirs, ours in zip(best, spent, strict=True)]
            ratio = f"{statistics.median(ratios):.2f}"
        lines.append(
            f"| {case.name} | {method.name} | {middle * 1e6:.1f} "
            f"| {_billions(method.num_bytes / middle)} | {_billions(method.operations / middle)} "
            f"| {f'{least / middle:.0%}' if least else ''} | {ratio} |"
        )
    return lines


def _billions(rate: float) -> str:
    return f"{rate / 1e9:.1f}" if rate else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="starts of kernels' names")
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="in_features x out_features")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="of products")
    parser.add_argument("--types", nargs="+", default=matmul.PACKABLE, choices=matmul.PACKABLE)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=default_num_threads())
    options = parser.parse_args()
    if not native.available():
        parser.exit(1, f"there is nothing to measure: {native.reason()}\n")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rounds = options.rounds
    bandwidth = read_bandwidth(rounds)
    rates = product_rates(rounds, threads=options.threads)
    print(
        f"{native.reason()}, {options.threads} threads, medians of {rounds} rounds. Limits: "
        f"{bandwidth / 1e9:.1f} GB/s read, {rates[False] / 1e9:.0f} GOP/s of integers, "
        f"{rates[True] / 1e9:.0f} GOP/s of floats.\n\n{HEADER}"
    )
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape]
    groups = {
        "linear": lambda: products(shapes, rows=options.rows, types=options.types),
        "attention": attention,
        "elementwise": elementwise,
        "adapters": adapters,
        "sampling": sampling,
        "search": searches,
    }
    for name, cases in groups.items():
        if not name.startswith(tuple(options.only)):
            continue
        for case in cases():
            times = measure(case.methods, rounds=rounds)
            lines = report(case, times, bandwidth=bandwidth, rates=rates)
            print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
