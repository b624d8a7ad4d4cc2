"""The tokenizer of a Hugging Face folder, its special tokens and its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from tokenizers import Tokenizer

from mistralrs_sdk.errors import ModelLoadError
from mistralrs_sdk.loading.checkpoint import TokenizerFiles
from mistralrs_sdk.loading.json_file import read_json_if_there


def read_tokenizer(
    folder: Path,
    *,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    tokenizer_json: Path | None = None,
) -> TokenizerFiles:
    """Read tokenizer.json (or convert an older tokenizer) and what tokenizer_config.json says.

    `tokenizer_json` takes the place of the folder's own.

    Raises:
        ModelLoadError: there is no tokenizer, or a file of it cannot be read.
    """
    settings = read_json_if_there(folder / "special_tokens_map.json")
    settings |= read_json_if_there(folder / "tokenizer_config.json")
    if tokenizer_json is not None:
        tokenizer = load_tokenizer(tokenizer_json)
    elif (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(folder / "tokenizer.json")
    else:
        tokenizer = _convert(folder)
    prefix = _prefix(tokenizer)
    bos = _token_text(settings.get("bos_token")) or prefix
    eos = _token_text(settings.get("eos_token"))
    template, origin = _chat_template(folder)
    return TokenizerFiles(
        tokenizer=tokenizer,
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=eos_ids(tokenizer, eos, config=config, generation_config=generation_config),
        adds_bos=prefix is not None and prefix == bos,
        chat_template=template,
        template_source=origin,
        unk_token=_token_text(settings.get("unk_token")),
        response_template=settings.get("response_template"),
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
    return _whole(tokenizer)


def with_tokenizer(files: TokenizerFiles, tokenizer: Tokenizer) -> TokenizerFiles:
    """Put `tokenizer` in the place of the model's own; the template and the EOS ids stay."""
    prefix = _prefix(tokenizer)
    bos = files.bos_token or prefix
    return attrs.evolve(
        files,
        tokenizer=tokenizer,
        bos_token=bos,
        adds_bos=prefix is not None and prefix == bos,
        eos_token_ids=files.eos_token_ids
        | eos_ids(tokenizer, files.eos_token, config={}, generation_config={}),
    )


def eos_ids(
    tokenizer: Tokenizer,
    eos_token: str | None,
    *,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
) -> frozenset[int]:
    """Collect every id that ends a turn: the tokenizer's, the config's, the generation config's.

    Raises:
        ModelLoadError: an `eos_token_id` is neither a whole number nor a list of them.
    """
    found: set[int] = set()
    for name, values in (("generation_config", generation_config), ("config", config)):
        value = values.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ModelLoadError(
                    f"eos_token_id in {name}.json is {value!r}: it must be a token id or a list"
                )
            found.add(token_id)
    token_id = tokenizer.token_to_id(eos_token) if eos_token is not None else None
    if token_id is not None:
        found.add(token_id)
    return frozenset(found)


def _prefix(tokenizer: Tokenizer) -> str | None:
    """The token that encoding puts in front of raw text, if it does."""
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    if len(ids) > len(plain) and ids[: len(plain)] != plain:
        return tokenizer.id_to_token(ids[0])
    return None


def _chat_template(folder: Path) -> tuple[str | None, str | None]:
    """The template and the name of the file it is in."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8"), jinja.name
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{jinja} cannot be read: {error}") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = read_json_if_there(folder / name).get("chat_template")
        if isinstance(value, list):  # several, by name
            value = _default_template(value, folder / name)
        if isinstance(value, str):
            return value, name
    return None, None


def _default_template(templates: list[Any], path: Path) -> str | None:
    try:
        return {entry["name"]: entry["template"] for entry in templates}.get("default")
    except (KeyError, TypeError) as error:
        raise ModelLoadError(
            f"{path} has a list of chat templates without name and template: "
            "repair it, or pass with_chat_template(...)"
        ) from error


def _convert(folder: Path) -> Tokenizer:
    """Let transformers convert an older tokenizer (SentencePiece, vocab.json and merges.txt)."""
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        raise ModelLoadError(
            f"{folder} holds no tokenizer.json, tokenizer.model or vocab.json: "
            "add one, or point with_tokenizer_json at it"
        )
    from transformers import AutoTokenizer

    try:
        return _whole(
            AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
        )
    except Exception as error:  # whatever the classes behind it raise
        raise ModelLoadError(
            f"the tokenizer in {folder} cannot be converted ({error}): "
            "point with_tokenizer_json at a tokenizer.json"
        ) from error


def _whole(tokenizer: Tokenizer) -> Tokenizer:
    """Without the truncation and padding that a tokenizer.json made for training may ask for."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
