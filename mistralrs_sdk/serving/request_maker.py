"""`RequestMaker`: from what was asked of one model to what its engine runs, checked on the way."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

from mistralrs_sdk.chat.requests import RequestBuilder
from mistralrs_sdk.chat.template import PromptEncoder
from mistralrs_sdk.constraints.compiled import (
    CompiledConstraint,
    compile_in_time,
    refuse_stops,
)
from mistralrs_sdk.constraints.vocabulary import Vocabulary
from mistralrs_sdk.engine.adapters import AdapterRegistry
from mistralrs_sdk.engine.build import EngineInfo
from mistralrs_sdk.engine.request import Request
from mistralrs_sdk.errors import RequestError
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.sampling_params import SamplingParams

_request_ids = itertools.count(1)
"""Never reused in a process: the id of an unloaded model must not mean another request."""


class RequestMaker:
    """Makes the requests of one model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        encoder: PromptEncoder,
        *,
        info: EngineInfo,
        adapters: AdapterRegistry,
    ) -> None:
        self._checkpoint = checkpoint
        self._encoder = encoder
        self._adapters = adapters
        self._vocab_size = info.vocab_size
        self._max_model_len = info.max_model_len
        self._vocabulary = Vocabulary(
            checkpoint.tokenizer.tokenizer,
            size=info.vocab_size,
            eos_ids=checkpoint.tokenizer.eos_token_ids,
        )
        self._seeds = random.Random(info.config.seed)

    async def make(self, prompt_ids: Sequence[int], asked: RequestBuilder) -> Request:
        """Return the request as the engine knows it, for a prompt that `fit` has returned.

        Raises:
            RequestError: a setting does not suit the model.
        """
        sampling = asked.sampling_params
        sampling.check_vocabulary(self._vocab_size)
        constraint = await self._compile(asked)
        resolved = sampling.resolve(self._checkpoint.generation_config)
        stop = sampling.stop_toks
        eos = frozenset() if sampling.ignore_eos else self._checkpoint.tokenizer.eos_token_ids
        room = self._max_model_len - len(prompt_ids)
        return Request(
            id=next(_request_ids),
            prompt_ids=tuple(prompt_ids),
            sampling=resolved,
            max_tokens=min(sampling.max_len or room, room),
            stop_ids=eos | frozenset(stop.ids if stop else ()),
            seed=self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed,
            priority=asked.priority,
            deadline=None if asked.deadline is None else time.perf_counter() + asked.deadline,
            cache_salt=asked.cache_salt,
            adapter=self._adapters.lease(asked.adapter),
            use_prefix_cache=asked.prefix_cache,
            dry_breakers=self._breaker_ids(resolved),
            constraint=constraint,
            logits_processors=asked.logits_processors,
        )

    def fit(self, prompt_ids: Sequence[int], asked: RequestBuilder) -> Sequence[int]:
        """Return the prompt as it fits the context, cut if `asked` allows that.

        Raises:
            RequestError: it is empty, too long, or holds an id that the model does not have.
        """
        if prompt_ids and max(prompt_ids) >= self._vocab_size:  # a tokenizer may know more
            self.check_ids(prompt_ids)
        limit = self._max_model_len
        if asked.truncate_sequence and len(prompt_ids) >= limit:
            room = limit - min(asked.sampling_params.max_len or 1, limit - 1)
            prompt_ids = self._encoder.keep_end(prompt_ids, room)
        if not prompt_ids:
            raise RequestError("the prompt is empty: it has no tokens")
        if len(prompt_ids) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and the context {limit}, which leaves "
                "no room for an answer: shorten it, or cut its start off with "
                "with_truncate_sequence(True)"
            )
        return prompt_ids

    def check_ids(self, ids: Sequence[int]) -> list[int]:
        """Return ids that a user gave, if the model has all of them.

        Raises:
            RequestError: it does not.
        """
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes | bytearray):
            raise RequestError(f"a prompt is a str or a list of token ids, not {ids!r:.80}")
        size = self._vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise RequestError(
                    f"token id {token!r} is outside the vocabulary (0 to {size - 1})"
                )
        return list(ids)

    async def _compile(self, asked: RequestBuilder) -> CompiledConstraint | None:
        """The request's constraint for this model's tokens."""
        if asked.constraint is None:
            return None
        stop = asked.sampling.stop_toks
        if stop and not asked.tools:  # calls that were cut are seen as such by their parser
            refuse_stops(stop, self._vocabulary)
        return await compile_in_time(asked.constraint, self._vocabulary)

    def _breaker_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """The ids that end a repetition: the last token of "a" followed by each breaker."""
        if sampling.dry_params is None:
            return frozenset()
        texts = [f"a{breaker}" for breaker in sampling.dry_params.sequence_breakers]
        return frozenset(self._encoder.encode_plain(text)[-1] for text in texts)
