"""Which models `serve` loads: from its flags and from the file that `--config` names."""

from __future__ import annotations

import argparse
import copy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from mistralrs_sdk import (
    ConfigError,
    EmbeddingModelBuilder,
    McpClientConfig,
    ModelBuilder,
    MultiModelBuilder,
)
from mistralrs_sdk.cli.model_flags import add_model_flags, builder_from, model_place

AnyBuilder = ModelBuilder | EmbeddingModelBuilder | MultiModelBuilder

DEMO = "demo"

MAX_SEQS = 32
"""Sequences at once unless the flag says otherwise."""

_SHARED = ("with_num_threads", "with_token_source", "from_hf_cache_path")
"""Flags that a model that embeds takes from those given for all: they are about the machine."""

_KINDS = ("text", "embedding")


class ConfigFile(argparse.Action):
    """`--config FILE`: its keys are flags; those on the command line win over them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            found = _read(Path(values))
            tables = found.pop("models", [])
            if not isinstance(tables, list):
                raise ConfigError('"models" must be tables, each under [[models]]')
            given = _parse(parser, found)
        except ConfigError as error:
            raise argparse.ArgumentError(self, f"{values}: {error}") from error
        for name, value in given.items():
            if getattr(namespace, name) == parser.get_default(name):
                setattr(namespace, name, value)
        namespace.models = tables
        setattr(namespace, self.dest, values)


def builder_of(args: argparse.Namespace, *, mcp: McpClientConfig | None = None) -> AnyBuilder:
    """The builder of all models that flags and file describe; those that chat use `mcp`.

    Raises:
        ConfigError: there is none, two have one id, a setting is wrong, or none would use `mcp`.
    """
    found: list[tuple[str | None, ModelBuilder | EmbeddingModelBuilder]] = [
        # under the name people know it by; what that leads to is a path on this machine
        *(
            (DEMO if model == DEMO else None, _chatting(_with(args, model_id=model)))
            for model in args.model_id or ()
        ),
        *(
            (None, _embedding(_with(args, model_id=model), {}))
            for model in args.embedding_model_id or ()
        ),
    ]
    for number, table in enumerate(args.models, start=1):
        try:
            found.append(_from_table(args, table))
        except ConfigError as error:
            raise ConfigError(f"{args.config}: [[models]] number {number}: {error}") from error
    if not found:
        raise ConfigError("there is no model to serve: name one with -m, or a file with --config")
    if mcp is not None:
        if not any(isinstance(each, ModelBuilder) for _, each in found):
            raise ConfigError(
                "--mcp-config, or MCP_CONFIG_PATH, has no effect: no model here chats; leave it "
                "out, or name one with -m"
            )
        found = [
            (id, each.with_mcp_client(mcp) if isinstance(each, ModelBuilder) else each)
            for id, each in found
        ]
    if len(found) == 1 and found[0][0] is None and args.default_model_id is None:
        return found[0][1]
    several = MultiModelBuilder()
    for alias, builder in found:
        if alias is None:
            several = several.add_model(builder)
        else:
            several = several.add_model_with_alias(alias, builder)
    if args.default_model_id is not None:
        several = several.with_default_model(args.default_model_id)
    return several


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"it is no TOML: {error}") from error


def _from_table(
    args: argparse.Namespace, table: object
) -> tuple[str | None, ModelBuilder | EmbeddingModelBuilder]:
    """A model with settings of its own; those given for all hold where it has none."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"({table!r:.80}) must be a table")
    flags = dict(table)
    alias, kind = flags.pop("id", None), flags.pop("kind", "text")
    if alias is not None and not isinstance(alias, str):
        raise ConfigError(f"id ({alias!r}) must be a text")
    if kind not in _KINDS:
        raise ConfigError(f"kind ({kind!r}) must be {' or '.join(map(repr, _KINDS))}")
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_model_flags(parser, max_seqs=MAX_SEQS)
    given = _parse(parser, flags)
    merged = _with(args, **given)
    return alias, _embedding(merged, given) if kind == "embedding" else _chatting(merged)


def _chatting(args: argparse.Namespace) -> ModelBuilder:
    builder = builder_from(args)
    return builder.with_progress(False) if args.quiet else builder.with_logging()


def _embedding(args: argparse.Namespace, own: Mapping[str, Any]) -> EmbeddingModelBuilder:
    """A model that embeds, with what suits it of the flags for all, and `own` flags."""
    builder = EmbeddingModelBuilder(model_place(args.model_id))
    flags = {name: getattr(args, name) for name in _SHARED} | dict(own)
    if "max_seqs" in flags:
        flags["with_max_num_seqs"] = flags.pop("max_seqs")
    if args.cpu:
        builder = builder.with_force_cpu()
    if args.throughput_logging:
        builder = builder.with_throughput_logging()
    for name, value in flags.items():
        if value is None or name in ("model_id", "cpu", "throughput_logging"):
            continue
        try:
            method = getattr(builder, name)
        except AttributeError:
            shown = name.removeprefix("with_").replace("_", "-")
            raise ConfigError(f"{shown} has no effect on a model that embeds: drop it") from None
        builder = method(value)
    return builder.with_progress(False) if args.quiet else builder.with_logging()


def _parse(parser: argparse.ArgumentParser, flags: Mapping[str, Any]) -> dict[str, Any]:
    """What flags from a file come to: only those that are not as they are by default.

    Raises:
        ConfigError: one is unknown, or has a wrong value.
    """
    actions = {
        name.removeprefix("--"): action
        for action in parser._actions  # argparse has no public way to list what a parser takes
        for name in action.option_strings
    }
    words: list[str] = []
    for key, value in flags.items():
        name = key.replace("_", "-")
        action = actions.get(name)
        if action is None or isinstance(action, ConfigFile) or name in ("help", "h"):
            known = ", ".join(sorted(name for name in actions if not name.startswith("-")))
            raise ConfigError(f"{key!r} is no flag: there are {known}")
        words += _words(name, value, action)
    strict = _Parser(
        parents=[parser], add_help=False, allow_abbrev=False, conflict_handler="resolve"
    )
    found = vars(strict.parse_args(words))
    return {name: value for name, value in found.items() if value != parser.get_default(name)}


def _words(name: str, value: Any, action: argparse.Action) -> list[str]:
    if isinstance(value, bool):
        if action.nargs != 0:
            raise ConfigError(f"{name} ({str(value).lower()}) needs a value")
        if value:
            return [f"--{name}"]
        return [f"--no-{name}"] if f"--no-{name}" in action.option_strings else []
    if action.nargs == 0:
        raise ConfigError(f"{name} ({value!r}) must be true or false")
    values = value if isinstance(value, list) else [value]
    for each in values:
        if not isinstance(each, str | int | float) or isinstance(each, bool):
            raise ConfigError(f"{name} ({each!r:.80}) must be a text or a number")
    return [f"--{name}={each}" for each in values]


def _with(args: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    changed = copy.copy(args)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


class _Parser(argparse.ArgumentParser):
    """Says what is wrong by an exception, not by leaving."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
