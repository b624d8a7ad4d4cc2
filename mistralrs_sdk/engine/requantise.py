"""Requantises the weights of a running model, read again from the files it was loaded from."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from mistralrs_sdk.config import EngineConfig, ModelSource, Progress
from mistralrs_sdk.engine.build import EngineInfo
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.memory import release_cached
from mistralrs_sdk.engine.model_runner import ModelRunner
from mistralrs_sdk.engine.quantising import has_device_kernels, refuse_quantising
from mistralrs_sdk.engine.settle import TORCH_DTYPES
from mistralrs_sdk.errors import (
    ConfigError,
    EngineClosedError,
    MistralRsError,
    ModelLoadError,
    UnsupportedError,
)
from mistralrs_sdk.isq import Isq
from mistralrs_sdk.loading.checkpoint import Checkpoint, TensorSource
from mistralrs_sdk.loading.forms import (
    Form,
    choose_forms,
    forms_as_kept,
    quantise_target,
)
from mistralrs_sdk.loading.imatrix import importance_of
from mistralrs_sdk.loading.loader import free_memory, open_checkpoint
from mistralrs_sdk.loading.progress import progress_of
from mistralrs_sdk.loading.weights import bytes_to_read, fill
from mistralrs_sdk.machine import is_out_of_memory
from mistralrs_sdk.models import build_model
from mistralrs_sdk.models.decoder import CausalLM
from mistralrs_sdk.topology import refuse_unused_imatrix


@attrs.frozen
class WeightFiles:
    """The files a model was loaded from, and what they were then; nothing keeps them open.

    A file that stayed mapped would count as memory of this process.
    """

    source: ModelSource
    stamps: Mapping[Path, tuple[int, int]]
    """Size and time of the last change of each file, whose path is absolute."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, source: ModelSource) -> WeightFiles:
        """Of a checkpoint that was just opened; `source` says with which tokenizer."""
        files = [file.absolute() for file in checkpoint.files]
        first = files[0]
        path = first.parent if first.suffix == ".safetensors" else first
        tokenizer = source.tokenizer_json
        return cls(
            ModelSource(
                model_id=str(path),
                tokenizer_json=tokenizer and str(Path(tokenizer).expanduser().absolute()),
            ),
            {file: _stamp(file) for file in files},
        )

    def reopen(self) -> Checkpoint:
        """Open them again.

        Raises:
            ModelLoadError: a file is gone or has changed.
        """
        for file, stamp in self.stamps.items():
            try:
                changed = _stamp(file) != stamp
            except OSError as error:
                raise ModelLoadError(
                    f"{file} cannot be read again ({error.strerror or error}), and the model is "
                    "requantised from it: put it back, or build the model again"
                ) from error
            if changed:
                raise ModelLoadError(
                    f"{file} has changed since the model was loaded from it: build the model again"
                )
        return open_checkpoint(self.source)


class Requantiser:
    """Changes the types that a running model's weights are kept in.

    `info` says what runs now. It is replaced as a whole, so any thread may read it; `run` is for
    the engine's thread.
    """

    def __init__(self, info: EngineInfo, files: WeightFiles) -> None:
        self.info = info
        self._files = files
        self._imatrix = info.config.imatrix

    def run(
        self,
        engine: Engine,
        isq: Isq,
        *,
        progress: Progress | None = False,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Requantise what is kept in another type than a model built with `isq` has.

        One weight is held besides the model while it is read. Running sequences compute their keys
        and values again. `cancelled` is asked before each weight.

        Raises:
            ConfigError, UnsupportedError, ModelLoadError: nothing was changed, or reading failed
                and the message says how far it came; each weight is then the old or the new one.
            EngineClosedError: it was cancelled.
        """
        built = self.info.config
        for name, there in (
            ("tensor_parallel", built.tensor_parallel > 1),
            ("device_mapping", built.device_mapping is not None),
        ):
            if there:
                raise UnsupportedError(
                    f"re_isq_model is not done with {name} ({getattr(built, name)}): build the "
                    "model again, with with_isq"
                )
        runner = cast(ModelRunner, engine.runner)
        model = cast(CausalLM, runner.model)
        device, dtype_kind = runner.device, self.info.config.dtype
        refuse_quantising("re_isq_model", [isq], device=device, dtype=dtype_kind)
        imatrix = self._imatrix_for(isq)
        config = attrs.evolve(self.info.config, isq=isq, imatrix=imatrix)
        checkpoint = self._files.reopen()
        importance = None if imatrix is None else importance_of(checkpoint, imatrix)
        with torch.device("meta"):
            fresh = build_model(model.config)
        dtype = TORCH_DTYPES[config.dtype]
        wanted = choose_forms(
            fresh,
            checkpoint,
            dtype=dtype,
            packing=self.info.packing,
            target=quantise_target(config.isq, config.topology, on_cuda=has_device_kernels(device)),
        )
        kept = dict(self.info.forms)
        changed = [name for name, form in wanted.items() if form != kept[name]]
        self._refuse_size(changed, wanted, checkpoint.tensors, isq=isq, device=device)
        if changed:
            engine.scheduler.forget_kv()
            runner.forget_recordings()
        done = 0
        try:
            total = sum(wanted[name].num_bytes for name in changed)
            what = f"requantising {Path(self._files.source.model_id).name}"
            with progress_of(progress, what, total=total) as advance:
                for name in changed:
                    if cancelled():
                        raise EngineClosedError(
                            f"the model was closed while re_isq_model({isq.value}) ran"
                        )
                    _replace(
                        model,
                        fresh,
                        name,
                        wanted[name],
                        tensors=checkpoint.tensors,
                        importance=importance,
                        dtype=dtype,
                        device=device,
                    )
                    kept[name] = forms_as_kept({name: wanted[name]}, model, dtype=dtype)[name]
                    done += 1
                    advance(wanted[name].num_bytes)
        except Exception as error:
            reached = f"re_isq_model({isq.value}) stopped after {done} of {len(changed)} weights"
            self._describe(self.info.config, kept, isq=reached)
            if isinstance(error, EngineClosedError):
                raise
            raise ModelLoadError(_failure(reached, error)) from error
        finally:
            _give_memory_back()
            release_cached(device)
        self._describe(config, kept, isq="re_isq_model")

    def _imatrix_for(self, isq: Isq) -> str | None:
        """The importance matrix the model was built with, if the types that are wanted use one."""
        if self._imatrix is None:
            return None
        with contextlib.suppress(ConfigError):
            refuse_unused_imatrix(self._imatrix, isq=isq, topology=self.info.config.topology)
            return self._imatrix
        return None

    def _refuse_size(
        self,
        changed: Collection[str],
        wanted: Mapping[str, Form],
        tensors: Mapping[str, TensorSource],
        *,
        isq: Isq,
        device: torch.device,
    ) -> None:
        grown = needed = 0
        for name in changed:
            size = wanted[name].num_bytes
            needed = max(needed, grown + size + bytes_to_read(wanted[name], tensors))
            grown += size - self.info.forms[name].num_bytes
        free = free_memory(device)
        if needed > free:
            raise ModelLoadError(
                f"re_isq_model({isq.value}) does not fit: it takes up to {needed / 2**30:.2f} GiB "
                f"more and {free / 2**30:.2f} GiB are free on {device}; the model is unchanged: "
                "choose a smaller type, or free memory"
            )

    def _describe(self, config: EngineConfig, forms: Mapping[str, Form], **origins: str) -> None:
        """Publish what runs now."""
        if config.imatrix is None and self._imatrix is not None:
            origins["imatrix"] = "not used by this type"
        kept = {k: v for k, v in self.info.origins.items() if k not in ("isq", "imatrix")}
        self.info = attrs.evolve(
            self.info,
            config=config,
            origins=kept | origins,
            forms=forms,
        )


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _replace(
    model: nn.Module,
    fresh: nn.Module,
    name: str,
    form: Form,
    *,
    tensors: Mapping[str, TensorSource],
    importance: Mapping[str, Tensor] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Fill a weight of `fresh` and put its module in the place of the model's."""
    path = name.rpartition(".")[0]
    parent, _, leaf = path.rpartition(".")
    module = cast(Any, fresh.get_submodule(path))
    module.bias = cast(Any, model.get_submodule(path)).bias
    fill(
        fresh,
        name,
        form,
        tensors=tensors,
        dtype=dtype,
        device=device,
        importance=importance,
    )
    setattr(model.get_submodule(parent), leaf, module.eval())  # in one go: the old one or the new


def _give_memory_back() -> None:
    """Return what the old weights took to the system, which glibc would keep for itself."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # musl has none
            trim(0)


def _failure(reached: str, error: Exception) -> str:
    if is_out_of_memory(error):
        cause = "memory ran out"
    else:
        kind = "" if isinstance(error, MistralRsError) else f"{type(error).__name__}: "
        cause = f"{kind}{error}"
    return (
        f"{reached} ({cause}); those are of the new type, the others as before, and the model goes "
        "on with them: call it again, with this type or the old one, to make all alike"
    )
