"""The LoRA adapters of a running model: loaded, named, taken by requests, let go."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs

from mistralrs_sdk.adapters import (
    AdapterSelection,
    LoraAdapterInfo,
    LoraAdapterLoadPolicy,
    LoraAdapterSpec,
    LoraResidentGenerationInfo,
    LoraRuntimeConfig,
    LoraRuntimeStatus,
    check_alias,
)
from mistralrs_sdk.config import ModelSource, Progress
from mistralrs_sdk.errors import AdapterError, EngineClosedError, ModelLoadError
from mistralrs_sdk.layers.lora import LoraLayers, LoraWeights
from mistralrs_sdk.loading.hub import locate_adapter
from mistralrs_sdk.loading.loader import free_memory
from mistralrs_sdk.loading.peft import PeftAdapter, open_adapter


@attrs.frozen(kw_only=True, eq=False, weakref_slot=True)
class ResidentAdapter:
    """One generation in memory, for as long as an alias or a request holds it."""

    generation: str
    weights: LoraWeights
    rank: int
    bytes: int


@attrs.define(eq=False)
class AdapterLease:
    """The adapter a request was admitted with: it stays in memory until it is released."""

    generation: str
    adapter: ResidentAdapter | None

    @property
    def weights(self) -> LoraWeights:
        """What to add to the rows of the request."""
        assert self.adapter is not None, "a request ends before its lease does"
        return self.adapter.weights

    def release(self) -> None:
        """Let go of the weights, whoever still holds the lease."""
        self.adapter = None


class AdapterRegistry:
    """The adapters of one model by alias, within limits. Any thread may use it.

    An alias leads to a generation, which never changes: replacing an adapter, or taking it away,
    concerns requests that are admitted later. `limits` are None for a model without adapters, and
    `locate` finds the folder an adapter is in, downloading it if it must.
    """

    def __init__(
        self, limits: LoraRuntimeConfig | None, locate: Callable[[LoraAdapterSpec], Path]
    ) -> None:
        self._layers: LoraLayers | None = None
        self._closed = False
        self._limits = limits
        self._locate = locate
        self._named: dict[str, tuple[LoraAdapterInfo, ResidentAdapter]] = {}
        self._resident: weakref.WeakValueDictionary[str, ResidentAdapter] = (
            weakref.WeakValueDictionary()
        )
        self._loading = threading.Lock()
        """Held by the one load that runs, so that limits count what the others have taken."""
        self._lock = threading.Lock()

    def serve(self, layers: LoraLayers) -> None:
        """Take adapters for these layers from now on."""
        self._layers = layers

    def measure(self, specs: Iterable[LoraAdapterSpec], layers: LoraLayers) -> int:
        """Bytes that these would take in `layers`; equal ones count once. Reads headers only.

        Raises:
            ModelLoadError: one cannot be found or opened, does not fit the model, or is over a
                limit.
            UnsupportedError: one holds something this package does not do.
        """
        sizes: dict[str, int] = {}
        for spec in specs:
            opened = open_adapter(self._locate(spec), layers.targets)
            size = layers.num_bytes(opened.ranks)
            if opened.generation not in sizes and self._limits is not None:
                try:
                    _check_size(spec, opened, size, sum(sizes.values()), self._limits)
                except AdapterError as error:
                    raise ModelLoadError(str(error)) from error
            sizes[opened.generation] = size
        return sum(sizes.values())

    def load(
        self, spec: LoraAdapterSpec, policy: LoraAdapterLoadPolicy | None = None
    ) -> LoraAdapterInfo:
        """Read an adapter and give it its alias; takes as long as reading the files does.

        Raises:
            AdapterError: the policy or a limit forbids it, or the model takes no adapters.
            ModelLoadError: it cannot be found or read, does not fit the model, or into memory.
            UnsupportedError: it holds something this package does not do.
        """
        layers, limits = self._require()
        policy = policy or LoraAdapterLoadPolicy.Create()
        with self._loading:
            self._check_policy(spec.alias, policy, limits)  # before anything is fetched
            opened = open_adapter(self._locate(spec), layers.targets)
            adapter = self._resident.get(opened.generation)
            if adapter is None:
                adapter = self._read(spec, opened, layers=layers, limits=limits)
            info = LoraAdapterInfo(
                alias=spec.alias,
                source=spec.source,
                revision=spec.revision,
                generation=adapter.generation,
                rank=adapter.rank,
                bytes=adapter.bytes,
                base_model_name=spec.base_model_name,
            )
            with self._lock:
                self._require()  # it may have been closed meanwhile, or an alias taken away
                self._check_policy(spec.alias, policy, limits)
                self._named[spec.alias] = (info, adapter)
            return info

    def unload(self, alias: str, *, generation: str | None = None) -> LoraAdapterInfo:
        """Take an alias away, if given only from this generation. Running requests go on.

        Raises:
            AdapterError: there is no such alias, or it leads to another generation.
        """
        self._require()
        with self._lock:
            info, _ = self._find(alias)
            if generation is not None and info.generation != generation:
                raise _mismatch(info, generation)
            del self._named[alias]
            return info

    def infos(self) -> tuple[LoraAdapterInfo, ...]:
        """The loaded adapters, in the order of their aliases; none if the model takes none."""
        with self._lock:
            return tuple(info for _, (info, _) in sorted(self._named.items()))

    def status(self) -> LoraRuntimeStatus:
        """All adapters, and the weights in memory.

        Raises:
            AdapterError: the model takes no adapters.
        """
        _, limits = self._require()
        infos = self.infos()
        generations = tuple(
            LoraResidentGenerationInfo(
                generation=adapter.generation,
                rank=adapter.rank,
                bytes=adapter.bytes,
                aliases=tuple(i.alias for i in infos if i.generation == adapter.generation),
            )
            for adapter in list(self._resident.values())
        )
        return LoraRuntimeStatus(
            adapters=infos,
            generations=generations,
            resident_bytes=sum(generation.bytes for generation in generations),
            limits=limits,
        )

    def lease(self, wanted: str | None) -> AdapterLease | None:
        """The adapter for a request that is admitted now; None for the base model.

        `wanted` is an alias or the generation of a loaded adapter.

        Raises:
            AdapterError: it is not loaded; the message lists what is.
        """
        if wanted is None:
            return None
        self._require()
        selection = AdapterSelection.parse(wanted)
        with self._lock:
            if selection.alias is not None:
                _, adapter = self._find(selection.alias)
                return AdapterLease(adapter.generation, adapter)
            for info, adapter in self._named.values():
                if info.generation == wanted:
                    return AdapterLease(wanted, adapter)
            raise AdapterError(
                f"no adapter has generation {wanted}; {self._known()}", kind="generation_not_found"
            )

    def close(self) -> None:
        """Forget all adapters, and the model; whoever asks for one gets `EngineClosedError`."""
        with self._lock:
            self._closed = True
            self._layers = None
            self._named.clear()

    def _read(
        self,
        spec: LoraAdapterSpec,
        opened: PeftAdapter,
        *,
        layers: LoraLayers,
        limits: LoraRuntimeConfig,
    ) -> ResidentAdapter:
        """Bring an opened adapter into memory, if it may have its place."""
        size = layers.num_bytes(opened.ranks)
        taken = sum(adapter.bytes for adapter in list(self._resident.values()))
        _check_size(spec, opened, size, taken, limits)
        free = free_memory(layers.device)
        if size > free:
            raise ModelLoadError(
                f"adapter {spec.alias!r} takes {size / 2**20:.0f} MiB and {free / 2**20:.0f} MiB "
                f"are free on {layers.device}: unload another"
            )
        try:
            weights = layers.make(opened.load())
        except ValueError as error:
            raise ModelLoadError(f"adapter {spec.alias!r} in {spec.source}: {error}") from error
        adapter = ResidentAdapter(
            generation=opened.generation, weights=weights, rank=opened.rank, bytes=size
        )
        self._resident[adapter.generation] = adapter
        return adapter

    def _require(self) -> tuple[LoraLayers, LoraRuntimeConfig]:
        if self._closed:
            raise EngineClosedError("the model was closed")
        if self._layers is None or self._limits is None:
            raise AdapterError(
                "the model takes no adapters: build it with with_lora(), or leave the adapter out "
                "for the base model",
                kind="runtime_unavailable",
            )
        return self._layers, self._limits

    def _check_policy(
        self, alias: str, policy: LoraAdapterLoadPolicy, limits: LoraRuntimeConfig
    ) -> None:
        check_alias(alias)
        there = self._named.get(alias)
        if policy.kind == "compare_and_swap":
            info = self._find(alias)[0] if there is None else there[0]
            if info.generation != policy.generation:
                raise _mismatch(info, policy.generation)
        if there is not None and policy.kind == "create":
            raise AdapterError(
                f"adapter {alias!r} is loaded already, from {there[0].source}: unload it, or load "
                "with LoraAdapterLoadPolicy.Upsert()",
                kind="already_loaded",
            )
        if there is None and len(self._named) >= limits.max_adapters:
            raise AdapterError(
                f"adapter {alias!r} would be one too many: max_adapters is {limits.max_adapters}; "
                "unload another, or raise it in LoraRuntimeConfig",
                kind="adapter_limit",
            )

    def _find(self, alias: str) -> tuple[LoraAdapterInfo, ResidentAdapter]:
        if alias not in self._named:
            raise AdapterError(f"adapter {alias!r} is unknown; {self._known()}", kind="not_found")
        return self._named[alias]

    def _known(self) -> str:
        names = ", ".join(map(repr, sorted(self._named)))
        return f"loaded are {names}" if names else "none is loaded: load it with load_adapter"


def _check_size(
    spec: LoraAdapterSpec, opened: PeftAdapter, size: int, taken: int, limits: LoraRuntimeConfig
) -> None:
    """Refuse an adapter of `size` bytes that a limit forbids beside `taken` bytes of others."""
    if opened.rank > limits.max_rank:
        raise AdapterError(
            f"adapter {spec.alias!r} has rank {opened.rank}: max_rank is {limits.max_rank}; "
            "raise it in LoraRuntimeConfig",
            kind="rank_limit",
        )
    if size + taken > limits.max_bytes:
        raise AdapterError(
            f"adapter {spec.alias!r} takes {size} bytes beside {taken} of others: max_bytes is "
            f"{limits.max_bytes}; unload another, or raise it in LoraRuntimeConfig",
            kind="byte_limit",
        )


def locator(source: ModelSource, progress: Progress | None) -> Callable[[LoraAdapterSpec], Path]:
    """Make what finds the folder of an adapter, with the cache and the token of the model."""

    def locate(spec: LoraAdapterSpec) -> Path:
        place = ModelSource(
            model_id=spec.source,
            revision=spec.revision,
            cache_path=source.cache_path,
            token_source=source.token_source,
        )
        return locate_adapter(place, progress)

    return locate


def _mismatch(info: LoraAdapterInfo, wanted: str | None) -> AdapterError:
    return AdapterError(
        f"adapter {info.alias!r} is generation {info.generation}, not {wanted}: look it up again "
        "with list_adapters",
        kind="generation_mismatch",
    )
