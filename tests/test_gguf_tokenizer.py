"""Tokenizers built from GGUF metadata against independent references."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.checkpoint import TokenizerFiles
from mistralrs_sdk.loading.gguf_metadata import GgufMetadata
from mistralrs_sdk.loading.gguf_tokenizer import tokenizer_from_gguf

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox doesn't.",
    "  Indented lines    and runs of   spaces\n\n\tand tabs, 12345 numbers, 3.14 and 2024.",
    "She'll say it's HERE; we've seen THAT they'd go. Naïve café, Zürich, 東京 и Порту.",
    "def add(first, second):\n    return first + second  # adds\n",
] * 3
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "\n\n\n",
    "don't DON'T we'LL",
    "1234567 v2 ½²",
    "emoji 🙂👩‍👩‍👧 here",
    "e\u0301 é",
    "a  b   c    d",
    "\u3000wide\u00a0space ",
    "▁ literal ▁▁",
]
anything = st.text(st.sampled_from("abeht THE'sd.,12 \n\tÉé界🙂▁"), max_size=40)
thorough = settings(derandomize=True, max_examples=150, deadline=None, database=None)


def build(values: dict[str, Any]) -> TokenizerFiles:
    """Build from keys without their common prefix; a value of None drops the key."""
    kept = {
        key if key == "tokenizer.chat_template" else f"tokenizer.ggml.{key}": value
        for key, value in values.items()
        if value is not None
    }
    return tokenizer_from_gguf(GgufMetadata(kept, "test.gguf"))


# Byte-level BPE


def trained_bpe(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=420,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "</s>"],
            show_progress=False,
        ),
    )
    return tokenizer


def bpe_values(reference: Tokenizer, **changes: Any) -> dict[str, Any]:
    """What a GGUF file would say about a trained tokenizer."""
    model = json.loads(reference.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token in ("<s>", "</s>") else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | changes


GPT2_CUT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS_CUT = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_CUT])


@pytest.fixture(scope="module")
def references() -> dict[str, Tokenizer]:
    return {"gpt-2": trained_bpe(GPT2_CUT), "smollm": trained_bpe(DIGITS_CUT)}


@pytest.mark.parametrize("pre", ["gpt-2", "smollm"])
def test_byte_level_bpe_equals_its_original(references, pre):
    """Ids equal those of the tokenizer the vocabulary came from, on texts and on noise."""
    reference = references[pre]
    tokenizer = build(bpe_values(reference, pre=pre)).tokenizer
    for text in TEXTS:
        assert tokenizer.encode(text).ids == reference.encode(text).ids, text

    @thorough
    @given(anything)
    def same(text: str) -> None:
        assert tokenizer.encode(text).ids == reference.encode(text).ids

    same()


def test_qwen2_equals_transformers(references):
    """Qwen 2 text is composed (NFC) first, and cut by Qwen's own pattern."""
    from transformers import Qwen2Tokenizer

    values = bpe_values(references["gpt-2"], pre="qwen2")
    reference = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(values["tokens"])},
        merges=[tuple(merge.split(" ")) for merge in values["merges"]],
        unk_token=None,
    ).backend_tokenizer
    tokenizer = build(values).tokenizer

    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 12345  x", ["it", "'s", "Ġ12345", "Ġ", "Ġx"]),
        ("smollm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "DON'T 1234567\n\n x", ["DON", "'T", "Ġ", "123", "456", "7", "ĊĊ", "Ġx"]),
        ("qwen2", "We'LL 123", ["We", "'LL", "Ġ", "1", "2", "3"]),
        ("tekken", "helloWorld 12/\n", ["hello", "World", "Ġ", "1", "2", "/Ċ"]),
        ("default", "a1234==b", ["a", "123", "4", "==", "b"]),
        ("deepseek-coder", "ab 12\nc.", ["ab", "Ġ", "1", "2", "Ċ", "c", "."]),
    ],
)
def test_text_is_cut_as_the_pre_tokenizer_says(references, pre, text, pieces):
    """Each family cuts words, contractions, digits and line ends in its own way."""
    tokenizer = build(bpe_values(references["gpt-2"], pre=pre)).tokenizer

    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_an_unknown_pre_tokenizer_is_named(references):
    """Cutting text wrongly is silent, so an unknown name is refused with the known ones."""
    with pytest.raises(UnsupportedError, match=r"'martian'.*llama-bpe.*qwen2.*smollm"):
        build(bpe_values(references["gpt-2"], pre="martian"))


def test_a_missing_pre_tokenizer_is_a_warning(references, caplog):
    """Old files do not say; llama.cpp's default is taken, aloud."""
    with caplog.at_level(logging.WARNING, "mistralrs_sdk.loading"):
        build(bpe_values(references["gpt-2"], pre=None))

    assert "tokenizer.ggml.pre" in caplog.text


def test_llama3_takes_whole_tokens_before_merges(references):
    """A piece that is a token is one id even where no merge leads to it."""
    values = bpe_values(references["gpt-2"], pre="llama-bpe")
    values["tokens"] = [*values["tokens"], "Ġzyzzyva"]
    values["token_type"] = [*values["token_type"], 1]

    whole = build(values).tokenizer.encode(" zyzzyva", add_special_tokens=False)
    merged = build(values | {"pre": "smaug-bpe"}).tokenizer.encode(" zyzzyva")

    assert whole.ids == [len(values["tokens"]) - 1]
    assert len(merged.ids) > 1


def test_merges_that_do_not_fit_the_vocabulary_are_refused(references):
    """A merge of a token that does not exist is a load error naming the file."""
    values = bpe_values(references["gpt-2"])
    with pytest.raises(ModelLoadError, match=r"test\.gguf.*do not belong together"):
        build(values | {"merges": [*values["merges"], "nonsense x"]})
    with pytest.raises(ModelLoadError, match="'nospace'"):
        build(values | {"merges": ["nospace"]})


def test_an_unknown_tokenizer_model_is_named(references):
    """Only the two kinds we can reproduce are built."""
    with pytest.raises(UnsupportedError, match="'t5' is not supported; supported: gpt2"):
        build(bpe_values(references["gpt-2"], model="t5"))


# SentencePiece


def spm_values(*, prefix: bool, user_defined: tuple[str, ...] = ()) -> dict[str, Any]:
    """A SentencePiece BPE vocabulary as a converter writes it: scores, bytes, no merges."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=260, show_progress=False))
    vocab = trained.get_vocab()
    pieces = [piece for piece in sorted(vocab, key=vocab.get) if piece not in user_defined]
    merged = [piece for piece in pieces if len(piece) > 1]
    single = [piece for piece in pieces if len(piece) == 1]
    head = ["<unk>", "<s>", "</s>", *user_defined, *(f"<0x{value:02X}>" for value in range(256))]
    types = [2, 3, 3, *([4] * len(user_defined)), *([6] * 256)]
    return {
        "model": "llama",
        "tokens": head + merged + single,
        "token_type": types + [1] * len(pieces),
        "scores": [0.0] * len(head) + [-float(rank) for rank in range(len(pieces))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": prefix,
        "add_bos_token": False,
    }


def sentencepiece_ids(values: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's algorithm, slowly: best-scored adjacent pair first, leftmost of equals."""
    ids = {token: index for index, token in enumerate(values["tokens"])}
    frozen = {
        token.replace(" ", "▁")
        for token, kind in zip(values["tokens"], values["token_type"], strict=True)
        if kind == 4
    }
    text = text.replace(" ", "▁")
    if values["add_space_prefix"] and text:
        text = "▁" + text
    symbols: list[str] = []
    while text:
        whole = max((word for word in frozen if text.startswith(word)), key=len, default=text[0])
        symbols.append(whole)
        text = text[len(whole) :]
    while True:
        best: tuple[float, int] | None = None
        for place, pair in enumerate(itertools.pairwise(symbols)):
            index = ids.get("".join(pair))
            if index is None or values["token_type"][index] != 1 or frozen & set(pair):
                continue
            if best is None or values["scores"][index] > best[0]:
                best = (values["scores"][index], place)
        if best is None:
            break
        symbols[best[1] : best[1] + 2] = ["".join(symbols[best[1] : best[1] + 2])]
    spelled = {token.replace(" ", "▁"): index for token, index in ids.items()}
    result = []
    for symbol in symbols:
        if symbol in spelled:
            result.append(spelled[symbol])
        else:
            result += [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return result


GEMMA_LIKE = ("\n", "\n\n", "  ", "   ", "    ", "<tag>")


@pytest.mark.parametrize(("prefix", "user_defined"), [(True, ()), (False, ()), (False, GEMMA_LIKE)])
def test_sentencepiece_bpe_equals_the_algorithm(prefix, user_defined):
    """Scores become merges, unknown characters bytes, and runs of spaces stay whole."""
    values = spm_values(prefix=prefix, user_defined=user_defined)
    tokenizer = build(values).tokenizer
    for text in [*TEXTS, "x<tag>y  z", "a\n\n\nb"]:
        assert tokenizer.encode(text).ids == sentencepiece_ids(values, text), text

    @thorough
    @given(anything)
    def same(text: str) -> None:
        assert tokenizer.encode(text).ids == sentencepiece_ids(values, text)

    same()


@pytest.mark.parametrize(("prefix", "user_defined"), [(True, ()), (False, GEMMA_LIKE)])
def test_sentencepiece_text_survives_the_round_trip(prefix, user_defined):
    """Decoding gives the text back: the prefix space goes, bytes become characters."""
    tokenizer = build(spm_values(prefix=prefix, user_defined=user_defined)).tokenizer
    for text in TEXTS:
        if "▁" not in text:  # indistinguishable from a space, by design
            assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_prefix_space_follows_every_control_token():
    """As llama.cpp does: text after a control token starts like the beginning of a text."""
    values = spm_values(prefix=True)
    tokenizer = build(values).tokenizer

    ids = tokenizer.encode("<s>The dog").ids

    assert ids == [1, *sentencepiece_ids(values, "The dog")]


def test_missing_scores_are_named():
    """Without scores there is no order of merging."""
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.ggml\.scores"):
        build(spm_values(prefix=True) | {"scores": None})


def test_a_large_vocabulary_is_built_in_seconds():
    """262,144 pieces take time in proportion, as in Gemma."""
    values = spm_values(prefix=False)
    letters = "abcdefghijklmnopqrstuvwxyz"
    known = set(values["tokens"])
    made = (a + b + c + d for a in letters for b in letters for c in letters for d in letters)
    extra = [piece for piece in made if piece not in known][: 262_144 - len(known)]
    values["tokens"] = values["tokens"] + extra
    values["token_type"] = values["token_type"] + [1] * len(extra)
    values["scores"] = values["scores"] + [-1000.0 - rank for rank in range(len(extra))]

    assert build(values).tokenizer.get_vocab_size() == 262_144


# Special tokens, BOS, ends of a turn


def test_special_tokens_are_matched_in_text(references):
    """A control token written in the text is its own id, and left out of decoded text."""
    tokenizer = build(bpe_values(references["gpt-2"])).tokenizer

    ids = tokenizer.encode("<s>The</s>").ids

    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.decode(ids) == "The"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>The</s>"


def test_user_defined_tokens_are_matched_and_shown(references):
    """A user-defined token stays whole in text and is no special token."""
    values = bpe_values(references["gpt-2"])
    values["tokens"] = [*values["tokens"], "<think>"]
    values["token_type"] = [*values["token_type"], 4]
    tokenizer = build(values).tokenizer

    ids = tokenizer.encode("The<think>dog").ids

    assert len(values["tokens"]) - 1 in ids
    assert tokenizer.decode(ids) == "The<think>dog"


@pytest.mark.parametrize(
    ("changes", "adds"),
    [
        ({"pre": "gpt-2"}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "gpt-2", "add_bos_token": True}, True),
        ({"pre": "llama-bpe", "bos_token_id": None}, False),
        ({"pre": "gpt-2", "add_bos_token": True, "bos_token_id": None}, False),
    ],
)
def test_bos_is_added_only_where_the_file_says(references, changes, adds):
    """By the flag, else by the pre-tokenizer; without a BOS id never."""
    files = build(bpe_values(references["gpt-2"], **changes))
    plain = files.tokenizer.encode("The dog", add_special_tokens=False).ids

    assert files.adds_bos is adds
    assert files.tokenizer.encode("The dog").ids == ([0] if adds else []) + plain
    assert (files.bos_token is None) == ("bos_token_id" in changes)


def test_sentencepiece_adds_bos_unless_told_otherwise():
    """SentencePiece models start with BOS when the file has no flag."""
    files = build(spm_values(prefix=True) | {"add_bos_token": None})

    assert files.adds_bos is True
    assert files.tokenizer.encode("The").ids[0] == 1


def test_a_special_id_outside_the_vocabulary_is_not_used(references, caplog):
    """An id no token has is a warning, not a token."""
    with caplog.at_level(logging.WARNING, "mistralrs_sdk.loading"):
        files = build(bpe_values(references["gpt-2"], bos_token_id=0xFFFFFFFF, add_bos_token=True))

    assert files.bos_token is None
    assert files.adds_bos is False
    assert "bos_token_id 4294967295" in caplog.text


@pytest.mark.parametrize(
    ("token", "kind", "keys", "ends"),
    [
        ("<|eot_id|>", 3, {}, True),
        ("<|eot_id|>", 3, {"eom_token_id": 0}, False),
        ("<|eot_id|>", 1, {}, False),
        ("<other>", 3, {}, False),
    ],
)
def test_a_turn_ends_at_well_known_tokens_if_the_file_names_none(
    references, token, kind, keys, ends
):
    """EOS always ends a turn; a known control token only where eot and eom are not given."""
    values = bpe_values(references["gpt-2"], **keys)
    values["tokens"] = [*values["tokens"], token]
    values["token_type"] = [*values["token_type"], kind]
    extra = len(values["tokens"]) - 1

    expected = {1, *keys.values()} | ({extra} if ends else set())
    assert build(values).eos_token_ids == expected


def test_the_template_is_read_from_the_metadata(references):
    """The chat template comes with the words that say where it is from."""
    template = "{{ messages[0].content }}"
    files = build(bpe_values(references["gpt-2"]) | {"tokenizer.chat_template": template})
    assert (files.chat_template, files.template_source) == (template, "GGUF metadata")

    without = build(bpe_values(references["gpt-2"]))
    assert (without.chat_template, without.template_source) == (None, None)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_streamed_text_equals_decoded_text(references, kind):
    """Token by token, with characters spread over tokens, the same text comes out."""
    values = bpe_values(references["gpt-2"]) if kind == "gpt2" else spm_values(prefix=True)
    tokenizer = build(values).tokenizer
    text = "The dog 🙂 says 東京  twice."
    ids = tokenizer.encode(text).ids
    stream = DecodeStream(skip_special_tokens=True)

    assert "".join(stream.step(tokenizer, token) or "" for token in ids) == text
