"""A fake model on a fake device: steps are launched, and their tokens are read later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from mistralrs_sdk.engine.request import SampledToken
from mistralrs_sdk.engine.scheduler import Scheduled
from mistralrs_sdk.engine.sequence import Sequence as EngineSequence
from tests.engine_helpers import next_token

WRONG = 1
"""What the device takes a token for that has to be drawn again."""


@attrs.define(eq=False)
class FakeStep:
    """Tokens that the device has and the host has not."""

    runner: LaunchingFake
    sequences: list[EngineSequence]
    known: list[list[int]]
    """What each sequence consists of on the device, the token that was drawn included."""
    real: list[SampledToken | None]
    redone: frozenset[int]
    blocks: list[int | None]
    """The block that each sequence's last key and value are written to."""

    def read(self) -> list[SampledToken | None]:
        self.runner.log.append("read")
        self.runner.unread.remove(self)
        self.runner.fail_read(len(self.runner.log))
        return self.real


@attrs.define(eq=False)
class LaunchingFake:
    """The next token is a hash of all tokens; keys and values are checked wherever they are read.

    `plain` says whether a sequence is drawn on the device, `late` whether a token is one that has
    to be drawn again, `broken` whether it cannot be drawn at all.
    """

    block_size: int
    plain: Callable[[EngineSequence], bool] = lambda sequence: True
    late: Callable[[list[int]], bool] = lambda tokens: False
    broken: Callable[[list[int]], bool] = lambda tokens: False
    fail_ahead: Callable[[int], None] = lambda number: None
    fail_read: Callable[[int], None] = lambda number: None
    log: list[str] = attrs.field(factory=list)
    unread: list[FakeStep] = attrs.field(factory=list)
    store: dict[int, tuple[int, ...]] = attrs.field(factory=dict)
    """By slot, the tokens up to the one whose key and value are there."""

    def run(self, scheduled: Sequence[Scheduled]) -> list[SampledToken | None]:
        self.log.append("run")
        assert not self.unread, "a step is run while another is in flight"
        return self._compute(scheduled, [item.sequence.tokens for item in scheduled]).real

    def launch(self, scheduled: Sequence[Scheduled]) -> FakeStep | None:
        if not all(self.plain(item.sequence) for item in scheduled):
            return None
        self.log.append("launch")
        step = self._compute(scheduled, [item.sequence.tokens for item in scheduled])
        self.unread.append(step)
        return step

    def launch_after(self, step: FakeStep, rows: Sequence[int]) -> FakeStep:
        self.log.append("ahead")
        self.fail_ahead(self.log.count("ahead"))
        assert step in self.unread, "its tokens are known already"
        items = [Scheduled(step.sequences[row], 1) for row in rows]
        following = self._compute(items, [step.known[row] for row in rows], ahead=1)
        self.unread.append(following)
        return following

    def check(self) -> None:
        """Whatever is being written belongs to the sequence that it is written for."""
        for step in self.unread:
            for sequence, block in zip(step.sequences, step.blocks, strict=True):
                assert block is None or block in sequence.blocks, "freed while it is written to"

    def _compute(
        self, scheduled: Sequence[Scheduled], tokens: Sequence[list[int]], *, ahead: int = 0
    ) -> FakeStep:
        known, real, redone, blocks = [], [], set(), []
        for place, (item, ids) in enumerate(zip(scheduled, tokens, strict=True)):
            start = item.sequence.num_computed_tokens + ahead
            end = start + item.num_tokens
            for position in range(start, end):
                self.store[self._slot(item.sequence, position)] = tuple(ids[: position + 1])
            blocks.append(item.sequence.blocks[(end - 1) // self.block_size])
            if end < len(ids):
                known.append(ids)
                real.append(None)
                continue
            for position in range(end):
                found = self.store[self._slot(item.sequence, position)]
                assert found == tuple(ids[: position + 1]), f"a wrong key at {position}"
            token = next_token(ids)
            if self.late(ids):
                redone.add(place)
            known.append([*ids, WRONG if place in redone else token])
            broken = self.broken(ids)
            real.append(SampledToken(-1, error="NaN") if broken else SampledToken(token))
        sequences = [item.sequence for item in scheduled]
        return FakeStep(self, sequences, known, real, frozenset(redone), blocks)

    def _slot(self, sequence: EngineSequence, position: int) -> int:
        block = sequence.blocks[position // self.block_size]
        return block * self.block_size + position % self.block_size
