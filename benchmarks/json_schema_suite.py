"""Is what the official JSON-Schema-Test-Suite calls invalid ever accepted by a constraint?

    python benchmarks/json_schema_suite.py --suite FOLDER [--optional] [--failures 20]

FOLDER holds the suite's `tests`. The source distribution of jsonschema has it, as `json`:

    pip download --no-binary :all: --no-deps jsonschema && tar xf jsonschema-*.tar.gz

Each schema is compiled as for a request, over a vocabulary of single bytes. Those that cannot be
enforced to the letter must be refused with a RequestError; under the others no invalid instance may
be a whole answer, in any order of its properties. Valid ones may be missed: numbers and whitespace
are written in one way, and formats are asserted. Exit code 1 says that an invalid instance was
accepted, or that a schema failed with another error. `--optional` adds what the suite does not ask
of everyone: formats, the regular expressions of ECMA 262, numbers beyond floating point.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mistralrs_sdk.constraints.compiled import CompiledConstraint, compile_constraint
from mistralrs_sdk.constraints.constraint import Constraint
from mistralrs_sdk.constraints.vocabulary import Vocabulary
from mistralrs_sdk.errors import RequestError

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}
"""The suite's folders, and the `$schema` that a schema of each means."""
MAX_ORDERS = 24
"""Most orders of properties in which an instance is written."""
END = "<end>"


@attrs.define
class Tally:
    """What became of the schemas and instances of one draft."""

    schemas: int = 0
    refused: int = 0
    valid: int = 0
    accepted: int = 0
    """Of the valid instances."""
    invalid: int = 0
    wrong: list[str] = attrs.field(factory=list)
    """Invalid instances that were accepted, and schemas that failed with another error."""
    missed: collections.Counter[str] = attrs.field(factory=collections.Counter)
    """Valid instances that were not accepted, by file of the suite."""


class Grammar:
    """What a model may answer under a schema, asked of whole texts."""

    def __init__(self) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {token: i for i, token in enumerate([*letters, END])}
        self._tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens([END])
        self._vocabulary = Vocabulary(self._tokenizer, size=len(vocab), eos_ids=[vocab[END]])

    def compile(self, schema: Any) -> CompiledConstraint:
        return compile_constraint(Constraint.JsonSchema(schema), self._vocabulary)

    def accepts(self, compiled: CompiledConstraint, instance: Any) -> bool:
        """Whether the instance, with its properties in some order, is a whole answer."""
        for written in itertools.islice(orders(instance), MAX_ORDERS):
            matcher = compiled.matcher()
            ids = self._tokenizer.encode(json.dumps(written, ensure_ascii=False)).ids
            if all(matcher.advance(token) for token in ids) and matcher.is_accepting:
                return True
        return False


def orders(instance: Any) -> Iterator[Any]:
    """The instance, its properties in each order, as given first."""
    if isinstance(instance, dict):
        for keys in itertools.permutations(instance):
            for values in itertools.product(*(orders(instance[key]) for key in keys)):
                yield dict(zip(keys, values, strict=True))
    elif isinstance(instance, list):
        yield from map(list, itertools.product(*map(orders, instance)))
    else:
        yield instance


def run_file(path: Path, dialect: str, grammar: Grammar, tally: Tally) -> None:
    """Try every schema of a file of the suite, and its instances."""
    for group in json.loads(path.read_text(encoding="utf-8")):
        schema = group["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": dialect, **schema}
        tally.schemas += 1
        where = f"{path.parent.name}/{path.name}: {group['description']}"
        try:
            compiled = grammar.compile(schema)
        except RequestError:
            tally.refused += 1
            continue
        except Exception as error:
            tally.wrong.append(f"{where}: {type(error).__name__}: {error}")
            continue
        for test in group["tests"]:
            accepted = grammar.accepts(compiled, test["data"])
            if test["valid"]:
                tally.valid += 1
                tally.accepted += accepted
                tally.missed[path.stem] += not accepted
            else:
                tally.invalid += 1
                if accepted:
                    tally.wrong.append(f"{where}: {test['description']}")


def run_suite(tests: Path, *, optional: bool = False) -> dict[str, Tally]:
    """The tallies of the drafts, and apart from them of what the suite calls optional."""
    grammar = Grammar()
    tallies: dict[str, Tally] = {}
    for draft, dialect in DRAFTS.items():
        for path in sorted((tests / draft).glob("*.json")):
            run_file(path, dialect, grammar, tallies.setdefault(draft, Tally()))
        for path in sorted((tests / draft / "optional").rglob("*.json")) if optional else ():
            run_file(path, dialect, grammar, tallies.setdefault(f"{draft} optional", Tally()))
    return tallies


def report(tallies: dict[str, Tally], *, failures: int = 20) -> str:
    """A table in Markdown, and below it what is wrong and what was missed most."""
    rows = [
        "| Draft | Schemas | refused | Valid instances | accepted | Invalid | accepted or failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, tally in tallies.items():
        numbers = (tally.schemas, tally.refused, tally.valid, tally.accepted, tally.invalid)
        rows.append(f"| {name} | {' | '.join(map(str, (*numbers, len(tally.wrong))))} |")
    wrong = [f"{name}: {line}" for name, tally in tallies.items() for line in tally.wrong]
    missed = sum((tally.missed for tally in tallies.values()), collections.Counter[str]())
    most = ", ".join(f"{file} {count}" for file, count in missed.most_common(12))
    return "\n".join([*rows, "", *wrong[:failures], f"Valid but not accepted: {most or 'none'}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--suite", type=Path, required=True, help="the folder that holds `tests`")
    parser.add_argument("--optional", action="store_true", help="its optional tests, too")
    parser.add_argument("--failures", type=int, default=20, help="how many are printed")
    args = parser.parse_args()
    tallies = run_suite(args.suite / "tests", optional=args.optional)
    if not tallies:
        parser.error(f"{args.suite / 'tests'} holds no {', '.join(DRAFTS)}")
    print(report(tallies, failures=args.failures))
    return int(any(tally.wrong for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
