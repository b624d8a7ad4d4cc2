"""Low-rank adapters: what each adds to the linear layers, for some rows of a step."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from mistralrs_sdk.kernels import matmul
from mistralrs_sdk.kernels.lora import LowRank, LowRankPart, LowRankTable, Spans, add_low_rank
from mistralrs_sdk.layers.linear import Addition, Linear, MergedLinear


@attrs.frozen(kw_only=True)
class LoraTarget:
    """A matrix that an adapter can change: a linear layer, or one part of a fused one."""

    module: int
    """Number of the layer among those of `LoraLayers`."""
    rows: slice
    """Where its outputs are among that layer's."""
    in_features: int

    @property
    def out_features(self) -> int:
        return self.rows.stop - self.rows.start


@attrs.frozen(kw_only=True, eq=False)
class LoraPair:
    """The two matrices an adapter has for one target: it adds `scale * x @ a.T @ b.T`."""

    a: Tensor
    """[rank, in_features]."""
    b: Tensor
    """[out_features, rank]."""
    scale: float


@attrs.frozen(eq=False)
class LoraWeights:
    """All that one adapter adds, layer by layer as `LoraLayers` numbers them."""

    packed: LowRankTable | None
    """In float16, for the native kernels."""
    dense: tuple[tuple[_DensePart, ...], ...] = ()
    """Otherwise, of each layer the parts that it changes."""


class LoraLayers:
    """The linear layers of a model that adapters can change.

    Each is known by its name in a checkpoint, such as "model.layers.0.self_attn.q_proj", also
    where the model has fused it with others. The head is none of them.

    With `packed` an adapter's matrices are float16 for the native kernels, whose sums do not depend
    on the number of rows; otherwise they are dense, in `dtype`.
    """

    def __init__(
        self, model: nn.Module, *, packed: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device = device
        self.targets: dict[str, LoraTarget] = {}
        self._packed = packed
        self._dtype = dtype
        self._places: list[tuple[Mapping[str, Any], str]] = []
        """The modules each layer is among and its name there: the layer itself may be replaced."""
        self._additions: list[list[Addition]] = []
        self._step = _Step(packed)
        for name, module in model.named_modules():
            parent, _, leaf = name.rpartition(".")
            if not isinstance(module, Linear) or leaf == "lm_head":
                continue
            parts = [leaf]
            rows = [slice(0, module.out_features)]
            if isinstance(module, MergedLinear):
                parts = list(module.parts)
                rows = [module.rows(part) for part in parts]
            for part, where in zip(parts, rows, strict=True):
                self.targets[f"{parent}.{part}"] = LoraTarget(
                    module=len(self._places), rows=where, in_features=module.in_features
                )
            self._additions.append([functools.partial(self._step.add, number=len(self._places))])
            self._places.append((model.get_submodule(parent)._modules, leaf))

    def num_bytes(self, ranks: Mapping[str, int]) -> int:
        """Memory that `make` takes for matrices of these ranks, by the target's name."""
        joined: dict[int, int] = {}
        total = 0
        for name, rank in ranks.items():
            target = self.targets[name]
            joined[target.module] = joined.get(target.module, 0) + rank
            total += self._matrix_bytes(target.out_features, rank)
        sizes = {target.module: target.in_features for target in self.targets.values()}
        return total + sum(self._matrix_bytes(r, sizes[module]) for module, r in joined.items())

    def make(self, pairs: Mapping[str, LoraPair]) -> LoraWeights:
        """Put an adapter's matrices, by the target's name, in the form that is computed with.

        Raises:
            ValueError: a matrix holds values that are no finite numbers, or too great for float16.
        """
        found: list[list[tuple[LoraTarget, LoraPair]]] = [[] for _ in self._places]
        for name, target in self.targets.items():
            if name in pairs:
                pair = pairs[name]
                try:
                    found[target.module].append((target, self._prepare(pair)))
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        if self._packed:
            return LoraWeights(LowRankTable([self._pack(own) for own in found]))
        return LoraWeights(None, tuple(tuple(self._keep(*part) for part in own) for own in found))

    @contextmanager
    def adding(self, spans: Sequence[tuple[int, int, LoraWeights]]) -> Iterator[None]:
        """Let each adapter add to the rows [start, end) of what the layers compute inside.

        The spans do not overlap. Rows in none of them stay what they are, bit for bit.
        """
        self._step.set(spans)
        changed = []
        try:
            for (siblings, leaf), additions in zip(self._places, self._additions, strict=True):
                layer = vars(siblings[leaf])
                layer["additions"] = additions  # past nn.Module, which would take its time
                changed.append(layer)
            yield
        finally:
            for layer in changed:
                del layer["additions"]
            self._step.set([])

    def _matrix_bytes(self, rows: int, columns: int) -> int:
        if self._packed:
            return matmul.packed_bytes("F16", (rows, columns))
        return rows * columns * self._dtype.itemsize

    def _prepare(self, pair: LoraPair) -> LoraPair:
        """The pair in float32 with its scale in b; for float16, both of like magnitudes."""
        a, b = pair.a.float(), pair.b.float() * pair.scale
        greatest_a, greatest_b = float(a.abs().max()), float(b.abs().max())
        if not (math.isfinite(greatest_a) and math.isfinite(greatest_b)):
            raise ValueError("there are values that are no finite numbers")
        if not self._packed or not greatest_a or not greatest_b:
            return LoraPair(a=a, b=b, scale=1.0)
        # A power of two changes no digit. Float16 has few of them for what is small.
        shift = round((math.log2(greatest_a) - math.log2(greatest_b)) / 2)
        a, b = a * 2.0**-shift, b * 2.0**shift
        if max(float(a.abs().max()), float(b.abs().max())) > torch.finfo(torch.float16).max:
            raise ValueError(f"values up to {greatest_a:.3g} and {greatest_b:.3g} exceed float16")
        return LoraPair(a=a, b=b, scale=1.0)

    def _pack(self, own: Sequence[tuple[LoraTarget, LoraPair]]) -> LowRank | None:
        """The matrices of one layer for the native kernels."""
        if not own:
            return None
        parts = []
        rank = 0
        for target, pair in own:
            start, rank = rank, rank + pair.a.shape[0]
            b = matmul.pack(pair.b.half(), "F16", pair.b.shape)
            parts.append(LowRankPart(slice(start, rank), target.rows, b))
        a = torch.cat([pair.a for _, pair in own]).half()
        return LowRank(matmul.pack(a, "F16", a.shape), tuple(parts))

    def _keep(self, target: LoraTarget, pair: LoraPair) -> _DensePart:
        a, b = (m.to(self.device, self._dtype).contiguous() for m in (pair.a, pair.b))
        return _DensePart(a=a, b=b, rows=target.rows)


class _Step:
    """The adapters of the step that runs."""

    def __init__(self, packed: bool) -> None:
        self._packed = packed
        self._spans = Spans()
        self._dense: list[tuple[int, int, tuple[tuple[_DensePart, ...], ...]]] = []

    def set(self, spans: Sequence[tuple[int, int, LoraWeights]]) -> None:
        """Rows [start, end) have these."""
        self._spans.set([(s, e, own.packed) for s, e, own in spans if own.packed is not None])
        self._dense = [(s, e, own.dense) for s, e, own in spans if own.dense]

    def add(self, x: Tensor, y: Tensor, *, number: int) -> None:
        """Add what they have for the layer of this number."""
        if self._packed:
            add_low_rank(x, y, self._spans, number)
            return
        for start, end, modules in self._dense:
            for part in modules[number]:
                added = functional.linear(functional.linear(x[start:end], part.a), part.b)
                y[start:end, part.rows] += added


@attrs.frozen(kw_only=True, eq=False)
class _DensePart:
    """What one adapter adds to a layer, or to one part of a fused one."""

    a: Tensor
    b: Tensor
    rows: slice
    """Its outputs."""
