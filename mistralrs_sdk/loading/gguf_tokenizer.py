"""The tokenizer a GGUF file describes in its metadata, built with `tokenizers`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import attrs
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.checkpoint import TokenizerFiles
from mistralrs_sdk.loading.gguf_metadata import GgufMetadata

_LOGGER = logging.getLogger("mistralrs_sdk.loading")


def tokenizer_from_gguf(
    metadata: GgufMetadata, *, replaced: Tokenizer | None = None
) -> TokenizerFiles:
    """Build the tokenizer from the `tokenizer.*` keys; `replaced` takes its place.

    Without `add_bos_token`, a BOS is put in front if the model is SentencePiece, or the
    pre-tokenizer is one of Llama 3's or Tekken; never if there is no `bos_token_id`. A turn ends at
    eos, eot and eom; a file that names neither eot nor eom ends turns at the well-known
    control tokens it has, such as <|eot_id|> or <end_of_turn>.

    Raises: ModelLoadError if keys are missing or contradict; UnsupportedError for a tokenizer model
    or a pre-tokenizer that we cannot reproduce exactly.
    """
    model = metadata.text("tokenizer.ggml.model")
    if replaced is None:
        _check_model(metadata, model)
    vocabulary = _read_vocabulary(metadata)
    if replaced is not None:
        tokenizer, adds_bos = replaced, False
    elif model == "gpt2":
        pre = _pre_tokenizer(metadata)
        tokenizer, adds_bos = _byte_level(vocabulary, pre, metadata), pre.adds_bos
        _add_special_tokens(tokenizer, vocabulary, in_normalised_text=False)
    else:
        prefix = metadata.flag("tokenizer.ggml.add_space_prefix") is not False
        if not prefix:
            vocabulary = _respell_spaces(vocabulary)
        tokenizer, adds_bos = _sentencepiece(vocabulary, metadata, prefix=prefix), True
        # With a prefix, normalising the token itself would put a space in front of it.
        _add_special_tokens(tokenizer, vocabulary, in_normalised_text=not prefix)

    named = {name: vocabulary.tokens[index] for name, index in vocabulary.ids.items()}
    template = metadata.text("tokenizer.chat_template")
    return TokenizerFiles(
        tokenizer=tokenizer,
        bos_token=named.get("bos"),
        eos_token=named.get("eos"),
        unk_token=named.get("unk"),
        eos_token_ids=_turn_ends(vocabulary),
        adds_bos=replaced is None and _put_bos(tokenizer, vocabulary, metadata, usual=adds_bos),
        chat_template=template,
        template_source=None if template is None else "GGUF metadata",
    )


def _check_model(metadata: GgufMetadata, model: str | None) -> None:
    if model is None:
        raise metadata.missing("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"{metadata.source}: tokenizer.ggml.model {model!r} is not supported; "
            f"supported: gpt2 (byte-level BPE), llama (SentencePiece); or give the model's "
            "tokenizer.json with with_tokenizer_json()"
        )


def _put_bos(
    tokenizer: Tokenizer, vocabulary: _Vocabulary, metadata: GgufMetadata, *, usual: bool
) -> bool:
    """Let the tokenizer put a BOS in front if the file says so, or such models usually do."""
    bos = vocabulary.ids.get("bos")
    stated = metadata.flag("tokenizer.ggml.add_bos_token")
    adds_bos = usual if stated is None else stated
    if bos is None and adds_bos:
        if stated:
            _warn(metadata, "add_bos_token is set, but no bos_token_id: no BOS is added")
        adds_bos = False
    if metadata.flag("tokenizer.ggml.add_eos_token"):
        _warn(metadata, "add_eos_token is not followed: a prompt that ends in EOS cannot go on")

    if adds_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["bos", "$A"],
            pair=["bos", "$A", "bos:1", "$B:1"],
            special_tokens=[{"id": "bos", "ids": [bos], "tokens": [vocabulary.tokens[bos]]}],
        )
    return adds_bos


# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_SPECIAL_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}

_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


@attrs.frozen(kw_only=True)
class _Vocabulary:
    tokens: Sequence[str]
    types: Sequence[int]
    token_ids: Mapping[str, int]
    """Of a text that appears twice, the first."""
    ids: Mapping[str, int]
    """The special tokens the file names, by the keys of `_SPECIAL_KEYS`."""


def _read_vocabulary(metadata: GgufMetadata) -> _Vocabulary:
    tokens = metadata.sequence("tokenizer.ggml.tokens")
    if not tokens:
        raise metadata.missing("tokenizer.ggml.tokens")
    types = metadata.sequence("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    _check_length(metadata, "tokenizer.ggml.token_type", len(types), len(tokens))
    token_ids = _first_ids(tokens)
    if len(token_ids) < len(tokens):
        repeated = len(tokens) - len(token_ids)
        _warn(metadata, f"{repeated} tokens repeat the text of another and can never be written")
    ids = {}
    for name, key in _SPECIAL_KEYS.items():
        token_id = metadata.integer(f"tokenizer.ggml.{key}")
        if token_id is None:
            continue
        if 0 <= token_id < len(tokens):
            ids[name] = token_id
        else:
            _warn(metadata, f"{key} {token_id} is outside the {len(tokens)} tokens: not used")
    return _Vocabulary(tokens=tokens, types=types, token_ids=token_ids, ids=ids)


def _first_ids(tokens: Sequence[str]) -> dict[str, int]:
    token_ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        token_ids.setdefault(token, index)
    return token_ids


def _check_length(metadata: GgufMetadata, key: str, length: int, num_tokens: int) -> None:
    if length != num_tokens:
        raise ModelLoadError(
            f"{metadata.source}: {key} has {length} entries for {num_tokens} tokens: "
            f"convert the model again"
        )


def _warn(metadata: GgufMetadata, what: str) -> None:
    _LOGGER.warning("%s: %s", metadata.source, what)


def _turn_ends(vocabulary: _Vocabulary) -> frozenset[int]:
    ends = {vocabulary.ids[name] for name in ("eos", "eot", "eom") if name in vocabulary.ids}
    if not {"eot", "eom"} & vocabulary.ids.keys():
        known = [vocabulary.token_ids[text] for text in _TURN_ENDS if text in vocabulary.token_ids]
        ends |= {token_id for token_id in known if vocabulary.types[token_id] == _CONTROL}
    return frozenset(ends)


def _add_special_tokens(
    tokenizer: Tokenizer, vocabulary: _Vocabulary, *, in_normalised_text: bool
) -> None:
    """Match control tokens in raw text, and user-defined ones before anything else splits it."""
    named = set(vocabulary.ids.values())
    special, plain = [], []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in (_CONTROL, _UNKNOWN) or index in named:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=in_normalised_text))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


@attrs.frozen(kw_only=True)
class _PreTokenizer:
    """How text is cut before byte-level BPE merges."""

    patterns: tuple[str, ...]
    """Each cuts the pieces of the one before; what it does not match stays a piece."""
    nfc: bool = False
    ignore_merges: bool = False
    """A piece that is a token is taken whole, whatever the merges say."""
    adds_bos: bool = False


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_DEFAULT = _PreTokenizer(
    patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")
)
_GPT2 = _PreTokenizer(patterns=(_GPT2_WORDS,))
_SINGLE_DIGITS = _PreTokenizer(patterns=(r"\p{N}", _GPT2_WORDS))
_QWEN2_PATTERNS = (_CONTRACTIONS + r"|\p{N}" + _TAIL,)
_LLAMA3_PATTERNS = (_CONTRACTIONS + r"|\p{N}{1,3}" + _TAIL,)
_LLAMA3 = _PreTokenizer(patterns=_LLAMA3_PATTERNS, ignore_merges=True, adds_bos=True)

_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "gigachat"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _SINGLE_DIGITS,
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _PreTokenizer(patterns=_LLAMA3_PATTERNS)),
    "qwen2": _PreTokenizer(patterns=_QWEN2_PATTERNS, nfc=True),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "stablelm2", "megrez"), _PreTokenizer(patterns=_QWEN2_PATTERNS)
    ),
    "tekken": _PreTokenizer(patterns=(_TEKKEN_WORDS,), ignore_merges=True, adds_bos=True),
    "deepseek-coder": _PreTokenizer(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
}


def _pre_tokenizer(metadata: GgufMetadata) -> _PreTokenizer:
    name = metadata.text("tokenizer.ggml.pre")
    if name is None:
        _warn(metadata, "no tokenizer.ggml.pre; taking 'default', which may cut text differently")
        return _DEFAULT
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{metadata.source}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; "
            f"supported: {', '.join(sorted(_PRE_TOKENIZERS))}; or give the model's tokenizer.json "
            "with with_tokenizer_json()"
        )
    return _PRE_TOKENIZERS[name]


def _byte_level(vocabulary: _Vocabulary, pre: _PreTokenizer, metadata: GgufMetadata) -> Tokenizer:
    lines = metadata.sequence("tokenizer.ggml.merges")
    if lines is None:
        raise metadata.missing("tokenizer.ggml.merges")
    merges = [tuple(line.split(" ")) for line in lines]
    for line, merge in zip(lines, merges, strict=True):
        if len(merge) != 2:
            raise ModelLoadError(
                f"{metadata.source}: tokenizer.ggml.merges has {line!r}, "
                f"which is not two tokens with a space between: convert the model again"
            )
    tokenizer = Tokenizer(
        _bpe(vocabulary, merges, metadata, ignore_merges=pre.ignore_merges, unk_token=None)
    )
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bpe(
    vocabulary: _Vocabulary,
    merges: list[tuple[str, str]],
    metadata: GgufMetadata,
    **options: object,
) -> models.BPE:
    try:
        return models.BPE(dict(vocabulary.token_ids), merges, **options)
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelLoadError(
            f"{metadata.source}: the vocabulary and its merges do not belong together ({error}): "
            f"convert the model again"
        ) from error


def _respell_spaces(vocabulary: _Vocabulary) -> _Vocabulary:
    """Spell user-defined tokens with ▁ again: converters write runs of spaces as spaces."""
    tokens = [
        token.replace(" ", "▁") if kind == _USER_DEFINED else token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    return attrs.evolve(vocabulary, tokens=tokens, token_ids=_first_ids(tokens))


def _sentencepiece(vocabulary: _Vocabulary, metadata: GgufMetadata, *, prefix: bool) -> Tokenizer:
    """SentencePiece BPE: the best-scored piece is merged first; unknown characters become bytes.

    A space goes in front of the text and of what follows a control token, as llama.cpp does, unless
    the file says otherwise (Gemma).
    """
    if metadata.flag("tokenizer.ggml.remove_extra_whitespaces"):
        _warn(metadata, "remove_extra_whitespaces is not followed: spaces are kept as they are")
    unk = vocabulary.ids.get("unk")
    if unk is None and _UNKNOWN in vocabulary.types:
        unk = vocabulary.types.index(_UNKNOWN)
    bytes_known = all(f"<0x{value:02X}>" in vocabulary.token_ids for value in range(256))
    tokenizer = Tokenizer(
        _bpe(
            vocabulary,
            _merges_from_scores(vocabulary, metadata),
            metadata,
            unk_token=None if unk is None else vocabulary.tokens[unk],
            fuse_unk=True,
            byte_fallback=bytes_known,
        )
    )
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *spaces] if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(vocabulary: _Vocabulary, metadata: GgufMetadata) -> list[tuple[str, str]]:
    """Every way to make a piece out of two others, best score first.

    SentencePiece merges the adjacent pair whose union has the best score, the leftmost of equals;
    BPE merges the pair with the lowest rank, the leftmost of equals.
    """
    scores = metadata.sequence("tokenizer.ggml.scores")
    if scores is None:
        raise metadata.missing("tokenizer.ggml.scores")
    _check_length(metadata, "tokenizer.ggml.scores", len(scores), len(vocabulary.tokens))
    # Control, byte and unknown tokens are never made from text, and unused ones never come out.
    pieces = {
        token: index
        for token, index in vocabulary.token_ids.items()
        if vocabulary.types[index] in (_NORMAL, _USER_DEFINED)
    }
    merges: list[tuple[str, str]] = []
    for piece in sorted(pieces, key=lambda piece: (-scores[pieces[piece]], pieces[piece])):
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in pieces and (right := piece[cut:]) in pieces:
                merges.append((left, right))
    return merges
