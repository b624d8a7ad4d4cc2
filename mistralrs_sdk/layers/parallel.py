"""Layers of which each rank of a tensor-parallel model has a share."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from mistralrs_sdk.distributed import TensorParallel
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.layers.linear import Linear


class RowParallelLinear(Linear):
    """A linear layer each rank has some inputs of; the ranks' outputs are summed.

    The bias is rank 0's, so that it is added once.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, parallel: TensorParallel
    ) -> None:
        super().__init__(in_features, out_features, bias=bias and parallel.rank == 0)
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        return self.parallel.all_reduce(super().forward(x))


class VocabParallelEmbedding(Embedding):
    """A table each rank has the rows `vocab` of, out of `vocab_size`.

    Every rank gets all embeddings; of the tied head's scores only rank 0 gets any.
    """

    def __init__(
        self,
        vocab_size: int,
        size: int,
        *,
        scale: float | None,
        vocab: range,
        parallel: TensorParallel,
    ) -> None:
        super().__init__(len(vocab), size, scale=scale)
        self.vocab_size = vocab_size
        self.vocab = vocab
        self.parallel = parallel

    def forward(self, ids: Tensor) -> Tensor:
        others = (ids < self.vocab.start) | (ids >= self.vocab.stop)
        x = super().forward((ids - self.vocab.start).masked_fill_(others, 0))
        return self.parallel.all_reduce(x.masked_fill_(others.unsqueeze(-1), 0))

    def project(self, x: Tensor) -> Tensor:
        return _gather(super().project(x), self.vocab_size, self.parallel)


class VocabParallelHead(Linear):
    """A head each rank has the rows `vocab` of; only rank 0 gets scores, those of all."""

    def __init__(
        self, size: int, vocab_size: int, *, vocab: range, parallel: TensorParallel
    ) -> None:
        super().__init__(size, len(vocab))
        self.vocab_size = vocab_size
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        return _gather(super().forward(x), self.vocab_size, self.parallel)


def _gather(scores: Tensor, vocab_size: int, parallel: TensorParallel) -> Tensor:
    """The scores of all ranks side by side, [rows, vocab_size]; no rows on ranks above 0."""
    rows, own = scores.shape
    most = -(-vocab_size // parallel.size)  # of a rank; the last ones may have fewer
    found = parallel.gather(functional.pad(scores, (0, most - own)) if own < most else scores)
    if found is None:
        return scores.new_empty((0, vocab_size))
    return found.transpose(0, 1).reshape(rows, parallel.size * most)[:, :vocab_size].contiguous()
