"""`Matcher`: which tokens may come next in one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from llguidance import LLMatcher


@attrs.define(eq=False)
class Matcher:
    """Follows one answer, token by token.

    Its state is that of the tokens so far, however their keys and values came about: it outlives
    preemption. One thread at a time may use it.
    """

    eos_ids: tuple[int, ...]
    """The ids that end an answer; they may come only where the answer is complete."""
    _matcher: LLMatcher

    @property
    def error(self) -> str | None:
        """Why no token can follow: a token that was not allowed, or a limit of the parser."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def is_complete(self) -> bool:
        """Whether the answer so far matches, and nothing could be added to it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def is_accepting(self) -> bool:
        """Whether the answer so far matches."""
        return self._matcher.is_accepting() and not self._matcher.is_error()

    def advance(self, token: int) -> bool:
        """Take the token that was drawn; False if that was an error."""
        return self._matcher.consume_token(token)

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as the tokenizer writes the text they stand for.

        Where more text may follow, the last of them are left out that it could change.
        """
        return self._matcher.compute_ff_tokens()

    def write_mask(self, address: int, num_bytes: int) -> bool:
        """Write one bit per token, least first, 1 where it may come next; False in error.

        `address` is that of `num_bytes` bytes, whole 32-bit words for all tokens.
        """
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        return not self._matcher.is_error()  # in error all but the end would be banned


def _first_line(message: str) -> str:
    return message.partition("\n")[0]
