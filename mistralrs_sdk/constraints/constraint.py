"""`Constraint`: a regex, JSON schema or grammar that an answer must match from start to end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from mistralrs_sdk.errors import RequestError

ConstraintKind = Literal["regex", "json_schema", "lark", "llguidance"]


@attrs.frozen
class Constraint:
    """What the whole text of an answer must match: `Constraint.Regex(r"\\d+")`.

    Two constraints are equal if they say the same; a JSON schema is kept as its JSON text.

    What cannot be enforced to the letter is a RequestError when the request is sent; in a JSON
    schema it names the JSON pointer and keyword (`not`, `if`, `uniqueItems`, unknown keywords and
    formats ...). Properties come in the schema's order. Between the tokens of JSON stand at most
    one space, or one line break with its indentation.

    An answer ends where it matches: by an end token of the model, or by itself once nothing could
    be added, which counts as a token too. So a finish_reason of "stop" means that all of the text
    matches; with `ignore_eos` only the second way is left. Stop strings, and stop ids that are not
    the model's own, are refused beside a constraint.

    Raises:
        RequestError: the value has the wrong type, is empty, or is not JSON.
    """

    kind: ConstraintKind
    text: str
    """The regex, the Lark grammar, or the JSON text of the schema or llguidance grammar."""

    @classmethod
    def Regex(cls, pattern: str) -> Constraint:  # noqa: N802 (mistral.rs' name)
        """The answer matches this regular expression (llguidance's syntax, which is Rust's)."""
        return cls("regex", _text("regex", pattern))

    @classmethod
    def JsonSchema(cls, schema: Mapping[str, Any] | bool | str) -> Constraint:  # noqa: N802
        """The answer is JSON that this schema accepts; `{"type": "object"}` is any object."""
        return cls("json_schema", _json("JSON schema", schema))

    @classmethod
    def Lark(cls, grammar: str) -> Constraint:  # noqa: N802
        """The answer follows this grammar in llguidance's variant of Lark's syntax."""
        return cls("lark", _text("Lark grammar", grammar))

    @classmethod
    def Llguidance(cls, grammar: Mapping[str, Any] | str) -> Constraint:  # noqa: N802
        """The answer follows this llguidance grammar: a `{"grammars": [...]}` object."""
        return cls("llguidance", _json("llguidance grammar", grammar))


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{what} {value!r:.80} must be a non-empty str")
    return value


def _json(what: str, value: Any) -> str:
    try:
        data = json.loads(value) if isinstance(value, str) else value
        if not isinstance(data, Mapping | bool):
            raise RequestError(f"{what} {value!r:.80} must be a JSON object")
        return json.dumps(data, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{what} {value!r:.80} is not JSON: {error}") from None
    except RecursionError:
        raise RequestError(f"{what} is nested too deeply: make it flatter") from None
