"""A device that computes while the host goes on, as the CPU can play it."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor


@attrs.define(eq=False)
class FakeFetched:
    """A tensor on its way; what was there when it was sent for."""

    copy: Tensor
    log: list[str]

    def wait(self) -> Tensor:
        self.log.append("read")
        return self.copy


@attrs.define
class FakeTransfers:
    """Copies at once, and writes down when something is sent for and when it is waited for."""

    log: list[str] = attrs.field(factory=list)

    def send(self, values: Tensor) -> Tensor:
        return values.clone()

    def fill(self, target: Tensor, values: Tensor) -> None:
        target.copy_(values)

    def fetch(self, tensor: Tensor) -> FakeFetched:
        self.log.append("launch")
        return FakeFetched(tensor.clone(), self.log)


@attrs.define(eq=False)
class FakeGraph:
    """Calls the captured step again, and puts what it returns where the first result is."""

    step: Callable[[], Tensor]
    output: Tensor
    num_bytes: int
    fail: Callable[[], None]
    replays: int = 0

    def replay(self) -> None:
        self.fail()
        self.replays += 1
        self.output.copy_(self.step())


@attrs.define
class FakeGraphs:
    """Captures by calling; `fail_capture` and `fail_replay` may raise what a device would."""

    num_bytes: int = 100
    fail_warm_up: Callable[[], None] = lambda: None
    fail_capture: Callable[[], None] = lambda: None
    fail_replay: Callable[[], None] = lambda: None
    made: list[FakeGraph] = attrs.field(factory=list)

    def warm_up(self, step: Callable[[], Tensor]) -> Tensor:
        self.fail_warm_up()
        return step()

    def capture(self, step: Callable[[], Tensor]) -> FakeGraph:
        self.fail_capture()
        graph = FakeGraph(
            step, torch.empty_like(step()), self.num_bytes, lambda: self.fail_replay()
        )
        self.made.append(graph)
        return graph
