"""What the ranks of a tensor-parallel model compute together, as a value: sums, gathered rows."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import attrs
import torch
import torch.distributed  # torch alone may not have loaded it
from torch import Tensor

_distributed: Any = torch.distributed

COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others inside a step; between steps nobody waits here."""

_PATIENCE = timedelta(seconds=0.5)
"""How long a rank waits before it asks whether to wait on."""

_ABORT_S = 1.0
"""How long freed memory of NCCL is waited for."""


class Group(Protocol):
    """The connections of one rank to the others of its model."""

    def all_reduce(self, x: Tensor) -> None:
        """Make x, contiguous, the sum over all ranks, in place."""

    def gather(self, x: Tensor) -> Tensor | None:
        """What all ranks gave, [size, *x.shape]; it may be None on ranks above 0."""
        ...

    def abort(self) -> None:
        """Let whoever waits in a collective go, with an error or with nonsense; any thread may."""


@attrs.frozen
class TensorParallel:
    """One rank's place among those that hold a model together; an argument, never a global.

    Alone (the default) it computes nothing. A size above 1 without a group is for planning.
    """

    rank: int = 0
    size: int = 1
    group: Group | None = attrs.field(default=None, eq=False, repr=False)
    local_size: int = 1
    """How many of the ranks are on this machine."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, in place; x is contiguous."""
        if self.size > 1:
            self._group.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """[size, *x.shape] on rank 0, None elsewhere."""
        if self.size == 1:
            return x[None]
        found = self._group.gather(x.contiguous())
        return found if self.rank == 0 else None

    @property
    def _group(self) -> Group:
        assert self.group is not None, "a rank that was only planned with computes nothing"
        return self.group


ALONE = TensorParallel()


class GlooGroup:
    """Ranks on CPUs, over TCP. Made at the same time by all of them.

    `store` is one of torch.distributed's that all ranks see; `address` is this rank's, where the
    others reach it. None leaves both to GLOO_SOCKET_IFNAME.
    """

    def __init__(self, store: Any, *, rank: int, size: int, address: str | None) -> None:
        self._rank, self._size = rank, size
        self._aborted = False
        gloo = _distributed.ProcessGroupGloo
        if address is None:
            self._gloo = gloo(store, rank, size, COLLECTIVE_TIMEOUT)
            return
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = COLLECTIVE_TIMEOUT
        self._gloo = gloo(store, rank, size, options)

    def all_reduce(self, x: Tensor) -> None:
        if x.numel():
            self._wait(self._gloo.allreduce([x]))

    def gather(self, x: Tensor) -> Tensor | None:
        options = _distributed.GatherOptions()
        options.rootRank = 0
        if self._rank:
            if x.numel():
                self._wait(self._gloo.gather([], [x], options))
            return None
        found = x.new_empty((self._size, *x.shape))
        if x.numel():
            self._wait(self._gloo.gather([list(found.unbind())], [x], options))
        return found

    def abort(self) -> None:
        """Let whoever waits go within a second.

        That is for a rank whose machine is gone: one that ends closes its connections, which ends
        every wait anyway. Gloo's own threads wait on; taking the group apart would join them, so it
        is never taken apart.
        """
        if not self._aborted:
            self._aborted = True
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    def _wait(self, work: Any) -> None:
        while True:
            try:
                work.wait(_PATIENCE)
                return
            except RuntimeError:
                if self._aborted or work.is_completed():
                    raise


class NcclGroup:
    """Ranks on CUDA devices, over NCCL, on torch's current stream.

    It calls the library that torch brings. torch's own process group watches its ranks from a
    thread that ends the whole process when one is lost; a program that serves must outlive that.
    All ranks make it at the same time, each on the thread and the device it will compute with;
    `unique_id` is what rank 0 drew with `nccl_unique_id`.
    """

    def __init__(self, unique_id: bytes, *, rank: int, size: int, library: Any = None) -> None:
        self._library = nccl_library() if library is None else library
        self._size = size
        self._comm = ctypes.c_void_p()
        identity = _UniqueId.from_buffer_copy(unique_id)
        self._check(
            "ncclCommInitRank",
            self._library.ncclCommInitRank(ctypes.byref(self._comm), size, identity, rank),
        )
        # Its buffers on the GPU are freed with the group; the other ranks may have ended by then.
        self._free = weakref.finalize(self, _abort_nccl, self._library, self._comm)
        self._free.atexit = False

    def all_reduce(self, x: Tensor) -> None:
        self._check(
            "ncclAllReduce",
            self._library.ncclAllReduce(
                x.data_ptr(),
                x.data_ptr(),
                x.numel(),
                _NCCL_TYPES[x.dtype],
                _NCCL_SUM,
                self._comm,
                _stream(x.device),
            ),
        )

    def gather(self, x: Tensor) -> Tensor | None:
        found = x.new_empty((self._size, *x.shape))
        self._check(
            "ncclAllGather",
            self._library.ncclAllGather(
                x.data_ptr(),
                found.data_ptr(),
                x.numel(),
                _NCCL_TYPES[x.dtype],
                self._comm,
                _stream(x.device),
            ),
        )
        return found

    def abort(self) -> None:
        """End the kernels that wait for a lost rank; a later collective fails at once."""
        self._comm = ctypes.c_void_p()
        self._free()

    def _check(self, call: str, status: int) -> None:
        _check_nccl(self._library, call, status)


def _abort_nccl(library: Any, comm: ctypes.c_void_p) -> None:
    """Let the kernels of a communicator go, and free it.

    NCCL then waits for the graphs that captured its calls to be dropped, which may be the next
    thing that this thread does.
    """
    aborting = threading.Thread(target=library.ncclCommAbort, args=(comm,), daemon=True)
    aborting.start()
    aborting.join(_ABORT_S)


def nccl_unique_id(library: Any = None) -> bytes:
    """What the ranks of a new group recognise each other by, and where they find rank 0.

    Raises:
        RuntimeError: NCCL is not there or finds no network interface.
    """
    library = nccl_library() if library is None else library
    identity = _UniqueId()
    _check_nccl(library, "ncclGetUniqueId", library.ncclGetUniqueId(ctypes.byref(identity)))
    return bytes(identity)


def nccl_library() -> Any:
    """The NCCL that this process has loaded with torch.

    Raises:
        RuntimeError: there is none.
    """
    torch.cuda.init()  # loads what torch links to
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RuntimeError(
            f"tensor parallelism on CUDA needs NCCL, and libnccl.so.2 is not found ({error}): "
            "install torch's CUDA build from PyPI, which brings it"
        ) from error
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    signatures: dict[str, Sequence[Any]] = {
        "ncclGetUniqueId": (pointer,),
        "ncclCommInitRank": (pointer, number, _UniqueId, number),
        "ncclCommAbort": (pointer,),
        "ncclAllReduce": (pointer, pointer, size, number, number, pointer, pointer),
        "ncclAllGather": (pointer, pointer, size, number, pointer, pointer),
    }
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = list(types), number
    library.ncclGetErrorString.argtypes = [number]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


_NCCL_TYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
"""ncclDataType_t of nccl.h."""
_NCCL_SUM = 0


def _check_nccl(library: Any, call: str, status: int) -> None:
    if status:
        reason = cast(bytes, library.ncclGetErrorString(status)).decode()
        raise RuntimeError(f"{call} failed: {reason} (NCCL_DEBUG=INFO shows more)")


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream
