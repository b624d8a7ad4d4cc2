"""Which backend attends to the paged KV cache, and in which type that is kept: pure choices."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from mistralrs_sdk.switches import read_switch

KV_SWITCH = "MISTRALRS_CPU_KV_F32"


@attrs.frozen(kw_only=True)
class Choice:
    """The backend that runs, and why the faster ones do not."""

    name: str
    """Class name, for `describe()`."""
    reasons: tuple[str, ...] = ()
    """One sentence per backend that was passed over."""


@attrs.frozen(kw_only=True)
class KvChoice:
    """The type of stored keys and values ("f32", "f16", ...), and where it comes from."""

    dtype: str
    origin: str


def select_backend(*, device: str, dtype: str, native: str | None) -> Choice:
    """Choose by device ("cpu", "cuda", ...) and dtype ("f32", ...).

    `native` is why there are no native kernels on this machine, None if there are.
    """
    against = []
    if device != "cpu":
        against.append(f"CpuBackend: the device is {device}")
    elif dtype != "f32":
        against.append(f"CpuBackend: it computes in f32, not {dtype}")
    if native is not None and device == "cpu":
        against.append(f"CpuBackend: {native}")
    if not against:
        return Choice(name="CpuBackend")
    return Choice(name="SdpaBackend", reasons=tuple(against))


def select_kv_dtype(
    backend: str,
    dtype: str,
    *,
    user_dtype: bool,
    fast_halves: bool,
    environ: Mapping[str, str],
) -> KvChoice:
    """Choose for the backend of that name and a model that computes in `dtype`.

    `user_dtype` says that the user asked for that dtype, `fast_halves` that the CPU has
    instructions between float16 and float32. The native backend keeps float16 then, unless the
    user wants float32, in which case nothing is rounded.

    Raises:
        ConfigError: MISTRALRS_CPU_KV_F32 is neither on nor off.
    """
    wanted = read_switch(
        environ, KV_SWITCH, default=False, unset="float16 where the CPU is fast with it"
    )
    if backend != "CpuBackend":
        return KvChoice(dtype=dtype, origin="the model's dtype")
    if wanted:
        return KvChoice(dtype="f32", origin=KV_SWITCH)
    if user_dtype:
        return KvChoice(dtype=dtype, origin="user's dtype")
    if not fast_halves:
        return KvChoice(dtype="f32", origin="this CPU is slow with f16")
    return KvChoice(dtype="f16", origin="automatic on cpu")
