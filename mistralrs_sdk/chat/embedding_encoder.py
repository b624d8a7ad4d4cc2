"""Texts to the token ids that an embedding model sees, its instructions in front."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
from tokenizers import Encoding, Tokenizer

from mistralrs_sdk.chat.embeddings import EmbeddingRequest
from mistralrs_sdk.errors import RequestError


@attrs.frozen
class EncodedInput:
    """The ids of one input, and how many of the first ones pooling leaves out."""

    ids: tuple[int, ...]
    skip: int


class EmbeddingEncoder:
    """Encodes requests for one model; any thread may call it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        limit: int,
        vocab_size: int,
        prompts: Mapping[str, str],
        default_prompt_name: str | None = None,
        include_prompt: bool = True,
    ) -> None:
        """`limit` is the longest input in tokens; without `include_prompt`, pooling leaves the
        tokens of an instruction out."""
        self._tokenizer = tokenizer
        self._limit = limit
        self._vocab_size = vocab_size
        self._prompts = prompts
        self._default_prompt_name = default_prompt_name
        self._include_prompt = include_prompt
        self._num_special = tokenizer.num_special_tokens_to_add(False)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)

    def encode(self, request: EmbeddingRequest) -> list[EncodedInput]:
        """The ids of every input.

        Raises:
            RequestError: an input is empty, too long or no valid text, an id is not in the
                vocabulary, or there is no instruction of that name.
        """
        prompt = self._prompt(request.prompt_name)
        skip = 0 if self._include_prompt or not prompt else self._length_of(prompt)
        cut = request.truncate_sequence
        found = []
        for number, asked in enumerate(request.inputs):
            if isinstance(asked, str):
                ids = self._encode(prompt + asked, number, cut=cut)
                found.append(EncodedInput(ids, min(skip, max(len(ids) - 1, 0))))
            else:
                found.append(EncodedInput(asked[: self._limit] if cut else asked, 0))
        for number, encoded in enumerate(found):
            self._check(encoded.ids, number)
        return found

    def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text as it is, whatever its length.

        Raises:
            RequestError: it is no valid Unicode.
        """
        _check_unicode(text, "the text")
        return self._encoding(text, add_special_tokens=add_special_tokens).ids

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raise RequestError if an id is not in the vocabulary."""
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(f"token id {token!r:.80} is no whole number")
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"token id {token} is outside the vocabulary (0 to {self._vocab_size - 1})"
                )

    def _prompt(self, name: str | None) -> str:
        if name is None:
            name = self._default_prompt_name
            return "" if name is None else self._prompts[name]
        if name not in self._prompts:
            known = ", ".join(map(repr, self._prompts)) or "it has none"
            raise RequestError(f"the model has no prompt named {name!r}; those it has: {known}")
        return self._prompts[name]

    def _length_of(self, prompt: str) -> int:
        """Tokens of an instruction, without a special one that ends every text."""
        ids = self._encoding(prompt, add_special_tokens=True).ids
        return len(ids) - (ids[-1] in self._special if ids else 0)

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Encoding:
        # `encode` would hold the interpreter while it works; this one does not
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _encode(self, text: str, number: int, *, cut: bool) -> tuple[int, ...]:
        _check_unicode(text, f"input {number}")
        encoding = self._encoding(text, add_special_tokens=False)
        if cut:  # the special tokens stay: what pools the last token was trained on them
            encoding.truncate(max(self._limit - self._num_special, 0))
        return tuple(self._tokenizer.post_process(encoding, add_special_tokens=True).ids)

    def _check(self, ids: Sequence[int], number: int) -> None:
        if not ids:
            raise RequestError(f"input {number} is empty: it has no tokens")
        if len(ids) > self._limit:
            raise RequestError(
                f"input {number} has {len(ids)} tokens and the model takes at most {self._limit}: "
                "shorten it, or drop its end with with_truncate_sequence(True)"
            )
        if max(ids) >= self._vocab_size or min(ids) < 0:
            self.check_ids(ids)


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} is not valid Unicode: lone surrogate at character {error.start}"
        ) from error
