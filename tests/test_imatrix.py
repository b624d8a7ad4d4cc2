"""Importance matrices: three file formats, and files that are none of them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.imatrix import read_imatrix

ATTENTION = np.arange(1, 9, dtype=np.float32)
MLP = np.linspace(0.5, 2, 4, dtype=np.float32)


def legacy_bytes(*, calls: int = 5, trailer: bool = True) -> bytes:
    """llama.cpp's older format: what is stored are means times the number of calls."""
    parts = [struct.pack("<i", 2)]
    for name, values in (("blk.0.attn_q.weight", ATTENTION), ("blk.0.ffn_down.weight", MLP)):
        parts += [struct.pack("<i", len(name)), name.encode()]
        parts += [struct.pack("<ii", calls, len(values)), (values * max(1, calls)).tobytes()]
    if trailer:
        parts += [struct.pack("<ii", 5, 8), b"text.txt"]
    return b"".join(parts)


def cimatrix_bytes(entries: dict[str, np.ndarray]) -> bytes:
    parts = [struct.pack("<Q", len(entries))]
    for name, values in entries.items():
        parts += [struct.pack("<Q", len(name)), name.encode()]
        parts += [struct.pack("<Q", len(values)), values.tobytes()]
    return b"".join(parts)


def write_gguf(path: Path, tensors: dict[str, np.ndarray], *, kind: str = "imatrix") -> Path:
    writer = gguf.GGUFWriter(path, arch="")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 5)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors() -> dict[str, np.ndarray]:
    return {
        "blk.0.attn_q.weight.in_sum2": 12 * ATTENTION.reshape(1, -1),
        "blk.0.attn_q.weight.counts": np.full((1, 1), 12, dtype=np.float32),
    }


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def values_or_nothing(path: Path) -> Mapping[str, Tensor]:
    """What the file gives, nothing if it is refused; any other error goes on."""
    try:
        return read_imatrix(path)
    except ModelLoadError:
        return {}


@pytest.mark.parametrize("trailer", [True, False])
@pytest.mark.parametrize("name", ["imatrix.dat", "a.imatrix"])
def test_older_files_of_llama_cpp_give_means(tmp_path, name, trailer):
    """Stored sums are divided by the number of calls; the words at the end are optional."""
    path = write(tmp_path / name, legacy_bytes(trailer=trailer))

    read = read_imatrix(path)

    assert set(read) == {"blk.0.attn_q.weight", "blk.0.ffn_down.weight"}
    assert np.allclose(read["blk.0.attn_q.weight"], ATTENTION)
    assert np.allclose(read["blk.0.ffn_down.weight"], MLP)


def test_no_calls_leave_the_values_as_they_are(tmp_path):
    """A number of calls of zero does not divide."""
    path = write(tmp_path / "imatrix.dat", legacy_bytes(calls=0))

    assert np.allclose(read_imatrix(path)["blk.0.attn_q.weight"], ATTENTION)


def test_gguf_files_give_sums_by_counts(tmp_path):
    """The mean is the sum of squares by the number of rows that were added."""
    read = read_imatrix(write_gguf(tmp_path / "imatrix.gguf", gguf_tensors()))

    assert set(read) == {"blk.0.attn_q.weight"}
    assert read["blk.0.attn_q.weight"].shape == (8,)
    assert np.allclose(read["blk.0.attn_q.weight"], ATTENTION)


def test_experts_have_a_mean_each_and_idle_ones_count_evenly(tmp_path):
    """A stack of experts keeps its rows; without any count all inputs are alike."""
    tensors = {
        "blk.0.ffn_up_exps.weight.in_sum2": np.stack([4 * MLP, 0 * MLP]),
        "blk.0.ffn_up_exps.weight.counts": np.array([[4], [0]], dtype=np.float32),
    }

    read = read_imatrix(write_gguf(tmp_path / "imatrix.gguf", tensors))

    assert np.allclose(read["blk.0.ffn_up_exps.weight"], np.stack([MLP, np.ones(4)]))


def test_files_of_mistral_rs_are_found_by_gguf_names(tmp_path):
    """Modules are named as in Hugging Face checkpoints; the parts of a fused one share values."""
    entries = {
        "model.layers.0.self_attn.q_proj": ATTENTION,
        "model.layers.11.mlp.gate_up_proj": MLP,
        "model.language_model.layers.2.mlp.down_proj": MLP,
        "lm_head": ATTENTION,
        "model.layers.0.router": MLP,
    }

    read = read_imatrix(write(tmp_path / "a.cimatrix", cimatrix_bytes(entries)))

    assert set(read) == {
        "blk.0.attn_q.weight",
        "blk.11.ffn_gate.weight",
        "blk.11.ffn_up.weight",
        "blk.2.ffn_down.weight",
        "output.weight",
        "model.layers.0.router",
    }
    assert np.array_equal(read["blk.0.attn_q.weight"], ATTENTION)
    assert np.array_equal(read["blk.11.ffn_up.weight"], MLP)


def test_a_missing_file_is_named(tmp_path):
    """The error has the path."""
    with pytest.raises(ModelLoadError, match=r"nothing\.dat does not exist"):
        read_imatrix(tmp_path / "nothing.dat")


def test_a_folder_is_no_importance_matrix(tmp_path):
    """What cannot be opened says so."""
    with pytest.raises(ModelLoadError, match="cannot read"):
        read_imatrix(tmp_path)


def test_an_empty_file_is_refused(tmp_path):
    """A download that never began."""
    with pytest.raises(ModelLoadError, match="is empty"):
        read_imatrix(write(tmp_path / "a.imatrix", b""))


def test_a_model_is_no_importance_matrix(tmp_path):
    """A GGUF model given by mistake is told from a matrix."""
    path = write_gguf(tmp_path / "model.gguf", {"output.weight": ATTENTION}, kind="model")

    with pytest.raises(ModelLoadError, match=r"of the type 'model' without any \.in_sum2"):
        read_imatrix(path)


def test_sums_without_counts_are_refused(tmp_path):
    """Half an entry is damage."""
    tensors = {"blk.0.attn_q.weight.in_sum2": ATTENTION}

    with pytest.raises(ModelLoadError, match=r"without blk\.0\.attn_q\.weight\.counts"):
        read_imatrix(write_gguf(tmp_path / "imatrix.gguf", tensors))


def test_sums_in_another_type_are_refused_by_name(tmp_path):
    """Only float32 sums exist; others are named."""
    tensors = gguf_tensors()
    tensors["blk.0.attn_q.weight.in_sum2"] = ATTENTION.astype(np.float16)

    with pytest.raises(UnsupportedError, match="in_sum2 has type F16"):
        read_imatrix(write_gguf(tmp_path / "imatrix.gguf", tensors))


def test_counts_that_do_not_fit_are_refused(tmp_path):
    """The number of sums is a multiple of the number of counts."""
    tensors = gguf_tensors()
    tensors["blk.0.attn_q.weight.counts"] = np.ones((3, 1), dtype=np.float32)

    with pytest.raises(ModelLoadError, match=r"3 counts of blk\.0\.attn_q\.weight do not fit"):
        read_imatrix(write_gguf(tmp_path / "imatrix.gguf", tensors))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_values_that_are_no_mean_squares_are_refused(tmp_path, value):
    """A negative or infinite importance is damage, found while reading."""
    values = ATTENTION.copy()
    values[3] = value

    with pytest.raises(ModelLoadError, match=r"'output\.weight' has values"):
        read_imatrix(write(tmp_path / "a.cimatrix", cimatrix_bytes({"lm_head": values})))


def test_an_entry_that_appears_twice_is_refused(tmp_path):
    """Two modules with one GGUF name contradict each other."""
    entries = {"lm_head": ATTENTION, "output": ATTENTION}

    with pytest.raises(ModelLoadError, match="appears twice"):
        read_imatrix(write(tmp_path / "a.cimatrix", cimatrix_bytes(entries)))


@pytest.mark.parametrize("name", ["a.cimatrix", "a.imatrix"])
@pytest.mark.parametrize("count", [2**31 - 1, 2**20])
def test_absurd_sizes_are_refused_before_anything_is_allocated(tmp_path, name, count):
    """A count of values beyond the file's end is damage, not a memory error."""
    layout = ("<Q", "<Q") if name == "a.cimatrix" else ("<i", "<ii")
    head = struct.pack(layout[0], 1) + struct.pack(layout[0], 1) + b"w"
    numbers = (count,) if name == "a.cimatrix" else (1, count)

    with pytest.raises(ModelLoadError, match=f"should take {4 * count} bytes"):
        read_imatrix(write(tmp_path / name, head + struct.pack(layout[1], *numbers) + bytes(99)))


SHARED_FOLDER = HealthCheck.function_scoped_fixture  # each example writes its file anew
FILES = st.sampled_from(["legacy", "cimatrix", "gguf"])


@settings(max_examples=150, deadline=None, suppress_health_check=[SHARED_FOLDER])
@given(
    kind=FILES,
    cut=st.floats(0, 1),
    change=st.none() | st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)),
)
def test_damaged_files_give_values_or_a_load_error(tmp_path, kind, cut, change):
    """Cut or overwritten files never raise anything else, whatever they say of sizes."""
    if kind == "gguf":
        path = write_gguf(tmp_path / "imatrix.gguf", gguf_tensors())
        content = path.read_bytes()
    elif kind == "legacy":
        path, content = tmp_path / "a.imatrix", legacy_bytes()
    else:
        path = tmp_path / "a.cimatrix"
        content = cimatrix_bytes({"model.layers.0.self_attn.qkv_proj": ATTENTION, "lm_head": MLP})
    content = bytearray(content[: round(cut * len(content))] if change is None else content)
    if change is not None:
        start = int(change[0] * len(content))
        content[start : start + len(change[1])] = change[1]
    write(path, bytes(content))

    read = values_or_nothing(path)

    assert all(bool((values >= 0).all()) for values in read.values())


@settings(max_examples=100, deadline=None, suppress_health_check=[SHARED_FOLDER])
@given(content=st.binary(max_size=80), name=st.sampled_from(["a.imatrix", "a.cimatrix", "a.gguf"]))
def test_random_bytes_are_no_importance_matrix(tmp_path, content, name):
    """Bytes that are nothing give a load error (or, by rare luck, an entry)."""
    read = values_or_nothing(write(tmp_path / name, content))

    assert all(bool((values >= 0).all()) for values in read.values())
