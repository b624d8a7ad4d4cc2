"""Memory while loading: what is refused beforehand, what is held, what happens when it runs out."""

from __future__ import annotations

import weakref

import attrs
import pytest
import torch
from torch import Tensor

from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.errors import ModelLoadError
from mistralrs_sdk.loading import loader
from mistralrs_sdk.loading.checkpoint import Checkpoint, TensorSource
from mistralrs_sdk.loading.loader import free_memory, load_model, open_checkpoint
from tests.checkpoint_files import HIDDEN, config_for, tensors_of, write_folder

EMBEDDING = "model.embed_tokens.weight"
CPU = torch.device("cpu")


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32):
    return load_model(checkpoint, dtype=dtype, device=CPU)


@pytest.fixture
def checkpoint(tmp_path) -> Checkpoint:
    return open_checkpoint(ModelSource(model_id=write_folder(tmp_path)))


def test_one_tensor_is_held_besides_the_result(checkpoint):
    """Each tensor that was read is gone before the next one is."""
    read: list[weakref.ref[Tensor]] = []

    def watched(source: TensorSource) -> TensorSource:
        def load() -> Tensor:
            assert all(tensor() is None for tensor in read)
            tensor = source.load().clone()
            read.append(weakref.ref(tensor))
            return tensor

        return attrs.evolve(source, load=load)

    tensors = {name: watched(source) for name, source in checkpoint.tensors.items()}

    load(attrs.evolve(checkpoint, tensors=tensors))

    assert len(read) == len(tensors)


def huge(*, embedding_rows: int) -> Checkpoint:
    """A checkpoint of which no tensor may be read."""

    def unread() -> Tensor:
        raise AssertionError("a tensor was read although the model does not fit")

    config = config_for("llama", vocab_size=embedding_rows, tie_word_embeddings=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(config).items()}
    shapes[EMBEDDING] = (embedding_rows, HIDDEN)
    return Checkpoint(
        name="huge",
        files=(),
        config=config,
        tensors={name: TensorSource(shape=s, load=unread) for name, s in shapes.items()},
        tokenizer=None,  # type: ignore[arg-type]
        generation_config={},
        format="made up",
    )


def test_a_model_that_does_not_fit_is_refused_before_anything_is_read(monkeypatch):
    """What it takes, with the largest tensor a second time, and what is free are named."""
    rows = 2**30 // (4 * HIDDEN)  # a 1 GiB embedding
    monkeypatch.setattr(loader, "free_memory", lambda device: 2**30 * 3 // 2)

    with pytest.raises(ModelLoadError) as caught:
        load(huge(embedding_rows=rows))

    for part in ("huge does not fit", "weights as f32 x", "2.00 GiB", "1.50 GiB are free on cpu"):
        assert part in str(caught.value)
    for way_out in ("with_isq", "with_dtype"):
        assert way_out in str(caught.value)


def test_a_model_that_just_fits_is_read(monkeypatch):
    """Down to the byte; half the type is half the memory."""
    checkpoint = huge(embedding_rows=1000)
    largest = 1000 * HIDDEN
    small = tensors_of(config_for("llama", tie_word_embeddings=True)).items()
    rest = sum(t.numel() for name, t in small if name != EMBEDDING)
    for dtype, bytes_each in ((torch.float32, 4), (torch.bfloat16, 2)):
        needed = (largest + rest) * bytes_each + largest * 4
        monkeypatch.setattr(loader, "free_memory", lambda device, free=needed: free)
        with pytest.raises(AssertionError, match="a tensor was read"):
            load(checkpoint, dtype)

        monkeypatch.setattr(loader, "free_memory", lambda device, free=needed - 1: free)
        with pytest.raises(ModelLoadError, match="does not fit"):
            load(checkpoint, dtype)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_while_loading_is_a_load_error(checkpoint, error):
    """Others may take the memory meanwhile; the cause is chained."""
    with pytest.raises(ModelLoadError, match="does not fit") as caught:
        load(failing(checkpoint, error))

    assert caught.value.__cause__ is error


def test_other_errors_while_loading_are_not_called_memory(checkpoint):
    """A fault of ours keeps its name."""
    with pytest.raises(RuntimeError, match="shape mismatch"):
        load(failing(checkpoint, RuntimeError("shape mismatch")))


def failing(checkpoint: Checkpoint, error: Exception) -> Checkpoint:
    """Its final norm cannot be read."""

    def fail() -> Tensor:
        raise error

    source = attrs.evolve(checkpoint.tensors["model.norm.weight"], load=fail)
    return attrs.evolve(checkpoint, tensors={**checkpoint.tensors, "model.norm.weight": source})


def test_free_memory_is_the_machines_on_a_cpu_and_the_cards_on_a_gpu(monkeypatch):
    """macOS does not say what is free: all of its RAM counts."""
    monkeypatch.setattr(loader, "available_memory", lambda: 5)
    monkeypatch.setattr(loader, "physical_memory", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 9))

    monkeypatch.setattr("sys.platform", "linux")
    assert free_memory(CPU) == 5
    assert free_memory(torch.device("cuda")) == 3

    monkeypatch.setattr("sys.platform", "darwin")
    assert free_memory(CPU) == 8
    assert free_memory(torch.device("mps")) == 8
