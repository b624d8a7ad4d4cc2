"""What FlashInfer's two paged wrappers do, in torch on a CPU, refusing what the kernels refuse.

`FlashInferReference` stands for the module. It checks the order of calls, the types, places and
contents of the index arrays, and that options are given by name; then it computes in float32.
Like the kernels it reads, at each run, the buffers that the last plan has filled.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

HEAD_DIMS = (64, 128, 256, 512)
ADVISED_WORKSPACE = 128 * 2**20
PLAN_WORKSPACE = 8 * 2**20
NAMED = {"sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "causal"}
"""The options of a plan that are used; each must be given by its name."""


class FlashInferReference:
    """The module. `any_shape` also takes float32 and heads of any size, for comparisons.

    `calls` are the names of what was called, in order; others may write into it too.
    """

    def __init__(self, *, any_shape: bool = False) -> None:
        self.calls: list[str] = []
        self.wrappers: list[_Wrapper] = []
        self.BatchDecodeWithPagedKVCacheWrapper = self._maker(_Decode, any_shape)
        self.BatchPrefillWithPagedKVCacheWrapper = self._maker(_Prefill, any_shape)

    def _maker(self, kind: type[_Wrapper], any_shape: bool) -> Any:
        @functools.wraps(kind.__init__)
        def make(*args: Any, **options: Any) -> _Wrapper:
            wrapper = kind(*args, **options)
            wrapper.any_shape = any_shape
            wrapper.calls = self.calls
            self.wrappers.append(wrapper)
            return wrapper

        return make


class _Wrapper:
    """What both have in common: a layout, a plan, and attention over the planned pages."""

    any_shape: bool
    calls: list[str]
    name: str

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, graph: bool) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= ADVISED_WORKSPACE
        assert not float_workspace_buffer[:: 2**12].any(), "zeros at first"
        assert kv_layout in ("NHD", "HND")
        self.workspace, self.plan_workspace = float_workspace_buffer, PLAN_WORKSPACE
        self.layout, self.graph = kv_layout, graph
        self.buffers: dict[str, Tensor] = {}
        self.options: dict[str, Any] = {}
        self.plans = 0

    def reset_workspace_buffer(self, float_workspace: Tensor, int_workspace: Tensor) -> None:
        assert float_workspace.dtype == int_workspace.dtype == torch.uint8
        self.workspace, self.plan_workspace = float_workspace, int_workspace.numel()

    def _plan(
        self,
        starts: Tensor,
        tables: tuple[Tensor, Tensor, Tensor],
        shape: tuple[int, int, int, int],
        options: dict[str, Any],
    ) -> None:
        """`tables` are indptr, indices and last_page_len; `shape` heads, KV heads, size, page."""
        indptr, indices, last = tables
        heads, kv_heads, head_dim, page = shape
        for array in (starts, *tables):
            assert array.dtype == torch.int32
            assert array.ndim == 1
            assert array.is_contiguous()
        assert all(array.device.type == "cpu" for array in (starts, indptr, last))
        sequences = len(last)
        assert len(indptr) == len(starts) == sequences + 1
        assert indptr[0] == starts[0] == 0
        assert (indptr.diff() >= 1).all(), "each sequence has pages"
        assert (starts.diff() >= 1).all(), "each sequence has rows"
        assert len(indices) == indptr[-1]
        assert ((last >= 1) & (last <= page)).all()
        lengths = (indptr.diff() - 1) * page + last
        assert (starts.diff() <= lengths).all(), "rows are the last tokens of a sequence"
        assert heads % kv_heads == 0
        assert set(options) <= NAMED
        assert {"q_data_type", "kv_data_type", "sm_scale"} <= set(options)
        q_type, kv_type = options["q_data_type"], options["kv_data_type"]
        if not self.any_shape:
            assert head_dim in HEAD_DIMS
            assert q_type in (torch.float16, torch.bfloat16)
            assert kv_type in (q_type, torch.float8_e4m3fn, torch.float8_e5m2)
        arrays = {"starts": starts, "indptr": indptr, "indices": indices, "last": last}
        if self.graph:
            assert sequences == len(self.buffers["last"]), "a graph has one size"
            assert len(indices) <= len(self.buffers["indices"])
            for name, array in arrays.items():
                if name in self.buffers:
                    self.buffers[name][: len(array)].copy_(array)
        else:
            self.buffers = {name: array.clone() for name, array in arrays.items()}
        self.shape, self.options = shape, options
        self.plans += 1
        self.calls.append(f"plan {self.name}")

    def _run(self, q: Tensor, paged_kv_cache: Any, *, causal: bool) -> Tensor:
        assert self.plans, "planned before it runs"
        heads, kv_heads, head_dim, page = self.shape
        split = paged_kv_cache.unbind(1) if isinstance(paged_kv_cache, Tensor) else paged_kv_cache
        keys, values = split
        assert keys.dtype == values.dtype == self.options["kv_data_type"]
        assert q.dtype == self.options["q_data_type"]
        assert keys.stride() == values.stride()
        if self.layout == "HND":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        assert keys.shape[1:] == values.shape[1:] == (page, kv_heads, head_dim)
        starts, indptr = self.buffers["starts"].tolist(), self.buffers["indptr"].tolist()
        assert q.shape == (starts[-1], heads, head_dim)
        self.calls.append(f"run {self.name}")
        out = torch.empty_like(q)
        for i, last in enumerate(self.buffers["last"].tolist()):
            pages = self.buffers["indices"][indptr[i] : indptr[i + 1]].long()
            assert ((pages >= 0) & (pages < len(keys))).all(), "pages of the cache"
            length = (len(pages) - 1) * page + last
            # gathered before it is converted: the rest of a page is never read
            k, v = (store[pages].flatten(0, 1)[:length].float() for store in (keys, values))
            rows = slice(starts[i], starts[i + 1])
            out[rows] = self._attend(q[rows].float(), k, v, causal=causal).to(q.dtype)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        heads, kv_heads = self.shape[:2]
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.options["sm_scale"]
        cap = self.options.get("logits_soft_cap") or 0.0
        if cap > 0:
            scores = cap * torch.tanh(scores / cap)
        row = torch.arange(len(k) - len(q), len(k))[:, None]  # aligned to the last key
        key = torch.arange(len(k))[None]
        seen = key <= row if causal else torch.ones(len(q), len(k), dtype=torch.bool)
        window = self.options.get("window_left", -1)
        if window >= 0:
            seen &= key >= row - window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


class _Decode(_Wrapper):
    """BatchDecodeWithPagedKVCacheWrapper: one row per sequence, which sees all its keys."""

    name = "decode"

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self.use_tensor_cores = use_tensor_cores
        if use_cuda_graph:
            buffers = {
                "indptr": paged_kv_indptr_buffer,
                "indices": paged_kv_indices_buffer,
                "last": paged_kv_last_page_len_buffer,
            }
            for name, buffer in buffers.items():
                assert buffer is not None
                assert buffer.dtype == torch.int32
                assert not buffer.is_inference(), "it is written to outside of inference mode too"
                self.buffers[name] = buffer
            assert len(self.buffers["indptr"]) == len(self.buffers["last"]) + 1
            self.buffers["starts"] = torch.arange(len(self.buffers["indptr"]), dtype=torch.int32)

    def plan(self, *args: Any, **options: Any) -> None:
        assert len(args) == 7, "what follows the size of a page has a name"
        indptr, indices, last, heads, kv_heads, head_dim, page = args
        assert "causal" not in options
        assert self.use_tensor_cores or heads // kv_heads in (1, 2, 3, 4, 6, 8, 16)
        starts = torch.arange(len(last) + 1, dtype=torch.int32)
        self._plan(starts, (indptr, indices, last), (heads, kv_heads, head_dim, page), options)

    def run(self, q: Tensor, paged_kv_cache: Any) -> Tensor:
        return self._run(q, paged_kv_cache, causal=False)


class _Prefill(_Wrapper):
    """BatchPrefillWithPagedKVCacheWrapper, without graphs: any number of rows per sequence."""

    name = "prefill"

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto"
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, graph=False)

    def plan(self, *args: Any, **options: Any) -> None:
        assert len(args) == 8, "what follows the size of a page has a name"
        starts, indptr, indices, last, heads, kv_heads, head_dim, page = args
        assert "causal" in options, "False by itself"
        self._plan(starts, (indptr, indices, last), (heads, kv_heads, head_dim, page), options)

    def run(self, q: Tensor, paged_kv_cache: Any) -> Tensor:
        return self._run(q, paged_kv_cache, causal=self.options["causal"])
