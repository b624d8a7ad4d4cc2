"""How the ranks of a tensor-parallel model find each other and join a group."""

from __future__ import annotations

import itertools
import os
import socket
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed  # torch alone may not have loaded it

from mistralrs_sdk.distributed import GlooGroup, Group, NcclGroup, TensorParallel
from mistralrs_sdk.engine.rank_channel import Channel
from mistralrs_sdk.engine.rank_place import RankPlace
from mistralrs_sdk.errors import ConfigError, ModelLoadError

MEETING_TIMEOUT = timedelta(minutes=10)
"""How long ranks of other processes and machines may take to come."""

_distributed: Any = torch.distributed
_PORT = "control"
_meetings = itertools.count()
"""One number per meeting of this process: ranks that build several models build them in the same
order, and so meet for the same one."""


@attrs.frozen(kw_only=True)
class Meeting:
    """Where ranks that were not all started by rank 0 meet, seen from one of them."""

    number: int
    store: Any
    """A store of torch.distributed, for this meeting alone."""
    host: str

    @classmethod
    def of(cls, place: RankPlace, *, number: int | None = None) -> Meeting:
        """Reach the store; rank 0 opens it, unless torchrun has. `number` is that of the meeting.

        Raises:
            ModelLoadError: rank 0 is not there in time, or its port is taken.
        """
        assert place.meeting is not None, "ranks that rank 0 starts need not meet"
        host, port = place.meeting
        number = next(_meetings) if number is None else number
        try:
            store = _distributed.TCPStore(
                host,
                port,
                is_master=place.rank == 0 and not place.agent_store,
                timeout=MEETING_TIMEOUT,
                wait_for_workers=False,
                multi_tenant=True,  # several models of one process may be open
            )
        except (RuntimeError, ValueError) as error:
            raise ModelLoadError(
                f"rank {place.rank} of {place.size} cannot meet the others at {host}:{port}: "
                f"{error}"
            ) from error
        prefix = f"mistralrs_sdk/{place.attempt}/{number}"
        return cls(number=number, store=_distributed.PrefixStore(prefix, store), host=host)

    def listen(self) -> socket.socket:
        """Open the door that `connect` knocks at; for rank 0."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.create_server(("", 0), family=family)
        self.store.set(_PORT, str(listener.getsockname()[1]))
        return listener

    def connect(self) -> Channel:
        """Connect to rank 0.

        Raises:
            ModelLoadError: it does not come, or cannot be reached.
        """
        try:
            port = int(self.store.get(_PORT))
            return Channel(socket.create_connection((self.host, port), timeout=30))
        except (OSError, RuntimeError) as error:
            raise ModelLoadError(f"rank 0 cannot be reached at {self.host}: {error}") from error


def file_store(path: str, size: int) -> Any:
    """A store of torch.distributed in a file, for ranks on one machine."""
    return _distributed.FileStore(path, size)


def join(
    place: RankPlace, *, device: torch.device, store: Any, address: str, nccl_id: str | None
) -> TensorParallel:
    """Join the group; all ranks do so at the same time.

    On CUDA by the `nccl_id` that rank 0 drew, on a CPU over the `store`; this rank is then reached
    at `address`, unless GLOO_SOCKET_IFNAME names a network interface.

    Raises:
        ModelLoadError: the ranks do not reach each other.
    """
    group: Group
    try:
        if device.type == "cuda":
            assert nccl_id is not None, "rank 0 is on CUDA too"
            torch.cuda.set_device(device)
            group = NcclGroup(bytes.fromhex(nccl_id), rank=place.rank, size=place.size)
        else:
            chosen = os.environ.get("GLOO_SOCKET_IFNAME")
            group = GlooGroup(
                store, rank=place.rank, size=place.size, address=None if chosen else address
            )
    except RuntimeError as error:
        raise ModelLoadError(
            f"rank {place.rank} of {place.size} cannot join the others: {error}; if they are on "
            "several machines, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names the network "
            "interface to use"
        ) from error
    return TensorParallel(
        rank=place.rank, size=place.size, group=group, local_size=place.local_size
    )


def device_of(asked: str | None, place: RankPlace) -> torch.device:
    """The device of a rank: the CUDA device with its local number, or the CPU.

    Raises:
        ConfigError: there are fewer CUDA devices than ranks, or the device has no collectives.
    """
    if asked == "cpu" or (asked is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if asked not in (None, "cuda"):
        raise ConfigError(
            f"device ({asked!r}) cannot be chosen with tensor_parallel ({place.size}): each rank "
            'takes the CUDA device with its own number; use with_device("cuda"), and '
            "CUDA_VISIBLE_DEVICES to leave some out"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device ({asked!r}) needs CUDA; torch {torch.__version__} does not find it: "
            'use with_device("cpu") or install a CUDA build of torch'
        )
    count = torch.cuda.device_count()
    if count < place.local_size:
        raise ConfigError(
            f"tensor_parallel has {place.local_size} ranks on this machine, which has {count} CUDA "
            "devices: use fewer ranks"
        )
    return torch.device("cuda", place.local_rank)
