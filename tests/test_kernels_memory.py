"""Memory for weights: where it comes from, how it is shared, and when it goes back."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from mistralrs_sdk.kernels import matmul, memory

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here"
)


@pytest.fixture(autouse=True)
def _nothing_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts a mapping of its own."""
    monkeypatch.setattr(memory, "_shared", memory._Shared())


def flags_at(address: int) -> list[str]:
    """What the kernel notes of the mapping at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return rest
    raise AssertionError(f"nothing is mapped at {address}")


@pytest.mark.parametrize("sizes", [(1, 63, 64, 1000), (memory.CHUNK // 2, 0, memory.CHUNK + 1)])
def test_every_tensor_has_memory_of_its_own(sizes: tuple[int, ...]):
    """Of the size asked for and aligned; writing one changes no other."""
    tensors = [memory.reserve(size) for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)

    for number, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert tensor.dtype is torch.uint8
        assert tensor.shape == (size,)
        assert tensor.data_ptr() % 64 == 0
        assert (tensor == number).all()


@needs_huge_pages
def test_weights_lie_in_huge_pages():
    """The kernel is asked for them, and the memory begins with one."""
    first, large = memory.reserve(100), memory.reserve(memory.CHUNK)

    for tensor in (first, large):
        assert tensor.data_ptr() % memory.PAGE == 0
        assert "hg" in flags_at(tensor.data_ptr())
    weight = matmul.pack(torch.ones(16, 32).half(), "F16", (16, 32))
    assert "hg" in flags_at(weight.address)


@needs_huge_pages
def test_small_tensors_share_a_mapping_until_it_is_full():
    """One follows the other, each at the next cache line; what does not fit begins a new one."""
    size = memory.CHUNK // 4 - 1
    kept = [memory.reserve(size) for _ in range(5)]

    places = [tensor.data_ptr() for tensor in kept]
    assert [place - places[0] for place in places[1:4]] == [size + 1, 2 * size + 2, 3 * size + 3]
    assert not 0 <= places[4] - places[0] < memory.CHUNK


@needs_huge_pages
def test_memory_goes_back_when_all_tensors_of_a_mapping_are_gone():
    """The last one keeps it, and a view keeps its tensor."""
    first, second = memory.reserve(100), memory.reserve(100)
    mapping = memory._shared.mapping
    view = second[10:].view(9, 10)

    del first, second
    assert mapping() is not None

    del view
    assert mapping() is None
    memory.reserve(100).fill_(1)


def test_without_huge_pages_memory_is_torchs(monkeypatch: pytest.MonkeyPatch):
    """As on systems whose Python does not know of them."""
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)

    assert memory.reserve(100).shape == (100,)
    assert memory._shared.end == 0


@needs_huge_pages
def test_memory_that_is_not_there_is_a_memory_error():
    """The message says for how much."""
    with pytest.raises(MemoryError, match=f"no memory for a weight of {1 << 60} bytes"):
        memory.reserve(1 << 60)
