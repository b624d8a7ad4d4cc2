"""What is sent to an embedding model and what comes back."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import attrs

from mistralrs_sdk.chat.messages import flag
from mistralrs_sdk.errors import RequestError, UnsupportedError

TokenIds: TypeAlias = tuple[int, ...]


EmbeddingInput: TypeAlias = str | Sequence[int] | Sequence[str | Sequence[int]]
"""A text, token ids, or a list of either."""


def _inputs(given: EmbeddingInput) -> tuple[str | TokenIds, ...]:
    if isinstance(given, str):
        return (given,)
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise RequestError(
            f"{type(given).__name__} cannot be embedded: give a str, a list of str, token ids, a "
            "list of those, or an EmbeddingRequestBuilder"
        )
    items: Sequence[Any] = given
    if items and all(isinstance(item, int) for item in items):
        return (_ids(items),)
    return tuple(item if isinstance(item, str) else _ids(item) for item in items)


@attrs.frozen
class EmbeddingRequest:
    """Texts and token ids to embed, in order: `EmbeddingRequest(["one", "two"])`.

    `EmbeddingRequest.builder()` makes one step by step.

    Raises:
        RequestError: there is no input, it is neither text nor token ids, or `truncate_sequence` is
            no bool.
    """

    inputs: tuple[str | TokenIds, ...] = attrs.field(converter=_inputs, alias="input")
    truncate_sequence: bool = False
    """Drop the end of an input that is too long, instead of refusing the request."""
    prompt_name: str | None = attrs.field(default=None, kw_only=True)
    """The model's instruction to put in front of each text; None: the model's default, if any."""

    def __attrs_post_init__(self) -> None:
        flag("truncate_sequence", self.truncate_sequence)
        if not self.inputs:
            raise RequestError(
                "the embedding request is empty: add_prompt, add_prompts, add_tokens or "
                "add_tokens_batch adds what to embed"
            )

    @classmethod
    def builder(cls) -> EmbeddingRequestBuilder:
        """Start an empty request."""
        return EmbeddingRequestBuilder()


@attrs.frozen
class EmbeddingRequestBuilder:
    """Collects what to embed. Every method returns a new value; `build` checks it.

    Raises:
        RequestError: from each method, at once: a value is of the wrong type.
    """

    inputs: tuple[str | TokenIds, ...] = ()
    truncate_sequence: bool = False
    prompt_name: str | None = None

    def add_prompt(self, text: str) -> EmbeddingRequestBuilder:
        """Append one text.

        Raises:
            RequestError: it is no str.
        """
        return attrs.evolve(self, inputs=(*self.inputs, _text(text)))

    def add_prompts(self, texts: Iterable[str]) -> EmbeddingRequestBuilder:
        """Append several texts.

        Raises:
            RequestError: one is no str, or `texts` is a single one.
        """
        if isinstance(texts, str):
            raise RequestError("add_prompts takes several texts: use add_prompt for one")
        return attrs.evolve(self, inputs=(*self.inputs, *map(_text, texts)))

    def add_tokens(self, ids: Sequence[int]) -> EmbeddingRequestBuilder:
        """Append one input as token ids; they are embedded as they are, nothing is added.

        Raises:
            RequestError: they are no whole numbers.
        """
        return attrs.evolve(self, inputs=(*self.inputs, _ids(ids)))

    def add_tokens_batch(self, batch: Iterable[Sequence[int]]) -> EmbeddingRequestBuilder:
        """Append several inputs as token ids.

        Raises:
            RequestError: one does not consist of whole numbers.
        """
        return attrs.evolve(self, inputs=(*self.inputs, *map(_ids, batch)))

    def with_truncate_sequence(self, truncate: bool) -> EmbeddingRequestBuilder:
        """Drop the end of an input that is too long (True), or refuse it (False, the default).

        The special tokens that a tokenizer adds to a text are kept.
        """
        return attrs.evolve(self, truncate_sequence=flag("truncate_sequence", truncate))

    def with_prompt_name(self, name: str | None) -> EmbeddingRequestBuilder:
        """Put one of the model's instructions in front of each text, such as "query".

        Sending the request is a RequestError if the model has none of that name. Default: the
        model's own default, which is none for most. Token ids are left as they are.
        """
        if name is not None and (not isinstance(name, str) or not name):
            raise RequestError(f"prompt_name ({name!r}) must be a non-empty str, or None")
        return attrs.evolve(self, prompt_name=name)

    def with_dimensions(self, dimensions: int) -> EmbeddingRequestBuilder:
        """Not done: `UnsupportedError`. A vector has the size the model gives it."""
        raise UnsupportedError(
            f"with_dimensions({dimensions!r}) is not supported: take the first values of each "
            "vector and normalise them, if the model was trained for that"
        )

    def build(self) -> EmbeddingRequest:
        """The finished request.

        Raises:
            RequestError: nothing was added.
        """
        return EmbeddingRequest(self.inputs, self.truncate_sequence, prompt_name=self.prompt_name)


EmbeddingRequestLike: TypeAlias = EmbeddingInput | EmbeddingRequest | EmbeddingRequestBuilder
"""Whatever can be embedded."""


def as_embedding_request(asked: EmbeddingRequestLike) -> EmbeddingRequest:
    """Take a text, a list of texts, token ids, a list of those, or a request.

    Raises:
        RequestError: it is none of these, or empty.
    """
    if isinstance(asked, EmbeddingRequest):
        return asked
    return asked.build() if isinstance(asked, EmbeddingRequestBuilder) else EmbeddingRequest(asked)


@attrs.frozen(kw_only=True, eq=False)
class EmbeddingResponse:
    """One vector per input, in the order of the inputs."""

    model: str
    vectors: tuple[array[float], ...]
    """Each [dimensions], float32; numpy.asarray and torch.frombuffer read them without a copy."""
    prompt_tokens: int
    """Tokens of all inputs, special ones included."""

    @property
    def embeddings(self) -> list[list[float]]:
        """The vectors as lists, [inputs][dimensions]."""
        return [vector.tolist() for vector in self.vectors]

    @property
    def dimensions(self) -> int:
        """Size of a vector."""
        return len(self.vectors[0])

    @property
    def total_tokens(self) -> int:
        """The same as `prompt_tokens`: nothing is generated."""
        return self.prompt_tokens

    def to_dict(self) -> dict[str, object]:
        """OpenAI's list of embeddings."""
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector.tolist()}
                for index, vector in enumerate(self.vectors)
            ],
            "model": self.model,
            "usage": {"prompt_tokens": self.prompt_tokens, "total_tokens": self.total_tokens},
        }


def _text(text: str) -> str:
    if not isinstance(text, str):
        raise RequestError(f"{text!r:.80} is no str: token ids go through add_tokens")
    return text


def _ids(ids: Sequence[int]) -> TokenIds:
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise RequestError(f"{ids!r:.80} is no list of token ids: texts go through add_prompt")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"token id {token!r:.80} is no whole number")
    return tuple(ids)
