"""The cases of `kernels.py` around the layers: embeddings, sampling, and the search for scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from kernels_cases import Calls, Case, Method, beside_torch, num_copies
from torch import Tensor
from torch.nn import functional

from mistralrs_sdk.kernels import group_search, matmul
from mistralrs_sdk.kernels.sampling import Draw, draw, logprobs

VOCAB, HIDDEN, TEMPERATURE, TOP_K, TOP_P, TOP = 49152, 768, 0.8, 40, 0.9, 5
LOOKUPS = 512
SEARCHED = 256
"""Blocks of 256 values."""


def sampling() -> Iterator[Case]:
    """Draws and log probabilities beside the same written in torch; reading the scores counts."""
    ways = {
        "greatest": (Draw(), _greatest),
        "temperature": (Draw(temperature=TEMPERATURE, u=0.5), _any),
        f"top-k {TOP_K}": (Draw(temperature=TEMPERATURE, top_k=TOP_K, u=0.5), _of_top_k),
        f"top-p {TOP_P}": (Draw(temperature=TEMPERATURE, top_p=TOP_P, u=0.5), _of_top_p),
    }
    for rows in (1, 8, 32):
        size = 4 * rows * VOCAB
        scores = [torch.randn(rows, VOCAB).mul_(3) for _ in range(num_copies(size))]
        for name, (one, peer) in ways.items():
            native = [partial(draw, x, [one] * rows) for x in scores]
            yield _tokens(f"draw, {name}, {rows} rows", native, scores, peer)
        lines, tokens = list(range(rows)), [7] * rows
        ask = partial(logprobs, lines=lines, tokens=tokens, top=TOP, lowest=-100.0)
        yield _tokens(
            f"logprobs, {TOP} best, {rows} rows", [partial(ask, x) for x in scores], scores, _logs
        )
    yield _lookups()


def _tokens(name: str, native: Calls, scores: Sequence[Tensor], peer: Callable) -> Case:
    theirs = [partial(peer, x) for x in scores]
    return beside_torch(name, native, theirs, num_bytes=scores[0].nbytes)


def _greatest(scores: Tensor) -> list[int]:
    return scores.argmax(-1).tolist()


def _any(scores: Tensor) -> list[int]:
    return torch.multinomial((scores / TEMPERATURE).softmax(-1), 1).view(-1).tolist()


def _of_top_k(scores: Tensor) -> list[int]:
    best, ids = scores.topk(TOP_K)
    chosen = torch.multinomial((best / TEMPERATURE).softmax(-1), 1)
    return ids.gather(-1, chosen).view(-1).tolist()


def _of_top_p(scores: Tensor) -> list[int]:
    shares, ids = (scores / TEMPERATURE).softmax(-1).sort(-1, descending=True)
    shares[shares.cumsum(-1) - shares >= TOP_P] = 0
    return ids.gather(-1, torch.multinomial(shares, 1)).view(-1).tolist()


def _logs(scores: Tensor) -> tuple[list, list]:
    best, ids = scores.log_softmax(-1).topk(TOP)
    return best.tolist(), ids.tolist()


def _lookups() -> Case:
    """Rows of an embedding; what is looked up and written counts."""
    raw = torch.randint(0, 64, (VOCAB * HIDDEN // 32 * 20,), dtype=torch.uint8)
    packed, dense = matmul.pack(raw, "Q4_1", (VOCAB, HIDDEN)), torch.randn(VOCAB, HIDDEN)
    ids = [torch.randint(0, VOCAB, (LOOKUPS,)) for _ in range(16)]
    out = 4 * LOOKUPS * HIDDEN
    return Case(
        name=f"embedding_rows, {LOOKUPS} rows of {HIDDEN}",
        methods=[
            Method(
                name="native Q4_1",
                calls=[partial(matmul.embedding_rows, packed, some) for some in ids],
                num_bytes=out + LOOKUPS * HIDDEN * 20 // 32,
            ),
            Method(
                name="torch f32",
                calls=[partial(functional.embedding, some, dense) for some in ids],
                num_bytes=2 * out,
                peer=True,
            ),
        ],
    )


def searches() -> Iterator[Case]:
    """The scales of K types and the zero points of HQQ, which in-situ quantisation searches."""
    blocks = torch.randn(SEARCHED, 256)
    affine, symmetric = (group_search.arrange(blocks, None, size=size) for size in (32, 16))
    zeros = affine.x.contiguous()
    scale = zeros.abs().amax(0) / 7
    ways = {
        "affine, 16 levels": (
            partial(group_search.search_affine, affine, 15),
            partial(group_search.search_affine_reference, affine, 15),
        ),
        "symmetric, 64 levels": (
            partial(group_search.search_symmetric, symmetric, 32),
            partial(group_search.search_symmetric_reference, symmetric, 32),
        ),
        "zero points, 16 levels": (
            partial(group_search.search_zero, zeros, scale, low=0, high=15),
            partial(group_search.search_zero_reference, zeros, scale, low=0, high=15),
        ),
    }
    for name, (native, reference) in ways.items():
        yield beside_torch(f"search, {name}, {blocks.numel()} values", [native], [reference])
