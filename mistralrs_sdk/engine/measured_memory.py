"""What the largest step really takes on a GPU: a pass over made-up sequences, measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
import torch

from mistralrs_sdk.engine.request import Request, SampledToken
from mistralrs_sdk.engine.scheduler import Scheduled
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from mistralrs_sdk.engine.sequence import Status
from mistralrs_sdk.errors import ModelLoadError
from mistralrs_sdk.machine import is_out_of_memory
from mistralrs_sdk.sampling_params import SamplingParams

_TOKEN = 0
_SAMPLING = SamplingParams(
    temperature=1.0,
    top_k=0,
    top_p=0.9,  # so that tokens are ranked, which takes most
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
)


class PeakMeter(Protocol):
    """Measures the memory of a device."""

    def start(self) -> None:
        """Count from what is in use now."""

    def peak(self) -> int:
        """The most bytes that were in use since, beyond those."""
        ...


@attrs.define
class CudaMeter:
    """Counts what torch's allocator handed out: by any thread, so that a busy neighbour counts."""

    device: torch.device
    _before: int = 0

    def start(self) -> None:
        self._wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        self._wait()
        return max(torch.cuda.max_memory_allocated(self.device) - self._before, 0)

    def _wait(self) -> None:
        # The stream, not the device: that must not be waited for while somebody captures a graph.
        torch.cuda.current_stream(self.device).synchronize()


def measure_largest_step(
    run: Callable[[Sequence[Scheduled]], Sequence[SampledToken | None]],
    meters: Mapping[torch.device, PeakMeter],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    num_tokens: int,
    block_size: int,
    device: torch.device,
) -> dict[torch.device, int]:
    """Bytes the largest step takes beside weights and cache, on each device.

    `run` computes a step over a cache that needs no other block than the null block, where all
    keys and values of the pass go. `num_tokens` is what the pool is planned to hold, all sequences
    together; `device` is the model's. The pass runs twice: what libraries set up at first use stays
    theirs, and is not counted.

    Raises:
        ModelLoadError: the pass runs out of memory.
    """
    step = largest_step(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        num_tokens=num_tokens,
        block_size=block_size,
    )
    try:
        run(step)
        for meter in meters.values():
            meter.start()
        run(step)
        return {place: meter.peak() for place, meter in meters.items()}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelLoadError(
            f"a step of {sum(item.num_tokens for item in step)} tokens of {len(step)} sequences "
            f"does not fit on {device} beside the weights ({error}): lower "
            "max_num_batched_tokens, max_prefill_chunk_tokens, max_num_seqs or max_model_len"
        ) from error


def largest_step(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    num_tokens: int,
    block_size: int,
) -> list[Scheduled]:
    """The step that takes most: every sequence draws a token, and prompts take what is left.

    One prompt ends at the longest length; the sequences that decode share the pool's tokens evenly.
    """
    decoding = max_num_seqs - 1
    left = max(max_num_batched_tokens - decoding, 1)
    items = []
    while left > 0 and len(items) < max_num_seqs:
        rows = min(left, max_model_len)
        items.append(_scheduled(len(items), rows, max_model_len, block_size=block_size))
        left -= rows
    length = min(max(num_tokens // max_num_seqs, 1), max_model_len)
    while len(items) < max_num_seqs:
        items.append(_scheduled(len(items), 1, length, block_size=block_size))
    return items


def _scheduled(number: int, rows: int, length: int, *, block_size: int) -> Scheduled:
    """The last `rows` tokens of a sequence of `length`, all in the null block."""
    prompt = (_TOKEN,) * length
    request = Request(id=-1 - number, prompt_ids=prompt, sampling=_SAMPLING, max_tokens=1)
    sequence = EngineSequence.from_request(-1 - number, request, 0)
    sequence.status = Status.DECODE if rows == 1 else Status.PREFILL
    sequence.num_computed_tokens = length - rows
    sequence.blocks = [0] * -(-length // block_size)
    return Scheduled(sequence, rows)
