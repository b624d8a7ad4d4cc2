"""Which backend attends to the paged KV cache: a pure choice that names every reason against."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Choice:
    """The backend that runs, and why the faster ones do not."""

    name: str
    """Class name, for `describe()`."""
    reasons: tuple[str, ...] = ()
    """One sentence per backend that was passed over."""


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
