"""Rank 0 of a tensor-parallel model: it starts the others, tells them each step, and ends them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from mistralrs_sdk._version import __version__
from mistralrs_sdk.config import EngineConfig, ModelSource
from mistralrs_sdk.distributed import TensorParallel, nccl_unique_id
from mistralrs_sdk.engine.leading_runner import LeadingRunner
from mistralrs_sdk.engine.model_runner import ModelRunner, lay_out
from mistralrs_sdk.engine.rank_channel import Channel
from mistralrs_sdk.engine.rank_graphs import capture_as_leader
from mistralrs_sdk.engine.rank_meeting import MEETING_TIMEOUT, Meeting, device_of, file_store, join
from mistralrs_sdk.engine.rank_place import RankPlace, place_of, refuse_without_nccl
from mistralrs_sdk.engine.rank_processes import RankProcess, RankTask, start_neighbours
from mistralrs_sdk.engine.rank_terms import (
    CLOSE_TIMEOUT_S,
    NOTICE_S,
    fingerprint,
    in_step,
    with_pool,
)
from mistralrs_sdk.engine.scheduler import Scheduled
from mistralrs_sdk.engine.settle import Settled
from mistralrs_sdk.errors import ConfigError, EngineClosedError, ModelLoadError
from mistralrs_sdk.models import read_config
from mistralrs_sdk.models.parallel import share_of
from mistralrs_sdk.plan import MemoryPlan

logger = logging.getLogger("mistralrs_sdk.engine")

_POLL_S = 0.1
_KNOCK_S = 30.0
"""How long who connects may take to say which rank it is."""


class RankLost(BaseException):  # no Exception: the engine ends with it, not one step
    """Another rank ended, or no longer does what rank 0 does: nothing can be computed any more."""


class RankLink(Protocol):
    """What building an engine asks of the other ranks, on rank 0 and on the others."""

    parallel: TensorParallel
    device: torch.device

    def agree(self, settled: Settled) -> MemoryPlan:
        """The plan for the KV pool that fits on every rank."""
        ...

    def ready(self, runner: ModelRunner) -> ModelRunner | LeadingRunner:
        """The weights are read and the cache is there: what the engine is to step."""
        ...

    def close(self) -> None:
        """Nothing more is computed."""


def lead(
    source: ModelSource | None,
    hf_config: Mapping[str, Any],
    config: EngineConfig,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> Leader:
    """Bring the ranks of a model together, as the environment says; for rank 0.

    `source` is where ranks that are started here read the weights, `hf_config` the model's config.

    Raises:
        ConfigError: the model or the environment does not suit `config.tensor_parallel`.
        ModelLoadError: a rank does not come, or they do not reach each other.
        EngineClosedError: `cancelled` said so.
    """
    assert source is not None, "what is started must read the weights, too"
    place = place_of(os.environ, config.tensor_parallel)
    if place.rank:
        raise ConfigError(
            f"this process is rank {place.rank} of {place.size}: call "
            "mistralrs_sdk.serve_rank(builder) before build(), which computes for rank 0 until "
            "that closes its model, and returns True then; on rank 0 it returns False at once"
        )
    share_of(read_config(hf_config), TensorParallel(0, place.size))  # before anything is started
    device = device_of(config.device, place)
    if device.type == "cuda":
        refuse_without_nccl(os.environ, place.size)
    leader = Leader(place, device)
    try:
        leader.gather(source, config, cancelled=cancelled)
    except BaseException:
        leader.close()
        raise
    return leader


class Leader:
    """The other ranks, as rank 0 sees them. For one thread; watching threads only take notes."""

    parallel: TensorParallel

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self.device = device
        self._place = place
        self._channels: dict[int, Channel] = {}
        self._processes: dict[int, RankProcess] = {}
        self._cleanup = contextlib.ExitStack()
        self._cancelled: Callable[[], bool] = lambda: False
        self._gone: list[int] = []
        """The ranks whose connections were seen to end, in that order."""
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the ranks that were started here."""
        return tuple(process.pid for process in self._processes.values())

    def gather(
        self, source: ModelSource, config: EngineConfig, *, cancelled: Callable[[], bool]
    ) -> None:
        """Start ranks or wait for them, then join the group with them."""
        self._cancelled = cancelled
        if self._place.meeting is None:
            store = self._start_all(source, config)
        else:
            store = self._meet(source, config)
        address = next(filter(None, (c.local_address for c in self._channels.values())), None)
        address = address or "127.0.0.1"
        nccl_id = nccl_unique_id().hex() if self.device.type == "cuda" else None
        self._tell(address=address, nccl_id=nccl_id)
        try:
            self.parallel = join(
                self._place, device=self.device, store=store, address=address, nccl_id=nccl_id
            )
        except ModelLoadError as error:
            theirs = self._failure()
            if theirs is None:
                raise
            raise theirs from error

    def agree(self, settled: Settled) -> MemoryPlan:
        """Take the smallest pool and context of all ranks, and refuse unlike settings."""
        plan, print_ = settled.plan, fingerprint(settled)
        found = {rank: self._hear(rank, "fingerprint") for rank in self._channels}
        for rank, words in found.items():
            if words["fingerprint"] != print_:
                raise ConfigError(
                    f"rank {rank} runs another model or other settings than rank 0 "
                    f"({words['fingerprint']}, {print_}): give all ranks the same builder, and "
                    "the same files"
                )
        blocks = min(plan.num_blocks, *(words["num_blocks"] for words in found.values()))
        length = min(plan.max_model_len, *(words["max_model_len"] for words in found.values()))
        self._tell(num_blocks=blocks, max_model_len=length)
        return with_pool(plan, blocks, length, settled.model.config.max_position_embeddings)

    def ready(self, runner: ModelRunner) -> LeadingRunner:
        """Wait until the others have read their weights, too, and capture graphs with them."""
        for rank in self._channels:
            self._hear(rank, "ready")
        graphs = in_step(runner).graphs
        if graphs is not None:
            # NCCL does not end while there are graphs that captured its calls.
            self._cleanup.callback(graphs.clear)
            capture_as_leader(
                graphs, self._channels, tell=self._tell, hear=self._hear, failure=self._failure
            )
        return LeadingRunner(runner, self)

    def send_step(self, scheduled: Sequence[Scheduled], *, block_size: int | None) -> None:
        """Let the others compute a step.

        Raises:
            RankLost: one of them is gone.
        """
        lists = lay_out(scheduled, block_size=block_size)
        try:
            for channel in self._channels.values():
                channel.send_step(lists)
        except OSError as error:
            raise self.lost(error) from error

    @property
    def has_lost(self) -> bool:
        """Whether a rank was seen to end."""
        return bool(self._gone)

    def lost(self, error: BaseException | None = None) -> RankLost:
        """What to raise now that a rank is gone, or that rank 0 failed where the others wait."""
        deadline = time.monotonic() + NOTICE_S
        while not self._gone and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
        size = self._place.size
        if self._gone:
            words = f"rank {self._gone[0]} of {size} {self._last_words(self._gone[0])}"
        else:
            words = (
                f"rank 0 of {size} failed in a step ({type(error).__name__}: {error}), and the "
                "others wait for it in vain"
            )
        self.close()
        return RankLost(words)

    def close(self) -> None:
        """End all ranks; those that do not end by themselves are killed."""
        if self._closed:
            return
        self._closed = True
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.send(close=True)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self._processes.values():
            process.end(max(deadline - time.monotonic(), 0.1))
        for channel in self._channels.values():
            channel.close()
        self._cleanup.close()

    def _start_all(self, source: ModelSource, config: EngineConfig) -> Any:
        """Start all other ranks on this machine; they meet in a file that only they see."""
        folder = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="mistralrs-"))
        file = Path(folder) / "store"
        for rank in self._place.starts:
            own, theirs = socket.socketpair()
            self._channels[rank] = Channel(own)
            with theirs:
                task = RankTask(
                    place=self._place.of(rank),
                    source=source,
                    config=config,
                    connection=theirs.fileno(),
                    store=str(file),
                )
                self._processes[rank] = RankProcess(task)
        for rank, channel in self._channels.items():
            channel.watch(self._note(rank))
            self._check_arrival(rank, self._hear(rank, "rank"))
        return file_store(str(file), self._place.size)

    def _meet(self, source: ModelSource, config: EngineConfig) -> Any:
        """Wait for ranks that come by themselves, some of them perhaps started here."""
        meeting = Meeting.of(self._place)
        with meeting.listen() as listener:
            for process in start_neighbours(self._place, source, config, meeting=meeting.number):
                self._processes[process.rank] = process
            deadline = time.monotonic() + MEETING_TIMEOUT.total_seconds()
            while len(self._channels) < self._place.size - 1:
                self._check_coming(deadline)
                listener.settimeout(_POLL_S)
                with contextlib.suppress(TimeoutError):
                    self._welcome(Channel(listener.accept()[0]))
        return meeting.store

    def _welcome(self, channel: Channel) -> None:
        """Take in who knocked, if it is a rank that is expected."""
        try:
            message = channel.receive(timeout=_KNOCK_S)
        except (EOFError, ValueError):
            message = {}
        words = message if isinstance(message, Mapping) else {}
        rank = words.get("rank")
        expected = isinstance(rank, int) and 0 < rank < self._place.size
        if not expected or rank in self._channels:
            logger.warning("a connection that is no rank of this model was closed")
            channel.close()
            return
        assert isinstance(rank, int)
        self._channels[rank] = channel
        channel.watch(self._note(rank))
        self._check_arrival(rank, words)

    def _check_coming(self, deadline: float) -> None:
        if self._cancelled():
            raise EngineClosedError("the model was closed while it was loading")
        for rank, process in self._processes.items():
            if process.has_ended and rank not in self._channels:
                raise self._failed(rank, "")
        if time.monotonic() > deadline:
            missing = sorted({*range(1, self._place.size)} - self._channels.keys())
            raise ModelLoadError(
                f"ranks {missing} of {self._place.size} did not come within "
                f"{MEETING_TIMEOUT.total_seconds():.0f} s: start one process for each, with the "
                "same builder, and let it call serve_rank(builder)"
            )

    def _check_arrival(self, rank: int, words: Mapping[str, Any]) -> None:
        """Refuse a rank that could not come, or would wait in another kind of group."""
        if "failed" in words:
            raise self._failed(rank, str(words["failed"]))
        if words.get("version") != __version__:
            raise ModelLoadError(
                f"rank {rank} has mistralrs_sdk {words.get('version')} and rank 0 has "
                f"{__version__}: install the same everywhere"
            )
        if words.get("device") != self.device.type:
            raise ConfigError(
                f"rank {rank} would compute on {words.get('device')} and rank 0 on "
                f"{self.device.type}: choose one for all with with_device or with_force_cpu"
            )

    def _note(self, rank: int) -> Callable[[], None]:
        """What the thread that watches a rank calls when it has gone."""
        leader = weakref.ref(self)

        def gone() -> None:
            found = leader()
            if found is None or found._closed:
                return
            found._gone.append(rank)
            parallel = getattr(found, "parallel", None)
            if parallel is not None:
                parallel.group.abort()

        return gone

    def _tell(self, **words: Any) -> None:
        for rank, channel in self._channels.items():
            try:
                channel.send(**words)
            except OSError as error:
                raise self._failure() or self._failed(rank, str(error)) from error

    def _hear(self, rank: int, key: str) -> Mapping[str, Any]:
        """Wait for the next message of a rank that is loading; it must have this key."""
        channel = self._channels[rank]
        while not channel.has_message(_POLL_S):
            if self._cancelled():
                raise EngineClosedError("the model was closed while it was loading")
        try:
            words = channel.receive()
        except EOFError as error:
            raise self._failed(rank, str(error)) from error
        assert isinstance(words, Mapping), "ranks send no steps"
        if "failed" in words or key not in words:
            raise self._failed(rank, str(words.get("failed", words)))
        return words

    def _failure(self) -> ModelLoadError | None:
        """What another rank says that has ended, and so may have let a wait of this one go."""
        for rank, channel in self._channels.items():
            if not channel.has_message(NOTICE_S):
                continue
            try:
                words = channel.receive()
            except EOFError as error:
                return self._failed(rank, str(error))
            if isinstance(words, Mapping) and "failed" in words:
                return self._failed(rank, str(words["failed"]))
        return None

    def _failed(self, rank: int, why: str) -> ModelLoadError:
        said = f" ({why})" if why else ""
        return ModelLoadError(
            f"rank {rank} of {self._place.size} could not load{said}: {self._last_words(rank)}"
        )

    def _last_words(self, rank: int) -> str:
        process = self._processes.get(rank)
        if process is None:
            return "closed its connection, or its machine is gone; its own output says more"
        return process.last_words(NOTICE_S)
