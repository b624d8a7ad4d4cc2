"""Tapes: the kernel calls of one step, written down once and then repeated by one call.

What a CUDA graph is to a GPU. A step can be taped if all its arithmetic is kernel calls, and if
nothing it does outside of them depends on the values in tensors: a tape repeats the calls with the
same sizes and addresses, on what stands at these addresses by then.
"""

from __future__ import annotations

import bisect
import math
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mistralrs_sdk.kernels import native

_ALIGNMENT = 64
"""Of each buffer in an arena, in bytes: torch's."""
_HEAD = struct.Struct("Pqq")
"""What stands before a call's arguments on a tape; see `src/tape.cpp`."""
_WORD = 8
_ALLOCATIONS = frozenset(
    (
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    )
)
_BRINGING = frozenset((torch.ops.aten.lift, torch.ops.aten.lift_fresh))
"""They look like views, and make tensors of Python values: these would not be there next time."""


class ReplayError(RuntimeError):
    """A call returned another status than when it was recorded; those behind it were not made."""


@attrs.define(eq=False, repr=False)
class Arena:
    """Memory for what steps compute. Tapes of which one runs at a time share one."""

    memory: Tensor = attrs.field(factory=lambda: torch.empty(0, dtype=torch.uint8), init=False)

    def hold(self, num_bytes: int) -> None:
        """Be at least this large."""
        if num_bytes > len(self.memory):
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)


@attrs.define(eq=False, repr=False)
class Tape:
    """The calls of one step.

    It keeps no tensor alive that was there before the step: whoever owns it owns these too, and
    drops it when one of them is replaced.
    """

    names: Sequence[str]
    """Of the kernels, in the order of the calls."""
    _arena: Arena
    _words: Tensor
    """int64, as `src/tape.cpp` reads them."""
    _places: Tensor
    """Which of them are addresses in the arena."""
    _offsets: Tensor
    """How far into the arena these point."""
    _result: _Place
    _bound: Tensor | None = attrs.field(default=None, init=False)
    """The memory of the arena that the words point into."""
    _output: Tensor = attrs.field(factory=lambda: torch.empty(0), init=False)

    def run(self) -> Tensor:
        """Repeat the calls and return the result, which is good until the arena is used again.

        Raises: ReplayError.
        """
        memory = self._arena.memory
        if self._bound is not memory:  # new, or grown for another tape
            self._words[self._places] = self._offsets + memory.data_ptr()
            self._output = self._result.tensor(memory)
            self._bound = memory
        wrong = native.call("mistralrs_tape_run", self._words.data_ptr(), len(self._words))
        if wrong >= 0:
            raise ReplayError(
                f"call {wrong} of a tape, {self.names[wrong]}, did not return what it did when it "
                "was recorded: run the step itself to learn why"
            )
        return self._output


@attrs.frozen(eq=False)
class Recorded:
    """What came of recording a step: its result, and a tape or the reason for there being none."""

    result: Tensor
    tape: Tape | None
    reason: str = ""


def record(step: Callable[[], Tensor], arena: Arena) -> Recorded:
    """Run `step` once, on this thread, and make a tape of the kernels it called.

    The tape computes into the arena, and its result is what `step` returned: a tensor the step
    made. What it allocates is laid out so that buffers which are not needed at the same time share
    their place.
    """
    calls: list[tuple[str, bytes, int]] = []
    watch = _Watch()
    with native.heard(lambda *call: calls.append(call)), watch:
        result = step()
    if watch.reason is not None:
        return Recorded(result, None, watch.reason)
    buffers = _Buffers(watch.allocated)
    where = buffers.find(result.untyped_storage().data_ptr())
    if where is None:
        return Recorded(result, None, "the result is not a tensor that the step allocated")
    return Recorded(result, _tape(calls, buffers, arena=arena, result=result, buffer=where[0]))


@attrs.frozen
class _Place:
    """Where in the arena a tensor lies, and how."""

    start: int
    """In bytes."""
    dtype: torch.dtype
    shape: torch.Size
    strides: Sequence[int]

    def tensor(self, memory: Tensor) -> Tensor:
        start = self.start // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(memory.untyped_storage(), start, self.shape, tuple(self.strides))


class _Watch(TorchDispatchMode):
    """Keeps what torch allocates, and the name of the first op that computes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []  # also keeps them alive, so no address comes twice
        self.reason: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and to say so torch loads its compiler: a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _ALLOCATIONS:
            made = func(*args, **kwargs)
            self.allocated.append(made)
            if not made.is_cpu:
                self._stop(f"a tensor on {made.device}")
            return made
        with self:  # in inference mode torch leaves it to us to take an op apart
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func.overloadpacket in _BRINGING or not _is_view(func):
            self._stop(f"{func} is no kernel")
        return func(*args, **kwargs)

    def _stop(self, reason: str) -> None:
        self.reason = self.reason or reason


def _is_view(func: Any) -> bool:
    """Whether all that an op returns shares memory with its inputs, and it writes to none."""
    results = [result.alias_info for result in func._schema.returns]
    inputs = [argument.alias_info for argument in func._schema.arguments]
    written = any(info is not None and info.is_write for info in inputs)
    return bool(results) and None not in results and not written


class _Buffers:
    """The memory of the tensors a step allocated."""

    def __init__(self, allocated: Sequence[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in allocated]
        spans = sorted({(s.data_ptr(), s.nbytes()) for s in storages if s.nbytes()})
        self.starts = [start for start, _ in spans]
        self.sizes = [size for _, size in spans]

    def find(self, address: int) -> tuple[int, int] | None:
        """The number of the buffer an address lies in, and how far behind its start."""
        number = bisect.bisect_right(self.starts, address) - 1
        if number < 0 or address >= self.starts[number] + self.sizes[number]:
            return None
        return number, address - self.starts[number]


def _tape(
    calls: Sequence[tuple[str, bytes, int]],
    buffers: _Buffers,
    *,
    arena: Arena,
    result: Tensor,
    buffer: int,
) -> Tape:
    """The tape of the calls; `buffer` is the number of the one that holds the result."""
    library = native.library()
    parts = [struct.pack("q", torch.get_num_threads())]
    size = 1  # in words
    places: list[tuple[int, int, int]] = []  # word on the tape, buffer, offset in it
    uses: dict[int, list[int]] = {}
    for number, (name, words, status) in enumerate(calls):
        kernel = native.kernel(library, name)
        parts += (_HEAD.pack(kernel.address, status, len(kernel.types)), words)
        size += _HEAD.size // _WORD
        for letter, (word,) in zip(kernel.types, struct.iter_unpack("P", words), strict=True):
            if letter == "P" and (found := buffers.find(word)) is not None:
                places.append((size, *found))
                uses.setdefault(found[0], []).append(number)
            size += 1
    spans = {number: (calls_[0], calls_[-1]) for number, calls_ in uses.items()}
    spans[buffer] = (spans.get(buffer, (0, 0))[0], len(calls))
    starts, num_bytes = lay_out({n: (*span, buffers.sizes[n]) for n, span in spans.items()})
    arena.hold(num_bytes)
    return Tape(
        [name for name, _, _ in calls],
        arena,
        torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.int64),
        torch.tensor([word for word, _, _ in places], dtype=torch.int64),
        torch.tensor([starts[n] + offset for _, n, offset in places], dtype=torch.int64),
        _Place(
            starts[buffer] + int(result.storage_offset()) * result.element_size(),
            result.dtype,
            result.shape,
            result.stride(),
        ),
    )


def lay_out(buffers: dict[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """Where each buffer begins, and how much memory all take together.

    A buffer is (first call that uses it, last one, bytes); those in use during one call do not
    overlap. Each gets the lowest gap that is large enough.
    """
    starts: dict[int, int] = {}
    live: list[tuple[int, int, int]] = []  # start, end, last use
    total = 0
    for number, (first, last, size) in sorted(buffers.items(), key=operator.itemgetter(1)):
        live = [item for item in live if item[2] >= first]
        size = math.ceil(size / _ALIGNMENT) * _ALIGNMENT
        start = 0
        for begin, end, _ in live:
            if begin - start >= size:
                break
            start = end
        starts[number] = start
        bisect.insort(live, (start, start + size, last))
        total = max(total, start + size)
    return starts, total
