"""What comes out of the detokenizer, piece by piece."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mistralrs_sdk.chat.detokenizer import Detokenizer, token_bytes

WORDS = ["a", "b", "ab", "bc", "日本", "é", "�", ".", "</s"]


@functools.cache
def byte_level(*, strip: bool = False) -> Tokenizer:
    """All bytes, some merges, control and plain added tokens, and room for unknown ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("æ", "Ĺ"), ("æĹ", "¥"), ("ð", "Ł")]
    vocab = {char: place for place, char in enumerate(alphabet)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if strip:
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return with_added_tokens(tokenizer)


@functools.cache
def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """A sentencepiece-like vocabulary: word pieces with ▁ for space, and 256 byte tokens."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁a", *WORDS]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if strip else steps  # Llama, Gemma
    )
    return with_added_tokens(tokenizer)


@functools.cache
def metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁", "▁a", "▁b", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, "<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return with_added_tokens(tokenizer)


@functools.cache
def undecorated() -> Tokenizer:
    """No decoder at all: tokens are joined with spaces."""
    tokenizer = Tokenizer(
        models.WordLevel({p: i for i, p in enumerate(["<unk>", *WORDS])}, "<unk>")
    )
    return with_added_tokens(tokenizer)


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>")])
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("é<x>"), AddedToken("<日>")])
    return tokenizer


TOKENIZERS = {
    "byte_level": byte_level,
    "byte_level_and_more": functools.partial(byte_level, strip=True),
    "llama": byte_fallback,
    "gemma": functools.partial(byte_fallback, strip=False),
    "metaspace": metaspace,
    "undecorated": undecorated,
}
EVERY_TOKENIZER = pytest.mark.parametrize("name", TOKENIZERS)
PROPERTY = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@st.composite
def token_portions(draw: st.DrawFn, name: str) -> list[list[int]]:
    """Any ids, in any portions: valid characters, broken bytes, control tokens, unknown ids."""
    tokenizer = TOKENIZERS[name]()
    size = tokenizer.get_vocab_size()
    any_id = st.integers(0, size + 2)
    tail_id = st.integers(max(0, size - 20), size + 2)  # words and added tokens
    character = st.sampled_from("日é🦜�\n a.").map(lambda char: byte_ids(tokenizer, char.encode()))
    broken = st.binary(min_size=1, max_size=3).map(lambda data: byte_ids(tokenizer, data))
    one = any_id.map(lambda i: [i]) | tail_id.map(lambda i: [i])
    runs = draw(st.lists(one | character | broken, max_size=12))
    ids = [token_id for run in runs for token_id in run]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    if draw(st.booleans()):
        cuts = list(range(len(ids)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    if tokenizer.token_to_id("<0x00>") is not None:
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]
    if tokenizer.token_to_id("Ġ") is not None:
        table = {token_bytes(tokenizer, i): i for i in range(256)}
        return [table[bytes([byte])] for byte in data]
    return [1]


def run(detokenizer: Detokenizer, portions: list[list[int]]) -> list[str]:
    return [*(detokenizer.feed(portion) for portion in portions), detokenizer.finish()]


def cut(text: str, stops: tuple[str, ...], *, include_stop: bool) -> tuple[str, str | None]:
    """The rule, letter by letter: stop as soon as the text ends with a stop string."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@EVERY_TOKENIZER
@given(data=st.data(), skip=st.booleans())
@PROPERTY
def test_joined_deltas_equal_the_whole_decode(name: str, data: st.DataObject, skip: bool):
    """Whatever the tokens and the portions, streaming gives the text of one decode."""
    portions = data.draw(token_portions(name))
    tokenizer = TOKENIZERS[name]()
    whole = tokenizer.decode([i for p in portions for i in p], skip_special_tokens=skip)

    deltas = run(Detokenizer(tokenizer, skip_special_tokens=skip), portions)

    assert "".join(deltas) == whole


@EVERY_TOKENIZER
@given(data=st.data())
@PROPERTY
def test_kept_special_tokens_are_text_among_those_skipped(name: str, data: st.DataObject):
    """The text is that of a decode with all special tokens but those not kept."""
    portions = data.draw(token_portions(name))
    tokenizer = TOKENIZERS[name]()
    dropped = tokenizer.token_to_id("<s>")
    ids = [i for portion in portions for i in portion if i != dropped]
    kept = frozenset({tokenizer.token_to_id("</s>")})

    deltas = run(Detokenizer(tokenizer, keep=kept), portions)

    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=False)


@EVERY_TOKENIZER
@given(data=st.data(), include=st.booleans())
@PROPERTY
def test_text_is_cut_at_the_stop_string_that_completes_first(
    name: str, data: st.DataObject, include: bool
):
    """No part of the matched stop string comes out before or after the match is known."""
    portions = data.draw(token_portions(name))
    tokenizer = TOKENIZERS[name]()
    whole = tokenizer.decode([i for p in portions for i in p])
    parts = st.text(alphabet=sorted({*whole, *"ab� "}), min_size=1, max_size=3)
    spans = st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(1, 4))
    inside = spans.map(lambda span: whole[span[0] : span[0] + span[1]] or "a")
    stops = tuple(data.draw(st.lists(parts | inside, max_size=3)))
    expected, matched = cut(whole, stops, include_stop=include)

    detokenizer = Detokenizer(tokenizer, stop_seqs=stops, include_stop=include)
    deltas = run(detokenizer, portions)

    assert "".join(deltas) == detokenizer.text == expected
    assert detokenizer.stopped == matched


@pytest.mark.parametrize("text", ["🦜", "日本語", "Ω≈ç"])
def test_split_characters_come_out_whole(text: str):
    """A delta never holds U+FFFD for a character whose bytes are still coming."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)

    deltas = run(detokenizer, [[i] for i in byte_ids(tokenizer, text.encode())])

    assert [delta for delta in deltas if delta] == list(text)


def test_plain_text_is_not_held_back():
    """Every token that is certain comes out in its own step."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop_seqs=("xyz",))

    assert [detokenizer.feed([i]) for i in byte_ids(tokenizer, b"abxc")] == ["a", "b", "", "xc"]


def test_ascii_after_an_unfinished_character_settles_it():
    """A broken character becomes U+FFFD as soon as nothing can complete it."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)

    deltas = [detokenizer.feed([i]) for i in byte_ids(tokenizer, b"\xe6\x97a")]

    assert deltas == ["", "", "�a"]


def test_fallback_bytes_wait_for_the_end_of_their_run():
    """One bad byte spoils its whole run of byte tokens, so none of it is certain before."""
    tokenizer = byte_fallback()
    run_ids = byte_ids(tokenizer, "日".encode())
    detokenizer = Detokenizer(tokenizer)

    assert detokenizer.feed(run_ids) == ""
    assert detokenizer.feed([tokenizer.token_to_id("ab")]) == "日ab"


def test_leading_space_is_stripped_only_at_the_start():
    """A sentencepiece decoder eats one space at the start of the text, not of each portion."""
    tokenizer = byte_fallback()
    detokenizer = Detokenizer(tokenizer)
    a = tokenizer.token_to_id("▁a")

    assert [detokenizer.feed([a]), detokenizer.feed([a]), detokenizer.feed([a])] == [
        "a",
        " a",
        " a",
    ]


def test_nothing_comes_after_a_stop():
    """After a match the detokenizer stays silent."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop_seqs=("b",))

    assert detokenizer.feed(byte_ids(tokenizer, b"abc")) == "a"
    assert detokenizer.feed(byte_ids(tokenizer, b"def")) == ""
    assert detokenizer.finish() == ""
    assert (detokenizer.text, detokenizer.stopped) == ("a", "b")


def test_start_of_a_stop_string_is_released_at_the_end():
    """An end that only looked like a stop string belongs to the text."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop_seqs=("bcd",))

    assert detokenizer.feed(byte_ids(tokenizer, b"abc")) == "a"
    assert detokenizer.finish() == "bc"
    assert detokenizer.stopped is None


def test_longest_of_the_stops_that_end_together_wins():
    """Of stop strings that are complete at the same character the one that began first counts."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop_seqs=("c", "bc"))

    assert detokenizer.feed(byte_ids(tokenizer, b"abcd")) == "a"
    assert detokenizer.stopped == "bc"


def test_special_tokens_are_text_on_request():
    """Control tokens are skipped by default and spelled out with skip_special_tokens=False."""
    tokenizer = byte_level()
    ids = [*byte_ids(tokenizer, b"a"), tokenizer.token_to_id("</s>")]

    assert Detokenizer(tokenizer).feed(ids) == "a"
    assert Detokenizer(tokenizer, skip_special_tokens=False).feed(ids) == "a</s>"


@pytest.mark.parametrize(
    ("tokenizer", "token", "expected"),
    [
        (byte_level(), "Ġa", b" a"),
        (byte_level(), "ðŁ", b"\xf0\x9f"),
        (byte_level(), "<s>", b"<s>"),
        (byte_level(), "<日>", "<日>".encode()),
        (byte_fallback(), "<0xF0>", b"\xf0"),
        (byte_fallback(), "▁a", b" a"),
        (byte_fallback(), "</s>", b"</s>"),
        (metaspace(), "▁b", b" b"),
    ],
)
def test_token_bytes_are_raw(tokenizer: Tokenizer, token: str, expected: bytes):
    """A log probability entry carries the very bytes of its token."""
    assert token_bytes(tokenizer, tokenizer.token_to_id(token)) == expected


def test_unknown_id_has_no_bytes():
    """Padding rows of the output layer stand for nothing."""
    assert token_bytes(byte_level(), 10_000) == b""
