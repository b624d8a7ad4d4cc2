"""The queue of sequences that wait for a place: by priority, then first come first served."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from mistralrs_sdk.engine.sequence import Sequence


class WaitingQueue:
    """Sequences in the order they are admitted; every operation is independent of its length.

    Smaller priorities come first; within one, who arrived first, a preempted sequence too.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, OrderedDict[int, Sequence]] = {}
        self._priorities: list[int] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        for priority in self._priorities:
            yield from self._lanes[priority].values()

    @property
    def front(self) -> Sequence:
        """The next to be admitted. The queue must not be empty."""
        return next(iter(self))

    def append(self, sequence: Sequence) -> None:
        self._lane(sequence)[sequence.id] = sequence
        self._length += 1

    def put_back(self, sequence: Sequence) -> None:
        """Return a sequence that was taken out to its place, which is near the front."""
        lane = self._lane(sequence)
        before = []
        for sequence_id in lane:
            if sequence_id > sequence.id:
                break
            before.append(sequence_id)
        lane[sequence.id] = sequence
        for sequence_id in (sequence.id, *reversed(before)):
            lane.move_to_end(sequence_id, last=False)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        lane = self._lanes[priority]
        del lane[sequence.id]
        self._length -= 1
        if not lane:
            del self._lanes[priority]
            self._priorities.remove(priority)

    def _lane(self, sequence: Sequence) -> OrderedDict[int, Sequence]:
        priority = sequence.request.priority
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = OrderedDict()
            insort(self._priorities, priority)
        return lane
