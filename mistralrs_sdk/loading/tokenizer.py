"""The tokenizer of a Hugging Face folder, its special tokens and its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mistralrs_sdk.errors import ModelLoadError
from mistralrs_sdk.loading.checkpoint import TokenizerFiles


def read_tokenizer(
    folder: Path, *, config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> TokenizerFiles:
    """Read tokenizer.json (or convert tokenizer.model) and what tokenizer_config.json says.

    Raises:
        ModelLoadError: there is no tokenizer, or a file of it cannot be read.
    """
    settings = _read_optional(folder / "tokenizer_config.json")
    path = folder / "tokenizer.json"
    tokenizer = load_tokenizer(path) if path.is_file() else _convert(folder)
    bos, eos = (_token_text(settings.get(key)) for key in ("bos_token", "eos_token"))
    template, origin = _chat_template(folder, settings)
    return TokenizerFiles(
        tokenizer=tokenizer,
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=eos_ids(tokenizer, eos, config, generation_config),
        adds_bos=adds_bos(tokenizer, bos),
        chat_template=template,
        template_source=origin,
    )


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json.

    Raises:
        ModelLoadError: it is missing or damaged.
    """
    if not path.is_file():
        raise ModelLoadError(f"tokenizer file {path} does not exist")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelLoadError(f"{path} is no tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def eos_ids(
    tokenizer: Tokenizer,
    eos_token: str | None,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
) -> frozenset[int]:
    """Collect every id that ends a turn: the tokenizer's, the config's, the generation config's."""
    found: set[int] = set()
    for value in (generation_config.get("eos_token_id"), config.get("eos_token_id")):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    token_id = tokenizer.token_to_id(eos_token) if eos_token is not None else None
    if token_id is not None:
        found.add(token_id)
    return frozenset(found)


def adds_bos(tokenizer: Tokenizer, bos_token: str | None) -> bool:
    """Whether encoding with special tokens puts the BOS in front."""
    if bos_token is None:
        return False
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    return len(ids) > len(plain) and ids[0] == tokenizer.token_to_id(bos_token)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, str | None]:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8"), jinja.name
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = _read_optional(folder / name).get("chat_template")
        if isinstance(value, list):  # several, by name
            value = {entry["name"]: entry["template"] for entry in value}.get("default")
        if isinstance(value, str):
            return value, name
    return None, None


def _convert(folder: Path) -> Tokenizer:
    """Let transformers convert an older tokenizer (SentencePiece, vocab.json and merges.txt)."""
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        raise ModelLoadError(
            f"{folder} holds no tokenizer.json, tokenizer.model or vocab.json: "
            "add one, or point with_tokenizer_json at it"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder).backend_tokenizer
    except Exception as error:
        raise ModelLoadError(
            f"the tokenizer in {folder} cannot be converted ({error}): "
            "point with_tokenizer_json at a tokenizer.json"
        ) from error


def _read_optional(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value
