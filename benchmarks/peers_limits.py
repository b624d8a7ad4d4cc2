"""What the machine does at best, measured between the loads of `peers.py`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from throughput import best_seconds, measure_machine

ROWS, SIZE = 1024, 2048


def start(*, threads: int) -> Callable[[Any], dict[str, float]]:
    """Returns what measures, whatever the load."""
    torch.set_num_threads(threads)
    return lambda load: measure()


def measure() -> dict[str, float]:
    """Bytes read, and float32 and int8 operations of large matrix products, all per second."""
    machine = measure_machine()
    return {"read": machine.read_bandwidth, "f32": machine.flops, "int8": int8_operations()}


def int8_operations() -> float:
    """The best of torch's engines; 0 if it has none for this CPU."""
    x = torch.rand(ROWS, SIZE)
    best = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its quantised tensors will go
        weight = torch.quantize_per_tensor(torch.rand(SIZE, SIZE), 0.01, 0, torch.qint8)
        product = torch.ops.quantized.linear_dynamic
        for engine in torch.backends.quantized.supported_engines:
            try:
                torch.backends.quantized.engine = engine
                packed = torch.ops.quantized.linear_prepack(weight, None)
                seconds = best_seconds(lambda packed=packed: product(x, packed), tries=3)
            except RuntimeError:
                continue  # an engine for another CPU
            best = max(best, 2 * ROWS * SIZE**2 / seconds)
    return best
