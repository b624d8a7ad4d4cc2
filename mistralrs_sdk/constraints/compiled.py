"""Constraints made ready for a vocabulary: compiled once, then copied for each answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anyio
import anyio.to_thread
import attrs

from mistralrs_sdk.constraints.constraint import Constraint
from mistralrs_sdk.constraints.json_schema import Place, enforceable, places
from mistralrs_sdk.constraints.matcher import Matcher
from mistralrs_sdk.constraints.vocabulary import Vocabulary
from mistralrs_sdk.errors import RequestError
from mistralrs_sdk.sampling_params import StopTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher

COMPILE_TIMEOUT_S = 5.0
"""Longest a request waits for its constraint to be compiled before it is refused."""

MAX_CHARS = 2**18
"""Longest text of a constraint."""

_STACK_BYTES = 2**29
"""Of the thread that compiles. llguidance recurses through rules and references, and a stack that
overflows would end the process: this holds whatever fits in MAX_CHARS. Only what is used is taken.
"""
_stack_size = threading.Lock()

_JSON_OPTIONS: dict[str, Any] = {
    "lenient": False,
    "coerce_one_of": False,
    # One space, or a line break with its indentation: a model cannot write blanks for ever.
    "whitespace_pattern": r"\x20|\n[\x20\x09]{0,40}",
}
_MAX_TRIED = 500  # schemas compiled alone, to find the one at fault


@attrs.define(eq=False)
class CompiledConstraint:
    """A constraint for one vocabulary."""

    constraint: Constraint
    eos_ids: tuple[int, ...]
    _pristine: LLMatcher

    def matcher(self) -> Matcher:
        """Return the matcher of a new answer, in tens of microseconds."""
        return Matcher(self.eos_ids, self._pristine.deep_copy())


async def compile_in_time(
    constraint: Constraint, vocabulary: Vocabulary, *, timeout: float = COMPILE_TIMEOUT_S
) -> CompiledConstraint:
    """Compile it on a worker thread, unless it was before.

    Raises:
        RequestError: it cannot be enforced, or takes longer than `timeout` seconds.
        UnsupportedError: the model's tokenizer does not work with constraints.
    """
    found = vocabulary.find(constraint)
    if found is not None:
        return found
    if not vocabulary.is_loaded:
        await anyio.to_thread.run_sync(vocabulary.load)
    try:
        with anyio.fail_after(timeout):
            async with vocabulary.turn(constraint):  # one compiles; those who came with it find it
                return await anyio.to_thread.run_sync(
                    compile_constraint, constraint, vocabulary, abandon_on_cancel=True
                )
    except TimeoutError:
        raise RequestError(
            f"the {constraint.kind} constraint takes longer than {timeout:g} s to compile: make "
            "it smaller, or its repetitions shorter"
        ) from None


def compile_constraint(constraint: Constraint, vocabulary: Vocabulary) -> CompiledConstraint:
    """Compile it here, unless it was before.

    Raises:
        RequestError: it is malformed, or says what cannot be enforced; for a JSON schema the JSON
            pointer and keyword are named.
        UnsupportedError: the model's tokenizer does not work with constraints.
    """
    found = vocabulary.find(constraint)
    if found is not None:
        return found
    if len(constraint.text) > MAX_CHARS:
        size = f"it has {len(constraint.text)} characters, and {MAX_CHARS} are allowed"
        raise RequestError(_refusal(constraint, size))
    matcher = _on_large_stack(lambda: _compile(constraint, vocabulary))
    compiled = CompiledConstraint(constraint, vocabulary.eos_ids, matcher)
    vocabulary.keep(compiled)
    return compiled


def _on_large_stack(compile: Callable[[], LLMatcher]) -> LLMatcher:
    """Run it on a thread of its own, and return or raise what it does."""
    made: list[LLMatcher] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(compile())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="mistralrs-compile", daemon=True)
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)  # of threads that start from now on
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed.pop()
    return made.pop()


def _compile(constraint: Constraint, vocabulary: Vocabulary) -> LLMatcher:
    try:
        if constraint.kind == "json_schema":
            return _compile_schema(json.loads(constraint.text), vocabulary)
        matcher = _matcher(_grammar(constraint), vocabulary)
        if error := matcher.get_error():
            raise RequestError(_refusal(constraint, _reason(error)))
        return matcher
    except RecursionError:
        raise RequestError(_refusal(constraint, "it is nested too deeply")) from None
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(_refusal(constraint, _reason(str(error)))) from None


def refuse_stops(stop: StopTokens, vocabulary: Vocabulary) -> None:
    """Refuse stop tokens that could cut an answer where its constraint does not accept it.

    Raises:
        RequestError: there are stop strings, or ids other than the model's own end tokens.
    """
    ids = sorted(set(stop.ids) - set(vocabulary.eos_ids))
    if stop.seqs or ids:
        raise RequestError(
            f"stop tokens {[*stop.seqs, *ids]!r} could cut a constrained answer where it does not "
            "match yet: leave them out, it ends by itself"
        )


def _refusal(constraint: Constraint, why: str) -> str:
    return f"the {constraint.kind} {constraint.text!r:.80} cannot be enforced: {why}"


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    match constraint.kind:
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "lark":
            return LLMatcher.grammar_from_lark(constraint.text)
        case _:
            return constraint.text


def _matcher(grammar: str, vocabulary: Vocabulary) -> LLMatcher:
    """A matcher at its start, with what its first mask takes already computed."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary.load(), grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if warnings := matcher.get_grammar_warnings():  # something would not be enforced
        raise RequestError(f"the grammar cannot be enforced: {'; '.join(warnings)}")
    return matcher


def _compile_schema(schema: Any, vocabulary: Vocabulary) -> LLMatcher:
    if schema is False:
        raise RequestError("the JSON schema false cannot be enforced: no value fits it")
    prepared = {} if schema is True else enforceable(schema)
    matcher = _schema_matcher(prepared, vocabulary)
    if matcher.get_error():
        raise _blame(prepared, vocabulary, matcher.get_error())
    return matcher


def _schema_matcher(schema: Any, vocabulary: Vocabulary) -> LLMatcher:
    from llguidance import LLMatcher

    text = json.dumps(schema, ensure_ascii=False)
    grammar = LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
    return _matcher(grammar, vocabulary)


def _blame(schema: dict[str, Any], vocabulary: Vocabulary, error: str) -> RequestError:
    """Find the innermost schema, and the keyword in it, without which all would be well."""
    embedded = _embed(schema)
    for place in reversed(list(places(schema))[:_MAX_TRIED]):
        pointer = quote(place.pointer[1:], safe="/~")
        alone = {"$ref": f"#/$defs/root{pointer}", "$defs": {"root": embedded}}
        if not (found := _schema_matcher(alone, vocabulary).get_error()):
            continue
        for keyword in _suspects(place.schema):
            rest = {key: value for key, value in place.schema.items() if key != keyword}
            trial = {**_embed(rest), "$defs": {"root": embedded}}
            if not _schema_matcher(trial, vocabulary).get_error():
                return place.refusal(keyword, f"it cannot be enforced: {_reason(found)}")
        return place.refusal(None, f"it cannot be enforced: {_reason(found)}")
    return Place("#", schema).refusal(None, f"it cannot be enforced: {_reason(error)}")


def _suspects(schema: dict[str, Any]) -> Iterator[str]:
    """The keywords of a schema, those first that are at fault more often."""
    yield from (key for key in schema if key not in ("$defs", "definitions", "type"))
    if "type" in schema:
        yield "type"


def _embed(value: Any) -> Any:
    """The schema with references that are right inside of `#/$defs/root`."""
    if isinstance(value, dict):
        return {
            key: f"#/$defs/root{item[1:]}"
            if key == "$ref" and isinstance(item, str)
            else _embed(item)
            for key, item in value.items()
            if key not in ("$id", "$schema")
        }
    return [_embed(item) for item in value] if isinstance(value, list) else value


def _reason(error: str) -> str:
    """What llguidance complains of, on one line and without the grammar it made."""
    message = error.partition(" while processing ")[0].partition("<state>")[0]
    if message.startswith("NoExtension"):
        return "no text fits it"
    if message.startswith("oneOf constraints"):
        return "its alternatives do not exclude each other for sure; 'anyOf' takes them"
    return " ".join(line.strip() for line in message.splitlines() if line.strip())[:300]
