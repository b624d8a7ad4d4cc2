"""Attention through FlashInfer's paged kernels on NVIDIA GPUs: planned once a step, run per layer.

A batch in which every sequence has one row takes the decode kernels; any other takes the prefill
kernels, in which a decode is a prompt of one row. Window, softcap and scale are settled when a step
is planned, so there is one wrapper, as FlashInfer calls its planned kernels, per distinct
`AttentionSpec`. What FlashInfer calls a page is a block here.

Keys and values are written with `index_copy_` at the batch's slots. FlashInfer's own function for
that needs each row's sequence and position on the device, which a Triton kernel works out;
`index_copy_` needs what a batch has anyway, can be captured in a CUDA graph, and compiles nothing.
Pages are laid out token by token ("NHD"), since in that layout a slot is a row of memory.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, cast

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.attention.backend import AttentionSpec, Batch, Rotation
from mistralrs_sdk.attention.kv_cache import PagedKVCache, untouched_zeros
from mistralrs_sdk.attention.page_tables import Event, PageTables

LEAST_WORKSPACE = 128 * 2**20
"""Bytes FlashInfer advises for what its kernels keep between two passes over a long context."""
PLAN_BYTES = 2**20
"""For the plan of a graph: some 20 bytes for each sequence, or each block that runs at once.

FlashInfer gives a wrapper 8 MiB, on the device and pinned: too much for one per size of graph."""
_TRIED_ROWS = (1, 2, 256)
"""A decode, a short and a long prompt: FlashInfer has different kernels for them."""


class FlashInferOps(Protocol):
    """What is used of the module `flashinfer`."""

    BatchDecodeWithPagedKVCacheWrapper: Any
    BatchPrefillWithPagedKVCacheWrapper: Any


class FlashInferBackend:
    """Attends to a `PagedKVCache` that is as the model computes, or float8_e4m3fn.

    Activations are float16 or bfloat16. With a float8 cache keys and values are rounded when they
    are written, without a scale (what lies beyond 448 becomes 448).

    `specs` are those of the layers, in order. `max_num_seqs` and `max_model_len` bound the buffers
    of graphs. `ops` is the module `flashinfer` if not given; `make_event` makes an event that is
    recorded in the stream that computes.
    """

    supports_graphs: ClassVar[bool] = True

    def __init__(
        self,
        cache: PagedKVCache,
        specs: Sequence[AttentionSpec],
        *,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_model_len: int,
        ops: FlashInferOps | None = None,
        make_event: Callable[[], Event] | None = None,
    ) -> None:
        device = cache.device
        self._cache = cache
        self._specs = tuple(specs)
        self._distinct = tuple(dict.fromkeys(specs))
        self._dtype = dtype
        self._blocks_per_sequence = min(-(-max_model_len // cache.block_size), cache.num_blocks)
        self._ops = _flashinfer() if ops is None else ops
        if make_event is None and device.type == "cuda":
            make_event = functools.partial(_CurrentStreamEvent, device)
        self._pages = PageTables(cache.block_size, device, make_event=make_event)
        size = workspace_on(device, self._distinct, max_num_seqs=max_num_seqs)
        with torch.inference_mode(False):
            # Shared by all wrappers, of which no two run at once; zeros, as FlashInfer asks for.
            self._workspace = untouched_zeros((size,), dtype=torch.uint8, device=device)
        self._decodes: dict[AttentionSpec, Any] = {}
        self._prefills: dict[AttentionSpec, Any] = {}
        self._graphs: dict[int, dict[AttentionSpec, Any]] = {}
        self._planned: dict[AttentionSpec, Any] = {}

    def plan(self, batch: Batch, *, graph_size: int | None = None) -> None:
        """Prepare for `batch`; never while a graph is captured.

        Rows that pad the batch of a graph stand at slot 0, with one token in block 0.
        """
        rows, sequences = batch.query_start[-1], len(batch.seq_lens)
        if graph_size is not None and not graph_size == rows == sequences:
            raise ValueError(
                f"graph_size ({graph_size}) needs a batch of as many sequences with one token "
                f"each, and this one has {sequences} with {rows} tokens: pad it, or plan without"
            )
        self._slots = batch.slot_mapping
        pages = self._pages.fill(batch)
        tables = (pages.indptr, pages.indices, pages.last_page_len)
        try:
            # What FlashInfer allocates for a wrapper is written to in later steps, in any mode.
            with torch.inference_mode(False):
                if graph_size is not None:
                    self._planned = self._graph(graph_size)
                    self._plan_each(self._decode_wrapper, *tables)
                elif rows == sequences:
                    self._planned = self._decodes
                    self._plan_each(self._decode_wrapper, *tables)
                else:
                    self._planned = self._prefills
                    # Causal is aligned to the last key, so that a chunk sees what came before it.
                    tables = (pages.query_start, *tables)
                    self._plan_each(self._prefill_wrapper, *tables, causal=True)
        finally:
            # FlashInfer's plans copy out of pinned memory of their own, which the next ones
            # overwrite: the event stands for those copies too.
            self._pages.copies_started()

    def run(
        self,
        spec: AttentionSpec,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotation: Rotation | None = None,
    ) -> Tensor:
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        cache = self._cache
        cache.store(layer, self._slots, k, v)
        return self._planned[spec].run(q.contiguous(), (cache.k[layer], cache.v[layer]))

    @torch.inference_mode()
    def try_out(self) -> None:
        """Run every kernel once, on the null block: those that are missing are compiled.

        Raises:
            Exception: whatever FlashInfer raises if it cannot compile or run one.
        """
        cache, device = self._cache, self._cache.device
        layers = {spec: self._specs.index(spec) for spec in self._distinct}
        for rows in _TRIED_ROWS:
            zeros = torch.zeros(rows, dtype=torch.int64, device=device)
            self.plan(
                Batch(
                    input_ids=zeros,
                    positions=zeros,
                    slot_mapping=zeros,
                    logits_indices=zeros[:1],
                    query_start=[0, rows],
                    seq_lens=[rows],
                    block_tables=[[0] * -(-rows // cache.block_size)],
                )
            )
            for spec, layer in layers.items():
                shape = (rows, spec.num_heads, spec.head_dim)
                q = torch.zeros(shape, dtype=self._dtype, device=device)
                k = q[:, : spec.num_kv_heads]
                self.run(spec, layer, q, k, k)
        if device.type == "cuda":
            # The stream, not the device: another model may be capturing a graph there.
            torch.cuda.current_stream(device).synchronize()

    def _plan_each(
        self, make: Callable[[AttentionSpec], Any], *tables: Tensor, **more: Any
    ) -> None:
        """Plan the wrappers that run next; `make` makes one for a spec that has none yet."""
        for spec in self._distinct:
            wrapper = self._planned.get(spec)
            if wrapper is None:
                wrapper = self._planned[spec] = make(spec)
            wrapper.plan(
                *tables,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                self._cache.block_size,
                **more,
                **self._settings(spec),
            )

    def _settings(self, spec: AttentionSpec) -> dict[str, Any]:
        """The arguments of a plan that FlashInfer wants by name; its default for q is float16."""
        return {
            "sm_scale": spec.scale,
            "window_left": -1 if spec.window is None else spec.window - 1,  # itself not counted
            "logits_soft_cap": spec.softcap,
            "q_data_type": self._dtype,
            "kv_data_type": self._cache.dtype,
        }

    def _graph(self, size: int) -> dict[AttentionSpec, Any]:
        """The wrappers for graphs of that many sequences, whose buffers stay where they are."""
        wrappers = self._graphs.get(size)
        if wrappers is not None:
            return wrappers
        device = self._cache.device
        sizes = {"indptr": size + 1, "indices": size * self._blocks_per_sequence}
        sizes["last_page_len"] = size
        # One set for all specs: their tables are the same.
        buffers = {
            f"paged_kv_{name}_buffer": torch.zeros(count, dtype=torch.int32, device=device)
            for name, count in sizes.items()
        }
        wrappers = self._graphs[size] = {}
        for spec in self._distinct:
            wrapper = self._decode_wrapper(spec, use_cuda_graph=True, **buffers)
            plans = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device)
            wrapper.reset_workspace_buffer(self._workspace, plans)
            wrappers[spec] = wrapper
        return wrappers

    def _decode_wrapper(self, spec: AttentionSpec, **graph: Any) -> Any:
        return self._ops.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            kv_layout="NHD",
            use_tensor_cores=_wants_tensor_cores(spec, self._cache.dtype),
            backend="fa2",  # "auto" may turn to others, which refuse some shapes and graphs
            **graph,
        )

    def _prefill_wrapper(self, _spec: AttentionSpec) -> Any:
        return self._ops.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="NHD")


def workspace_on(device: torch.device, specs: Sequence[AttentionSpec], *, max_num_seqs: int) -> int:
    """As `workspace_bytes`, with what `device` is if that is a GPU."""
    if device.type != "cuda":
        return workspace_bytes(specs, max_num_seqs=max_num_seqs)
    properties = torch.cuda.get_device_properties(device)
    return workspace_bytes(
        specs,
        max_num_seqs=max_num_seqs,
        num_sms=properties.multi_processor_count,
        turing=properties.major < 8,
    )


def workspace_bytes(
    specs: Sequence[AttentionSpec], *, max_num_seqs: int, num_sms: int = 0, turing: bool = False
) -> int:
    """Bytes of workspace that no step needs more of, on a GPU with `num_sms` processors.

    A kernel that divides contexts keeps partial sums in float32: of at most two tiles of 128 rows
    per processor, or in a graph, of two tiles per sequence. These have 16 rows, or 64 on GPUs
    before Ampere and for more than 16 heads per key. All FlashInfer versions that are accepted
    stay within this; the later ones by far.
    """
    most = LEAST_WORKSPACE
    for spec in specs:
        tiles = -(-2 * num_sms // spec.num_kv_heads)
        group = spec.num_heads // spec.num_kv_heads
        tile = 16 if group <= 16 and not turing else 64
        rows = max(tiles * 128, max(tiles, 2 * max_num_seqs) * tile)
        most = max(most, spec.num_heads * rows * (spec.head_dim + 1) * 4)
    return -(-most // 256) * 256


def flashinfer_missing() -> str | None:
    """Why the module `flashinfer` cannot be used; None if it can. Imports it, which takes seconds.

    Whether its kernels compile is seen when one is tried.
    """
    if importlib.util.find_spec("flashinfer") is None:
        return 'flashinfer-python is not installed: pip install "mistralrs_sdk[cuda]"'
    try:
        _flashinfer()
    except Exception as error:  # it loads libraries and asks the driver: anything may come
        return f"flashinfer cannot be imported ({type(error).__name__}: {error})"
    return None


def _flashinfer() -> FlashInferOps:
    import flashinfer  # the package: imports here are absolute

    return cast(Any, flashinfer)  # type checkers take this very file for it


def _wants_tensor_cores(spec: AttentionSpec, kv_dtype: torch.dtype) -> bool:
    """Whether decodes use the tensor cores: the other kernel has groups of 1, 2 and 3 here.

    From 4 heads on that share their keys the tensor cores are faster, and always with float8.
    """
    return kv_dtype.itemsize == 1 or spec.num_heads // spec.num_kv_heads >= 4


@attrs.define(eq=False)
class _CurrentStreamEvent:
    """An event of the stream in which `device` computes."""

    _device: torch.device
    _event: torch.cuda.Event = attrs.field(init=False, factory=torch.cuda.Event)

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()
