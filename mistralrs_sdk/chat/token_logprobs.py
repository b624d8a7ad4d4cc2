"""Log probabilities of token ids as those of texts, the form in which answers report them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tokenizers import Tokenizer

from mistralrs_sdk.chat.detokenizer import token_bytes
from mistralrs_sdk.chat.responses import ResponseLogprob, TopLogprob
from mistralrs_sdk.engine.request import TokenLogprobs


def response_logprobs(
    tokenizer: Tokenizer, found: Iterable[TokenLogprobs]
) -> tuple[ResponseLogprob, ...]:
    """Return one entry per token, with its text and its bytes."""
    return tuple(
        ResponseLogprob(
            token=_text(tokenizer, entry.token_id),
            logprob=entry.logprob,
            bytes=token_bytes(tokenizer, entry.token_id),
            top_logprobs=tuple(
                TopLogprob(
                    token=_text(tokenizer, token),
                    token_id=token,
                    logprob=logprob,
                    bytes=token_bytes(tokenizer, token),
                )
                for token, logprob in entry.top
            ),
        )
        for entry in found
    )


def first_logprob(tokenizer: Tokenizer, token: int) -> ResponseLogprob:
    """Return the entry of a text's first token, which nothing predicts."""
    return response_logprobs(tokenizer, [TokenLogprobs(token_id=token, logprob=math.nan)])[0]


def _text(tokenizer: Tokenizer, token: int) -> str:
    return token_bytes(tokenizer, token).decode(errors="replace")
