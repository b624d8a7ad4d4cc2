"""Tokens per second of a model, next to what the machine allows at most.

    python benchmarks/throughput.py [MODEL] [--runs 3] [--peers]

Decoding: 1, 8 and 32 requests at once, 64 prompt tokens and 64 new ones each; the rate counts the
new tokens and the whole time. Prefill: one prompt of 512 tokens, until its first token. No prompt
repeats and the prefix cache is off. With --peers, transformers does the same in the same run, turn
by turn, with static batches.

The limits are measured in the same run. A step reads every weight once and multiplies each with
every token of the step: it takes at least weight bytes / read bandwidth, and at least 2 * weights *
tokens / FLOP/s (the head only with the tokens whose logits are used). The limit of a run is the sum
over its steps; attention is left out of it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
from load_time import can_load, peer_place
from torch.nn import functional

from mistralrs_sdk import Model, ModelBuilder, SamplingParams
from mistralrs_sdk.cli.model_flags import model_place
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.kernels.memory import reserve
from mistralrs_sdk.machine import default_num_threads

GIB = 2**30

Prompts = list[list[int]]


@attrs.frozen(kw_only=True)
class Machine:
    """What the machine does at best with this number of threads."""

    read_bandwidth: float
    """Bytes per second."""
    flops: float
    """Float32 operations per second in matrix products."""


@attrs.frozen(kw_only=True)
class Weights:
    """What a step has to read and multiply."""

    vocab_size: int
    num_bytes: int
    layer_params: int
    head_params: int

    def step_seconds(self, machine: Machine, *, tokens: int, logits: int) -> float:
        """The least time of a step over `tokens` tokens, `logits` of which reach the head."""
        operations = 2 * (self.layer_params * tokens + self.head_params * logits)
        return max(self.num_bytes / machine.read_bandwidth, operations / machine.flops)


@attrs.frozen(kw_only=True)
class Load:
    """Requests that are sent at once."""

    name: str
    count: int
    prompt_tokens: int
    new_tokens: int

    @property
    def counted_tokens(self) -> int:
        """The tokens that the rate counts: the new ones, or the prompt if only it matters."""
        return self.count * (self.new_tokens if self.new_tokens > 1 else self.prompt_tokens)

    def least_seconds(self, weights: Weights, machine: Machine) -> float:
        prompt = weights.step_seconds(
            machine, tokens=self.count * self.prompt_tokens, logits=self.count
        )
        step = weights.step_seconds(machine, tokens=self.count, logits=self.count)
        return prompt + (self.new_tokens - 1) * step


LOADS = (
    *(
        Load(name=f"decode, {n} at once", count=n, prompt_tokens=64, new_tokens=64)
        for n in (1, 8, 32)
    ),
    Load(name="prefill of 512", count=1, prompt_tokens=512, new_tokens=1),
)


def measure_machine() -> Machine:
    """Read a GiB of float32, and multiply tokens with large weights; the best of ten tries.

    The memory is of the kind that weights lie in: huge pages, where the system has them.
    """
    data = reserve(GIB).view(torch.float32).fill_(1)
    read = min(best_seconds(data.sum), best_seconds(lambda: torch.dot(data, data)))
    x, weight = torch.rand(1024, 2048), torch.rand(2048, 2048)
    product = best_seconds(lambda: functional.linear(x, weight))
    return Machine(read_bandwidth=GIB / read, flops=2 * 1024 * 2048**2 / product)


def best_seconds(function: Callable[[], Any], *, tries: int = 10) -> float:
    times = []
    for _ in range(tries):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


async def measure_weights(model: Model) -> Weights:
    """Count the weights of the layers and of the head; the embedding is only looked up."""

    def count(engine: Engine) -> Weights:
        module = engine.runner.model
        head = list((module.lm_head or module.model.embed_tokens).parameters())
        layers = list(module.model.layers.parameters())
        return Weights(
            vocab_size=module.config.vocab_size,
            num_bytes=sum(p.numel() * p.itemsize for p in layers + head),
            layer_params=sum(p.numel() for p in layers),
            head_params=sum(p.numel() for p in head),
        )

    # not public: what the weights are is the engine's business
    return await model.inner().thread.call(count)


async def generate(model: Model, prompts: Prompts, new_tokens: int) -> int:
    """Send all prompts at once; returns the number of new tokens."""
    sampling = SamplingParams(top_k=1, max_len=new_tokens, ignore_eos=True)
    answers = await asyncio.gather(*(model.send_completion_request(p, sampling) for p in prompts))
    return sum(answer.usage.completion_tokens for answer in answers)


def generate_by_transformers(peer: Any, prompts: Prompts, new_tokens: int) -> int:
    """The same as one static batch."""
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        found = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            do_sample=False,
        )
    return found.numel() - ids.numel()


def load_peer(path: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(**peer_place(path), dtype=torch.float32).eval()


async def compare(
    model: Model, peer: Any, load: Load, *, weights: Weights, runs: int
) -> tuple[list[float], list[float]]:
    """Seconds of each run, ours and the peer's, in turn; one more of each before warms up."""
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(runs + 1):
        prompts = torch.randint(10, weights.vocab_size, (load.count, load.prompt_tokens)).tolist()
        started = time.perf_counter()
        made = await generate(model, prompts, load.new_tokens)
        ours.append(time.perf_counter() - started)
        if peer is not None:
            started = time.perf_counter()
            assert generate_by_transformers(peer, prompts, load.new_tokens) == made
            theirs.append(time.perf_counter() - started)
    return ours[1:], theirs[1:]


async def benchmark(path: str, *, runs: int, threads: int, peers: bool) -> None:
    """Measure everything and print it."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    before = measure_machine()
    peer = load_peer(path) if peers else None
    builder = ModelBuilder(path).with_num_threads(threads).with_force_cpu().with_dtype("f32")
    builder = builder.with_max_num_seqs(32).with_prefix_cache_n(None)
    async with await builder.build() as model:
        weights = await measure_weights(model)
        seconds = [await compare(model, peer, load, weights=weights, runs=runs) for load in LOADS]
    after = measure_machine()
    machine = Machine(  # a neighbour may have disturbed one of them
        read_bandwidth=max(before.read_bandwidth, after.read_bandwidth),
        flops=max(before.flops, after.flops),
    )
    print(
        f"{path}, {threads} threads, float32, medians of {runs} runs; the machine reads "
        f"{machine.read_bandwidth / 1e9:.1f} GB/s and multiplies {machine.flops / 1e9:.0f} GFLOP/s"
    )
    for load, (ours, theirs) in zip(LOADS, seconds, strict=True):
        rate = load.counted_tokens / statistics.median(ours)
        limit = load.counted_tokens / load.least_seconds(weights, machine)
        line = f"{load.name:20} {rate:7.1f} tokens/s, {rate / limit:4.0%} of the limit {limit:.0f}"
        if theirs:
            peer_rate = load.counted_tokens / statistics.median(theirs)
            line += f"; transformers {peer_rate:7.1f}, ratio {rate / peer_rate:.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo", help="GGUF file, folder or demo")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="measure transformers too")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    args = parser.parse_args()
    peers = args.peers and can_load("transformers")
    asyncio.run(
        benchmark(model_place(args.model), runs=args.runs, threads=args.threads, peers=peers)
    )


if __name__ == "__main__":
    main()
