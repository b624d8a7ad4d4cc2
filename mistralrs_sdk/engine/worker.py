"""Ranks above 0 of a tensor-parallel model: they compute their share of what rank 0 tells them."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, cast

import attrs
import torch

from mistralrs_sdk._version import __version__
from mistralrs_sdk.attention.backend import BatchLists
from mistralrs_sdk.config import EngineConfig, ModelSource
from mistralrs_sdk.distributed import TensorParallel
from mistralrs_sdk.engine.build import build_engine
from mistralrs_sdk.engine.model_runner import ModelRunner
from mistralrs_sdk.engine.rank_channel import Channel
from mistralrs_sdk.engine.rank_graphs import capture_as_follower
from mistralrs_sdk.engine.rank_meeting import Meeting, device_of, file_store, join
from mistralrs_sdk.engine.rank_place import RankPlace
from mistralrs_sdk.engine.rank_processes import RankTask, start_neighbours
from mistralrs_sdk.engine.rank_terms import (
    CLOSE_TIMEOUT_S,
    NOTICE_S,
    fingerprint,
    in_step,
    with_pool,
)
from mistralrs_sdk.engine.settle import Settled
from mistralrs_sdk.errors import EngineClosedError, EngineDeadError, MistralRsError
from mistralrs_sdk.loading.loader import open_checkpoint
from mistralrs_sdk.plan import MemoryPlan

_PARENT_POLL_S = 0.5


def serve_place(place: RankPlace, source: ModelSource, config: EngineConfig) -> None:
    """Be the rank at `place`, which is not 0, until rank 0 closes its model.

    Starts the other ranks of this machine first, if that is this one's part.

    Raises:
        MistralRsError: it could not load, or rank 0 ended without closing.
    """
    meeting = Meeting.of(place)
    neighbours = start_neighbours(place, source, config, meeting=meeting.number)
    try:
        serve(place, source, config, channel=meeting.connect(), store=meeting.store)
    finally:
        for process in neighbours:
            process.end(CLOSE_TIMEOUT_S)


def serve(
    place: RankPlace, source: ModelSource, config: EngineConfig, *, channel: Channel, store: Any
) -> None:
    """The same with a connection to rank 0."""
    follower = Follower(place, channel)
    try:
        follower.join(config, store)
        engine, _ = build_engine(open_checkpoint(source, progress=False), config, link=follower)
        runner = cast(ModelRunner, engine.runner)
        del engine
        follow(runner, follower.next_step)
    except EngineClosedError:
        return
    except Exception as error:
        collective = isinstance(error, RuntimeError)  # perhaps, and let go because of that
        if isinstance(error, EOFError) or (collective and follower.has_lost_rank_0()):
            raise EngineDeadError(
                f"rank 0 of {place.size} ended without closing its model, or its machine is gone: "
                "its own output says more"
            ) from error
        kind = "" if isinstance(error, MistralRsError) else f"{type(error).__name__}: "
        with contextlib.suppress(OSError):
            channel.send(rank=place.rank, failed=f"{kind}{error}")
        raise
    finally:
        follower.close()


def follow(runner: ModelRunner, next_step: Callable[[], BatchLists]) -> None:
    """Compute one step after the other; `next_step` raises when there is no more."""
    while True:
        runner.forward(next_step())


class Follower:
    """Rank 0, as another rank sees it."""

    parallel: TensorParallel
    device: torch.device

    def __init__(self, place: RankPlace, channel: Channel) -> None:
        self._place = place
        self._channel = channel
        self._gone = threading.Event()

    def join(self, config: EngineConfig, store: Any) -> None:
        """Come to rank 0, and join the group with the others."""
        self.device = device_of(config.device, self._place)
        self._channel.send(rank=self._place.rank, version=__version__, device=self.device.type)
        terms = self._hear()
        self.parallel = join(
            self._place,
            device=self.device,
            store=store,
            address=self._channel.local_address or terms["address"],
            nccl_id=terms["nccl_id"],
        )
        self._channel.watch(self._note)

    def agree(self, settled: Settled) -> MemoryPlan:
        """Tell rank 0 what fits here, and take what fits everywhere."""
        plan = settled.plan
        self._channel.send(
            fingerprint=fingerprint(settled),
            num_blocks=plan.num_blocks,
            max_model_len=plan.max_model_len,
        )
        terms = self._hear()
        context = settled.model.config.max_position_embeddings
        return with_pool(plan, terms["num_blocks"], terms["max_model_len"], context)

    def ready(self, runner: ModelRunner) -> ModelRunner:
        """Tell rank 0 that the weights are read, and capture the steps it names."""
        self._channel.send(ready=True)
        graphs = in_step(runner).graphs
        if graphs is not None:
            capture_as_follower(graphs, self._channel, hear=self._hear)
        return runner

    def next_step(self) -> BatchLists:
        """Wait for the next step.

        Raises:
            EngineClosedError: rank 0 closed its model.
            EOFError: rank 0 is gone.
        """
        message = self._channel.receive()
        if isinstance(message, BatchLists):
            return message
        raise EngineClosedError("rank 0 closed its model")

    def has_lost_rank_0(self) -> bool:
        """Whether a step failed because rank 0 is gone, which may take a moment to be seen."""
        return hasattr(self, "parallel") and self._gone.wait(NOTICE_S)

    def close(self) -> None:
        """Leave the group and the connection."""
        self._channel.close()

    def _note(self) -> None:
        self._gone.set()
        group = self.parallel.group
        assert group is not None, "joined"
        group.abort()

    def _hear(self) -> Mapping[str, Any]:
        message = self._channel.receive()
        assert isinstance(message, Mapping), "no step comes before all are ready"
        if "close" in message:
            raise EngineClosedError("rank 0 closed its model")
        return message


def main() -> None:
    """The program of a rank that another process starts; its task stands on standard input."""
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    code = 0
    try:
        task = cast(RankTask, pickle.load(sys.stdin.buffer))
        if task.connection is None:
            meeting = Meeting.of(task.place, number=task.meeting)
            channel, store = meeting.connect(), meeting.store
        else:
            channel = Channel(socket.socket(fileno=task.connection))
            store = file_store(str(task.store), task.place.size)
        config = attrs.evolve(task.config, throughput_logging=False)
        serve(task.place, task.source, config, channel=channel, store=store)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of torch and of NCCL may wait for what is gone


def _end_with_parent(parent: int) -> None:
    """End this process when the one that started it has gone, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)
