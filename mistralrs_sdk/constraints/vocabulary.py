"""`Vocabulary`: a model's tokens as llguidance needs them, and what was compiled for them."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import anyio

from mistralrs_sdk.constraints.constraint import Constraint
from mistralrs_sdk.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

    from mistralrs_sdk.constraints.compiled import CompiledConstraint

CACHE_SIZE = 64
"""Compiled constraints that are kept, those used last."""


class Vocabulary:
    """The tokens of one model. Every thread may use it."""

    def __init__(self, tokenizer: Tokenizer, *, size: int, eos_ids: Iterable[int]) -> None:
        """`size` is the width of the logits, which may be more than the tokenizer has."""
        self.size = size
        self.eos_ids = tuple(sorted(eos_ids))
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._loaded: LLTokenizer | None = None
        self._cache: OrderedDict[Constraint, CompiledConstraint] = OrderedDict()
        self._turns: weakref.WeakValueDictionary[Constraint, anyio.Lock] = (
            weakref.WeakValueDictionary()
        )

    @property
    def is_loaded(self) -> bool:
        """Whether `load` would return at once."""
        return self._loaded is not None

    def load(self) -> LLTokenizer:
        """Return the tokens in llguidance's form; the first time that takes up to seconds.

        Raises:
            RequestError: the model has no token that ends an answer.
            UnsupportedError: llguidance cannot read the tokenizer.
        """
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def turn(self, constraint: Constraint) -> anyio.Lock:
        """Return the lock of those who want this constraint compiled; for the event loop's side."""
        lock = self._turns.get(constraint)
        if lock is None:
            lock = self._turns[constraint] = anyio.Lock()
        return lock

    def find(self, constraint: Constraint) -> CompiledConstraint | None:
        """Return what was compiled before."""
        with self._lock:
            found = self._cache.get(constraint)
            if found is not None:
                self._cache.move_to_end(constraint)
            return found

    def keep(self, compiled: CompiledConstraint) -> None:
        """Keep it for `find`, in the place of what was not used for longest."""
        with self._lock:
            self._cache[compiled.constraint] = compiled
            self._cache.move_to_end(compiled.constraint)
            while len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)

    def _load(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self.eos_ids:
            raise RequestError(
                "the model has no token that ends an answer, which constraints need: give its "
                "config.json an eos_token_id"
            )
        try:
            return LLTokenizer(
                self._tokenizer.to_str(), n_vocab=self.size, eos_token=list(self.eos_ids)
            )
        except ValueError as error:
            raise UnsupportedError(
                f"constraints are not possible with this model's tokenizer: {error}"
            ) from error
