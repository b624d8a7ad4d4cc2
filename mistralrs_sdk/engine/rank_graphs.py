"""CUDA graphs of a model that several ranks hold: all capture the same steps in the same order.

What the ranks compute together is captured with the rest, so that a step is replayed by all of them
or by none. Which of the two each rank sees from the step itself: nothing is captured while serving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from mistralrs_sdk.engine.cuda_graphs import CAPTURE_SECONDS, GraphRunner, full
from mistralrs_sdk.engine.rank_channel import Channel
from mistralrs_sdk.errors import EngineClosedError, ModelLoadError


class Tell(Protocol):
    """Sends words to all other ranks."""

    def __call__(self, **words: Any) -> None: ...


def capture_as_leader(
    graphs: GraphRunner,
    others: Collection[int],
    *,
    tell: Tell,
    hear: Callable[[int, str], Mapping[str, Any]],
    failure: Callable[[], ModelLoadError | None],
) -> None:
    """Name one bucket after the other and capture it with the others, while time and room last.

    `hear` waits for the words of another rank, which have that key; `failure` says whether one of
    them ended and so let a wait here go.

    Raises:
        ModelLoadError: a rank failed, and those that wait for it cannot go on.
    """
    end = time.monotonic() + CAPTURE_SECONDS
    taken, reason = 0, ""
    for bucket in graphs.buckets:
        if taken >= graphs.max_bytes:
            reason = full(taken, graphs.max_bytes)
            break
        if time.monotonic() >= end:
            reason = f"{CAPTURE_SECONDS:g} s were over before it was captured"
            break
        tell(capture=bucket)
        try:
            graphs.capture(bucket)
            sizes = [hear(rank, "graph_bytes")["graph_bytes"] for rank in others]
        except EngineClosedError:
            raise
        except Exception as error:
            cause = error if isinstance(error, ModelLoadError) else failure()
            words = f"rank 0 failed ({type(error).__name__}: {error})" if cause is None else cause
            raise ModelLoadError(
                f"CUDA graphs of {bucket} sequences are not captured by all ranks: {words}; leave "
                "with_cuda_graphs out"
            ) from error
        taken = max(graphs.stats.num_bytes, *sizes)
    tell(capture=None, reason=reason)
    graphs.finish(reason)


def capture_as_follower(
    graphs: GraphRunner, channel: Channel, *, hear: Callable[[], Mapping[str, Any]]
) -> None:
    """Capture the buckets that rank 0 names.

    Raises:
        Exception: one fails; rank 0 is to be told so.
    """
    while (bucket := (words := hear())["capture"]) is not None:
        graphs.capture(bucket)
        channel.send(graph_bytes=graphs.stats.num_bytes)
    graphs.finish(words["reason"])
