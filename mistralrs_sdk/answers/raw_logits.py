"""`RawLogits`: the logits at every position of a prompt, and what is worked out from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mistralrs_sdk.engine.request import LOWEST_LOGPROB, TokenLogprobs
from mistralrs_sdk.errors import RequestError

MAX_RAW_LOGITS_BYTES = 2 * 2**30
"""The most that the logits of one prompt may take: 4 bytes for each token and vocabulary entry."""

_ROWS = 256
"""Positions whose log probabilities are worked out together."""


class RawLogits(NamedTuple):
    """What `send_raw_chat_request` gives: `logits, tokens = await ...`."""

    logits: list[Tensor]
    """One tensor [tokens, vocab] per prompt chunk, float32, on the CPU; this engine makes one.

    Row i is what the model expects after token i.
    """
    tokens: list[int]
    """The prompt's token ids."""


def cross_entropy_loss(logits: Tensor, targets: Tensor | Sequence[int]) -> Tensor:
    """Return the mean of -log(probability) of the targets, in nats: a tensor of one number.

    logits is [n, vocab]; targets are n token ids. `exp` of it is the perplexity.

    Raises:
        RequestError: the two do not fit together.
    """
    ids = torch.as_tensor(targets, dtype=torch.int64, device=logits.device)
    if logits.dim() != 2 or ids.dim() != 1 or len(logits) != len(ids) or not len(ids):
        raise RequestError(
            f"logits {list(logits.shape)} and targets {list(ids.shape)} must be [n, vocab] and "
            "[n]: drop the last row of the logits and the first token to score a prompt"
        )
    return functional.cross_entropy(logits.float(), ids)


def prompt_logprobs(
    logits: Tensor, tokens: Sequence[int], *, top_n: int
) -> tuple[TokenLogprobs, ...]:
    """Return the log probability of each token but the first, which nothing predicts.

    logits is [len(tokens), vocab]; `top_n` alternatives are named with each.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens) - 1, _ROWS):
        ids = tokens[start + 1 : start + 1 + _ROWS]
        rows = logits[start : start + len(ids)].log_softmax(dim=-1).clamp_(min=LOWEST_LOGPROB)
        own = rows.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1).tolist()
        best = rows.topk(min(top_n, rows.shape[1]), dim=-1)
        for token, logprob, top_ids, values in zip(
            ids, own, best.indices.tolist(), best.values.tolist(), strict=True
        ):
            top = tuple(zip(top_ids, values, strict=True))
            found.append(TokenLogprobs(token_id=token, logprob=logprob, top=top))
    return tuple(found)


def require_room(num_tokens: int, *, vocab_size: int) -> None:
    """Refuse a prompt whose logits would take too much memory.

    Raises:
        RequestError: they would take over 2 GiB.
    """
    longest = MAX_RAW_LOGITS_BYTES // (4 * vocab_size)
    if num_tokens > longest:
        raise RequestError(
            f"the logits of {num_tokens} tokens with a vocabulary of {vocab_size} take "
            f"{4 * num_tokens * vocab_size / 2**30:.1f} GiB, and 2 are allowed: "
            f"ask in parts of at most {longest} tokens"
        )
