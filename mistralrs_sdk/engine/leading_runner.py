"""The runner of rank 0 of a tensor-parallel model: it has the other ranks run their shares."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionBackend, Batch
from mistralrs_sdk.engine.model_runner import ModelRunner
from mistralrs_sdk.engine.request import SampledToken
from mistralrs_sdk.engine.scheduler import Scheduled

if TYPE_CHECKING:
    from mistralrs_sdk.engine.tensor_parallel import Leader


class LeadingRunner:
    """Runs rank 0's share of each step, and has the others run theirs."""

    def __init__(self, inner: ModelRunner, leader: Leader) -> None:
        self._model = _CountedModel(inner.model)
        self._inner = inner
        inner.model = self._model
        self._leader = leader
        self._sent = 0
        # Whoever drops the engine has closed it, or it has failed: no rank outlives it.
        weakref.finalize(self, leader.close).atexit = False

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the ranks that were started here."""
        return self._leader.pids

    def run(self, scheduled: Sequence[Scheduled]) -> Sequence[SampledToken | None]:
        """Compute the step on all ranks; as `ModelRunner.run`.

        Raises:
            RankLost: a rank is gone, or this one failed while the others went on.
        """
        if self._leader.has_lost:
            raise self._leader.lost()
        self._leader.send_step(scheduled, block_size=self._inner.block_size)
        self._sent += 1
        try:
            drawn = self._inner.run(scheduled)
        except Exception as error:
            if self._num_computed() == self._sent and not self._leader.has_lost:
                raise  # after the forward: all ranks are where they should be
            raise self._leader.lost(error) from error
        if self._leader.has_lost:  # what was waiting for it has been let go, with nonsense
            raise self._leader.lost()
        return drawn

    def _num_computed(self) -> int:
        """Forwards that came to their end, replayed ones included."""
        graphs = self._inner.graphs
        return self._model.calls + (0 if graphs is None else graphs.stats.replayed)


class _CountedModel:
    """The model, and how many of its forwards came to their end."""

    def __init__(self, model: Callable[[Batch, AttentionBackend], Tensor]) -> None:
        self._model = model
        self.calls = 0

    def __call__(self, batch: Batch, backend: AttentionBackend) -> Tensor:
        logits = self._model(batch, backend)
        self.calls += 1
        return logits
