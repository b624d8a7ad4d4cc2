"""transformers as a contender of `peers.py`: static batches, or its continuous batching."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peers_work import Answer, Ask, Load
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

PAGE = 32
"""Tokens of a page in continuous batching."""
PATIENCE = 600
"""Seconds to wait for continuous batching to finish any request."""


def start(place: str, *, threads: int, continuous: bool = False) -> Callable[[Load], list[Answer]]:
    """Load the model in float32; returns what answers a load."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    if continuous:
        return lambda load: answer_continuously(model, load)
    return lambda load: answer_in_batches(model, load)


class Clock(StoppingCriteria):
    """Notes when each token of a batch was there, and stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def answer_in_batches(model: Any, load: Load) -> list[Answer]:
    """Batches of as many requests as there are clients, each as long as its longest answer."""
    answers = []
    for first in range(0, len(load.asks), load.at_once):
        asks = load.asks[first : first + load.at_once]
        longest = max(len(ask.prompt_ids) for ask in asks)
        gaps = [longest - len(ask.prompt_ids) for ask in asks]
        sent = time.perf_counter()
        ids = torch.tensor([[0] * gap + [*a.prompt_ids] for gap, a in zip(gaps, asks, strict=True)])
        mask = torch.arange(longest) >= torch.tensor(gaps)[:, None]
        clock = Clock()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask.long(),
                max_new_tokens=max(ask.new_tokens for ask in asks),
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        answers += [
            Answer(sent=sent, arrivals=clock.times[: ask.new_tokens], tokens=ask.new_tokens)
            for ask in asks
        ]
    return answers


def answer_continuously(model: Any, load: Load) -> list[Answer]:
    """Its manager; a client sends its next request as soon as it hears that one is finished.

    Raises:
        RuntimeError: a request failed, or none was finished for ten minutes.
    """
    pages = load.at_once * (load.longest // PAGE + 2)
    settings = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=pages,
        max_batch_tokens=512,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    waiting, sent = iter(load.asks), {}
    answers: list[Answer] = []
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(
            generation, continuous_batching_config=settings, warmup=False
        ) as manager,
    ):
        for _ in range(load.at_once):
            send_next(manager, waiting, sent)
        while len(answers) < len(load.asks):
            found = manager.get_result(timeout=PATIENCE)
            if found is None or found.error:
                raise RuntimeError(found.error if found else "no request was finished")
            send_next(manager, waiting, sent)
            answers.append(
                Answer(
                    sent=sent[found.request_id],
                    arrivals=found.timestamps,
                    tokens=len(found.generated_tokens),
                )
            )
    return answers


def send_next(manager: Any, waiting: Iterator[Ask], sent: dict[str, float]) -> None:
    """Send the next request, if there is one, and note when."""
    for ask in waiting:
        now = time.perf_counter()
        name = manager.add_request(
            list(ask.prompt_ids), max_new_tokens=ask.new_tokens, record_timestamps=True
        )
        sent[name] = now
        return
