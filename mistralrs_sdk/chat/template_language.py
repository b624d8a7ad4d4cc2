"""The language chat templates are written in: Jinja in a sandbox, as Hugging Face extends it."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class RefusedError(jinja2.TemplateError):
    """The template called raise_exception."""


class _GenerationTag(jinja2.ext.Extension):
    """Accept `{% generation %}`, which marks what to train on, and print what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The one environment all templates share; it keeps nothing between renderings."""
    language = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    language.filters["tojson"] = _tojson
    language.globals["raise_exception"] = _raise_exception
    language.globals["strftime_now"] = _strftime_now
    return language


def require_known_names(
    tree: jinja2.nodes.Template, language: jinja2.sandbox.SandboxedEnvironment
) -> None:
    """Find unknown filters and tests now; Jinja itself looks into branches only when they run."""
    kinds: tuple[tuple[str, type[Any], Mapping[str, Callable[..., Any]]], ...] = (
        ("filter", jinja2.nodes.Filter, language.filters),
        ("test", jinja2.nodes.Test, language.tests),
    )
    for kind, node_type, known in kinds:
        for node in tree.find_all(node_type):
            if node.name not in known:
                raise jinja2.TemplateSyntaxError(f"there is no {kind} {node.name!r}", node.lineno)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise RefusedError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
