"""The queue of sequences that wait for a place: by priority, then first come first served."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

from mistralrs_sdk.engine.sequence import Sequence, Status


class WaitingQueue:
    """Sequences in the order they are admitted; every operation is independent of its length.

    Smaller priorities come first. A preempted sequence returns to the front of its priority. A
    sequence that ends while it waits stays where it is, unseen, until it reaches the front or half
    of the queue is like it.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, deque[Sequence]] = {}
        self._priorities: list[int] = []
        self._live = 0
        self._ended = 0

    def __len__(self) -> int:
        return self._live

    def __bool__(self) -> bool:
        return self._live > 0

    def __iter__(self) -> Iterator[Sequence]:
        for priority in self._priorities:
            for sequence in self._lanes[priority]:
                if sequence.status is not Status.FINISHED:
                    yield sequence

    @property
    def front(self) -> Sequence:
        """The next to be admitted. The queue must not be empty."""
        return next(iter(self))

    def append(self, sequence: Sequence) -> None:
        self._lane(sequence).append(sequence)
        self._live += 1

    def appendleft(self, sequence: Sequence, *, behind: Sequence | None = None) -> None:
        """Put a sequence at the front of its priority, or right behind the one that is there."""
        lane = self._lane(sequence)
        lane.insert(1 if behind is not None and lane and lane[0] is behind else 0, sequence)
        self._live += 1

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that stands near the front of its priority."""
        lane = self._lanes[sequence.request.priority]
        lane.remove(sequence)
        self._live -= 1
        self._trim(sequence.request.priority)

    def count_ended(self, sequence: Sequence) -> None:
        """Take notice that a waiting sequence has ended."""
        self._live -= 1
        self._ended += 1
        self._trim(sequence.request.priority)
        if self._ended > max(self._live, 64):
            self._compact()

    def _lane(self, sequence: Sequence) -> deque[Sequence]:
        priority = sequence.request.priority
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = deque()
            insort(self._priorities, priority)
        return lane

    def _trim(self, priority: int) -> None:
        """Drop ended sequences from the front of a lane, and the lane if nothing is left."""
        lane = self._lanes[priority]
        while lane and lane[0].status is Status.FINISHED:
            lane.popleft()
            self._ended -= 1
        if not lane:
            del self._lanes[priority]
            self._priorities.remove(priority)

    def _compact(self) -> None:
        alive = list(self)
        self._lanes.clear()
        self._priorities.clear()
        self._live = self._ended = 0
        for sequence in alive:
            self.append(sequence)
