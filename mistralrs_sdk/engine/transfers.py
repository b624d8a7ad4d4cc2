"""Copies between the host and a device that goes on computing meanwhile."""

from __future__ import annotations

from typing import Protocol

import attrs
import torch
from torch import Tensor


class Fetched(Protocol):
    """A tensor on its way to the host."""

    def wait(self) -> Tensor:
        """The tensor on the host, once it is there."""
        ...


class Transfers(Protocol):
    """Copies to and from one device, in the order of what is launched there; none waits for it."""

    def send(self, values: Tensor) -> Tensor:
        """`values`, on the device."""
        ...

    def fill(self, target: Tensor, values: Tensor) -> None:
        """Write `values` into a tensor of the device, of their shape."""
        ...

    def fetch(self, tensor: Tensor) -> Fetched:
        """Bring a tensor to the host."""
        ...


@attrs.frozen
class CudaTransfers:
    """Through pinned memory: with other memory torch waits for all the device has to do.

    The memory of a copy is torch's own, which hands it out again only when the copy is over.
    """

    device: torch.device

    def send(self, values: Tensor) -> Tensor:
        return values.pin_memory().to(self.device, non_blocking=True)

    def fill(self, target: Tensor, values: Tensor) -> None:
        target.copy_(values.pin_memory(), non_blocking=True)

    def fetch(self, tensor: Tensor) -> Fetched:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))
        return _CudaFetched(host, copied)


@attrs.frozen(eq=False)
class _CudaFetched:
    _host: Tensor
    _copied: torch.cuda.Event

    def wait(self) -> Tensor:
        self._copied.synchronize()  # lets other threads run meanwhile
        return self._host
