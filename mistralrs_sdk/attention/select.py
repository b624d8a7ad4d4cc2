"""What attends to the paged KV cache, in which type that is kept, whether graphs: pure choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from mistralrs_sdk.switches import read_switch

if TYPE_CHECKING:
    from mistralrs_sdk.attention.backend import AttentionSpec

KV_SWITCH = "MISTRALRS_CPU_KV_F32"
FLASHINFER_SWITCH = "MISTRALRS_FLASHINFER_DECODE"
GRAPHS_SWITCH = "MISTRALRS_CUDA_GRAPHS"

HEAD_DIMS = (64, 128, 256, 512)
"""Sizes of a head that FlashInfer has kernels for."""
LEAST_CAPABILITY = (7, 5)
"""Of a GPU, for FlashInfer."""
LEAST_FOR_BF16 = (8, 0)
"""Of a GPU, for bfloat16 and for a float8 cache."""


@attrs.frozen(kw_only=True)
class Choice:
    """The backend that runs, and why the faster ones do not."""

    name: str
    """Class name, for `describe()`."""
    reasons: tuple[str, ...] = ()
    """One sentence per obstacle to a backend that was passed over."""


@attrs.frozen(kw_only=True)
class KvChoice:
    """The type of stored keys and values ("f32", "f16", ...), and where it comes from."""

    dtype: str
    origin: str


@attrs.frozen(kw_only=True)
class GraphChoice:
    """Whether decode steps are captured as CUDA graphs, and why."""

    on: bool
    reason: str
    """Who wants them, or the obstacle."""


@attrs.frozen(kw_only=True)
class CudaFacts:
    """What a CUDA device is, and whether FlashInfer is there for it."""

    capability: tuple[int, int]
    flashinfer: str | None = None
    """Why the module cannot be used; None if it can."""


def select_backend(
    *,
    device: str,
    dtype: str,
    native: str | None,
    specs: Sequence[AttentionSpec],
    cache_type: str,
    cuda: CudaFacts | None,
    flashinfer: bool | None,
    environ: Mapping[str, str],
) -> Choice:
    """Choose by device ("cpu", "cuda", ...), dtype ("f32", ...) and the model's `specs`.

    `native` is why there are no native kernels on this machine, None if there are; `cache_type` is
    "auto" or "f8e4m3"; `cuda` is None without a CUDA device. `flashinfer` is what the user asked
    for: True gets every obstacle named, whatever the device.

    Raises:
        ConfigError: MISTRALRS_FLASHINFER_DECODE is neither on nor off.
    """
    off = _switched_off("flashinfer", flashinfer, environ, FLASHINFER_SWITCH)
    against = []
    if device != "cpu":
        against.append(f"CpuBackend: the device is {device}")
    elif dtype != "f32":
        against.append(f"CpuBackend: it computes in f32, not {dtype}")
    if native is not None and device == "cpu":
        against.append(f"CpuBackend: {native}")
    if not against and not flashinfer:
        return Choice(name="CpuBackend")
    obstacles = [] if off is None else [f"it is {off}"]
    obstacles += _flashinfer_obstacles(device, dtype, specs, cache_type=cache_type, cuda=cuda)
    if not obstacles:
        return Choice(name="FlashInferBackend")
    if device != "cuda" and not flashinfer:
        obstacles = obstacles[:1]  # its kernels' limits are beside the point there
    against += [f"FlashInferBackend: {obstacle}" for obstacle in obstacles]
    return Choice(name="SdpaBackend", reasons=tuple(against))


def select_kv_dtype(
    backend: str,
    dtype: str,
    *,
    user_dtype: bool,
    fast_halves: bool,
    environ: Mapping[str, str],
    cache_type: str = "auto",
) -> KvChoice:
    """Choose for the backend of that name and a model that computes in `dtype`.

    `user_dtype` says that the user asked for that dtype, `fast_halves` that the CPU has
    instructions between float16 and float32. The native backend keeps float16 then, unless the
    user wants float32, in which case nothing is rounded. A `cache_type` other than "auto" holds.

    Raises:
        ConfigError: MISTRALRS_CPU_KV_F32 is neither on nor off.
    """
    wanted = read_switch(
        environ, KV_SWITCH, default=False, unset="float16 where the CPU is fast with it"
    )
    if cache_type != "auto":
        return KvChoice(dtype=cache_type, origin="user's cache_type")
    if backend != "CpuBackend":
        return KvChoice(dtype=dtype, origin="the model's dtype")
    if wanted:
        return KvChoice(dtype="f32", origin=KV_SWITCH)
    if user_dtype:
        return KvChoice(dtype=dtype, origin="user's dtype")
    if not fast_halves:
        return KvChoice(dtype="f32", origin="this CPU is slow with f16")
    return KvChoice(dtype="f16", origin="automatic on cpu")


def select_graphs(
    backend: str | None,
    *,
    device: str,
    ranks: int = 1,
    cuda_graphs: bool | None,
    environ: Mapping[str, str],
) -> GraphChoice:
    """Choose for the backend of that name, None if the KV cache is not paged.

    `ranks` is how many processes hold the model together; `cuda_graphs` is what the user asked for.

    Raises:
        ConfigError: MISTRALRS_CUDA_GRAPHS is neither on nor off.
    """
    off = _switched_off("cuda_graphs", cuda_graphs, environ, GRAPHS_SWITCH)
    if off is not None:
        return GraphChoice(on=False, reason=off)
    if device != "cuda":
        return GraphChoice(on=False, reason=f"the device is {device}")
    if ranks > 1 and not cuda_graphs:
        reason = f"{ranks} ranks hold the model together, and capture only if they are asked to"
        return GraphChoice(on=False, reason=reason)
    if backend is None:
        return GraphChoice(on=False, reason="the KV cache is not paged")
    if backend != "FlashInferBackend":
        return GraphChoice(on=False, reason=f"the calls of {backend} depend on the batch's lengths")
    return GraphChoice(on=True, reason="user" if cuda_graphs else "automatic on cuda")


def _switched_off(
    setting: str, asked: bool | None, environ: Mapping[str, str], variable: str
) -> str | None:
    """Who switched it off, in words; the setting made in code wins over the variable."""
    on = read_switch(environ, variable, default=True, unset="on where it is possible")
    if asked is None:
        return None if on else f"switched off by {variable}={environ[variable]}"
    return None if asked else f"switched off by {setting} (False)"


def _flashinfer_obstacles(
    device: str,
    dtype: str,
    specs: Sequence[AttentionSpec],
    *,
    cache_type: str,
    cuda: CudaFacts | None,
) -> Iterator[str]:
    if device != "cuda":
        yield f"it needs a CUDA device, and the device is {device}"
    if dtype not in ("f16", "bf16"):
        yield f"it computes in f16 and bf16, not {dtype}"
    sizes = sorted({spec.head_dim for spec in specs} - set(HEAD_DIMS))
    if sizes:
        known = ", ".join(map(str, HEAD_DIMS))
        yield f"its kernels have a head_dim of {known}, not {', '.join(map(str, sizes))}"
    for heads, kv_heads in sorted({(spec.num_heads, spec.num_kv_heads) for spec in specs}):
        if heads % kv_heads:
            yield f"{heads} heads cannot share {kv_heads} heads of keys evenly"
    if not all(spec.causal for spec in specs):
        yield "the model looks ahead, and its kernels are used for causal attention"
    if cuda is None:
        return
    needs: list[tuple[str, tuple[int, int]]] = [("it", LEAST_CAPABILITY)]
    if dtype == "bf16":
        needs.append(("bf16", LEAST_FOR_BF16))
    if cache_type != "auto":
        needs.append((f"cache_type {cache_type}", LEAST_FOR_BF16))
    major, minor = cuda.capability
    for what, least in needs:
        if cuda.capability < least:
            yield (
                f"{what} needs compute capability {least[0]}.{least[1]}, and this GPU has "
                f"{major}.{minor}"
            )
    if cuda.flashinfer is not None:
        yield cuda.flashinfer
