"""Token ids to text as they come, without ever taking text back."""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one choice, given its tokens in any portions.

    What `feed` returned is final. Joined with what `finish` returns it equals `tokenizer.decode` of
    all ids, cut at the stop string that is complete first (of those that end at the same character,
    at the longest). Held back are a character whose bytes are not all there, bytes whose
    reading depends on what follows, and an end that may be the start of a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_seqs: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """`keep` names special tokens whose text is kept where the others are skipped."""
        kinds = [step["type"] for step in _decoder_steps(tokenizer)]
        pieces = _ByteLevelText if kinds == ["ByteLevel"] else _WindowText
        skipped = _special_ids(tokenizer) - keep if skip_special_tokens else frozenset[int]()
        self._pieces = pieces(tokenizer, skipped)
        self._stop_seqs = stop_seqs
        self._include_stop = include_stop
        self._held = ""
        self._emitted: list[str] = []
        self.stopped: str | None = None
        """The stop string that matched."""

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        return "".join(self._emitted)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is now certain, "" after a stop string matched."""
        return self._emit(self._pieces.feed(token_ids), last=False)

    def finish(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD, as in a whole decode.

        A stop string may still match here, if its end was held back.
        """
        return self._emit(self._pieces.finish(), last=True)

    def _emit(self, new: str, *, last: bool) -> str:
        if self.stopped is not None:
            return ""
        if not self._stop_seqs:
            self._emitted.append(new)
            return new
        text = self._held + new
        match = _first_match(text, self._stop_seqs)
        if match is not None:
            start, self.stopped = match
            end = start + len(self.stopped) if self._include_stop else start
        else:
            end = len(text) if last else len(text) - _open_stop(text, self._stop_seqs)
        self._held = "" if last or match is not None else text[end:]
        if end:
            self._emitted.append(text[:end])
        return text[:end]


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes one token stands for, b"" for an id outside the vocabulary.

    A token may hold part of a character. Special tokens give their literal.
    """
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    for step in _decoder_steps(tokenizer):
        if step["type"] == "ByteLevel":
            return _byte_level_bytes(token)
        if step["type"] == "ByteFallback" and _is_fallback_byte(token):
            return bytes([int(token[3:5], 16)])
        if step["type"] == "Metaspace":
            token = token.replace(step["replacement"], " ")
        if step["type"] == "Replace" and "String" in step["pattern"]:
            token = token.replace(step["pattern"]["String"], step["content"])
    return token.encode()


class _ByteLevelText:
    """Tokens that spell bytes: their UTF-8 is decoded as it comes."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join([self._bytes(token_id) for token_id in token_ids]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None or token_id in self._skipped else _byte_level_bytes(token)


class _WindowText:
    """Any other decoder: the ids since the last safe point are decoded again.

    The window begins with ids whose text is out already, because a decoder may treat the first
    token in its own way (a leading space is stripped).
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        kinds = {step["type"] for step in _decoder_steps(tokenizer)}
        self._byte_fallback = "ByteFallback" in kinds
        self._byte_level = "ByteLevel" in kinds
        self._window: list[int] = []
        self._released = 0
        # one bad byte turns its whole run of byte tokens into U+FFFD: the run has to end first
        self._open_run = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        for token_id in filter(self._counts, token_ids):
            self._window.append(token_id)
            self._open_run = self._open_run + 1 if self._is_byte(token_id) else 0
        text = self._decode(self._window[: len(self._window) - self._open_run])
        unsure = self._byte_level and text.endswith(_REPLACEMENT)  # perhaps only unfinished
        new = self._release(text[: len(text) - unsure])
        if not self._open_run and not unsure:
            self._shorten()
        return new

    def finish(self) -> str:
        return self._release(self._decode(self._window))

    def _counts(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.id_to_token(token_id) is not None

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.id_to_token(token_id)
        return self._byte_fallback and token is not None and _is_fallback_byte(token)

    def _release(self, text: str) -> str:
        new = text[self._released :]
        self._released = max(self._released, len(text))
        return new

    def _shorten(self) -> None:
        """Keep the fewest last ids that have a text of their own."""
        for start in range(len(self._window) - 1, 0, -1):
            text = self._decode(self._window[start:])
            if text:
                self._window = self._window[start:]
                self._released = len(text)
                return

    def _decode(self, token_ids: Sequence[int]) -> str:
        # what is skipped is not among them
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _decoder_steps(tokenizer: Tokenizer) -> tuple[dict[str, Any], ...]:
    """The parts of the tokenizer's decoder, in order, as its own JSON describes them."""
    decoder = tokenizer.decoder
    return () if decoder is None else _parse_decoder(decoder.__getstate__())


@functools.lru_cache(maxsize=64)
def _parse_decoder(state: bytes) -> tuple[dict[str, Any], ...]:
    decoder = json.loads(state)
    return tuple(decoder["decoders"]) if decoder["type"] == "Sequence" else (decoder,)


def _is_fallback_byte(token: str) -> bool:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return False
    return all(digit in "0123456789abcdefABCDEF" for digit in token[3:5])


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the rest for U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + place): byte for place, byte in enumerate(others)},
    }


def _byte_level_bytes(token: str) -> bytes:
    alphabet = _byte_of_char()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # an added token with a character outside the alphabet is plain text
        return token.encode()


def _first_match(text: str, stop_seqs: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the stop string that is complete first begins, and which one it is."""
    matches = [(text.find(seq), seq) for seq in stop_seqs]
    found = [(start + len(seq), start, seq) for start, seq in matches if start >= 0]
    return min(found)[1:] if found else None


def _open_stop(text: str, stop_seqs: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that a stop string may continue."""
    longest = max(map(len, stop_seqs), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(seq.startswith(text[-size:]) for seq in stop_seqs):
            return size
    return 0
