"""The same requests answered by this package and by transformers' continuous batching."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from gpu_check_machine import give_back
from gpu_check_models import Shape, builder, checkpoint
from gpu_check_report import Book, LeftOutError

from mistralrs_sdk import Model, SamplingParams

TARGET = 3.0
"""Times as many tokens a second."""
PATIENCE = 120.0
"""Seconds to wait for transformers to finish any request."""
PAGE = 32


@attrs.frozen(kw_only=True)
class Requests:
    """Sent at once."""

    count: int
    shortest: int
    longest: int
    new: int

    def prompts(self, vocab: int, *, seed: int, count: int | None = None) -> list[list[int]]:
        """Random ones, none of them twice."""
        rng = random.Random(seed)
        return [
            rng.choices(range(10, vocab), k=rng.randint(self.shortest, self.longest))
            for _ in range(count or self.count)
        ]


FULL = Requests(count=256, shortest=32, longest=512, new=128)
TINY = Requests(count=6, shortest=8, longest=24, new=6)


async def check_peer(
    book: Book, work: Path, *, device: torch.device, shape: Shape, requests: Requests
) -> None:
    """Measure both; each answers a few requests before."""
    place = checkpoint(shape, work, device=device)
    warm = requests.prompts(shape.vocab, seed=1, count=max(2, requests.count // 8))
    prompts = requests.prompts(shape.vocab, seed=2)
    rates: dict[str, float] = {}
    with book.check("mistralrs_sdk") as check:
        made = builder(place, device=device, dtype="bf16", seqs=requests.count, prefix_cache=False)
        async with await made.build() as model:
            await answer(model, warm, requests.new)
            rates["ours"] = await answer(model, prompts, requests.new)
        check.say(f"{rates['ours']:.0f} tokens/s", tokens_per_second=rates["ours"])
    give_back(device)
    with book.check("transformers, continuous batching") as check:
        rates["theirs"], attention = await asyncio.to_thread(
            answer_by_transformers, place, warm, prompts, requests.new, device=device
        )
        check.say(
            f"{rates['theirs']:.0f} tokens/s with {attention}", tokens_per_second=rates["theirs"]
        )
    with book.check("ratio") as check:
        if len(rates) < 2:
            raise LeftOutError("one of them has no rate")
        ratio = rates["ours"] / rates["theirs"]
        if device.type == "cuda":
            check.expect(ratio >= TARGET, f"{ratio:.2f} times, target {TARGET:g}", ratio=ratio)
        else:
            check.say(f"{ratio:.2f} times", ratio=ratio)


async def answer(model: Model, prompts: Sequence[list[int]], new: int) -> float:
    """Tokens per second of all prompts sent at once.

    Raises:
        RuntimeError: an answer has another length than was asked for.
    """
    sampling = SamplingParams(top_k=1, max_len=new, ignore_eos=True)
    started = time.perf_counter()
    answers = await asyncio.gather(*(model.send_completion_request(p, sampling) for p in prompts))
    seconds = time.perf_counter() - started
    made = sum(answer.usage.completion_tokens for answer in answers)
    if made != new * len(prompts):
        raise RuntimeError(f"{made} tokens came for {new * len(prompts)}")
    return made / seconds


@torch.inference_mode()
def answer_by_transformers(
    place: Path,
    warm: Sequence[list[int]],
    prompts: Sequence[list[int]],
    new: int,
    *,
    device: torch.device,
) -> tuple[float, str]:
    """Tokens per second, and how it attends; its settings are its own, but for a CPU's sizes.

    Raises:
        RuntimeError: a request failed, or none was finished for two minutes.
    """
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16)
    model = model.to(device).eval()
    settings = ContinuousBatchingConfig()
    if device.type == "cpu":  # there its own sizes take all memory, and graphs are not there
        pages = sum(len(prompt) + new for prompt in prompts) // PAGE + 2 * len(prompts)
        settings = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages,
            max_batch_tokens=256,
            use_cuda_graph=False,
            use_async_batching=False,
        )
    generation = GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=new
    )
    with model.continuous_batching_context_manager(
        generation, continuous_batching_config=settings
    ) as manager:
        _answer_all(manager, warm, new)
        started = time.perf_counter()
        made = _answer_all(manager, prompts, new)
        seconds = time.perf_counter() - started
        attention = str(model.config._attn_implementation)
    if made != new * len(prompts):
        raise RuntimeError(f"{made} tokens came for {new * len(prompts)}")
    return made / seconds, attention


def _answer_all(manager: Any, prompts: Sequence[list[int]], new: int) -> int:
    for prompt in prompts:
        manager.add_request(list(prompt), max_new_tokens=new)
    made = 0
    for _ in prompts:
        found = manager.get_result(timeout=PATIENCE)
        if found is None or found.error:
            raise RuntimeError(found.error if found else "no request was finished")
        made += len(found.generated_tokens)
    return made
