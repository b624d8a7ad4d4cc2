"""`ClosedOnLeaving`: streams that end when their `async with` is left."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class ClosedOnLeaving(ABC):
    """An async context manager over the stream's own `aclose`."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the stream; what still runs for it is aborted."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
