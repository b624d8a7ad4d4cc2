"""docs/parity.md against the package: each name is there or refuses, and nothing else is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

import mistralrs_sdk
from mistralrs_sdk import ModelBuilder, MultimodalMessages, RequestBuilder, UnsupportedError
from mistralrs_sdk.handle.unsupported import ModelUnsupported

ROOT = Path(mistralrs_sdk.__file__).parent.parent
PAGE = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
STATUSES = {"same", "other name", "refused", "not needed"}
MADE = {
    "MultimodalMessages": MultimodalMessages,
    "ModelBuilder": lambda: ModelBuilder("x"),
    "RequestBuilder": RequestBuilder,
    "Model": ModelUnsupported,
}
"""What a refused method is called on."""


def rows() -> Iterator[tuple[str, list[str], str, list[str]]]:
    """Each row: the Rust names, the names here, the status, the tests."""
    for line in PAGE.splitlines():
        if not line.startswith("| ") or line.startswith("| mistral.rs |"):
            continue
        rust, ours, status, tests = (cell.strip() for cell in line.strip("|").split(" | "))
        yield rust, spans(ours), status.strip(), spans(tests)


def spans(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


ROWS = list(rows())
NAMES = [
    pytest.param(name, status, id=name)
    for _, ours, status, _ in ROWS
    if status != "not needed"
    for name in ours
]


def resolve(name: str) -> Any:
    thing: Any = mistralrs_sdk
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize(("name", "status"), NAMES)
def test_each_name_is_there_and_does_what_its_status_says(name, status):
    """Names resolve to what the package exports; refused ones raise, no other is made to."""
    thing = resolve(name)

    assert status in STATUSES
    if status != "refused":
        assert "Not done" not in (inspect.getdoc(thing) or "")
        return
    owner, _, method = name.partition(".")
    call = getattr(MADE[owner](), method) if method else thing
    with pytest.raises(UnsupportedError, match=method or name):
        call("anything")


@pytest.mark.parametrize(
    ("rust", "ours"),
    [(rust, ours) for rust, ours, status, _ in ROWS if status in ("same", "refused")],
)
def test_what_is_said_to_keep_its_name_keeps_it(rust, ours):
    """A row of the same or of refused names has each Rust name in both columns."""
    rust_names = {re.split(r"::|\.", name)[-1] for name in spans(rust)}

    assert rust_names == {name.rpartition(".")[2] for name in ours}


def test_each_row_names_tests_that_exist():
    """What shows a row is a file of this suite."""
    for rust, _, _, tests in ROWS:
        assert tests, rust
        for test in tests:
            assert (ROOT / "tests" / test).is_file(), f"{rust}: {test}"


def test_every_public_name_is_on_the_page():
    """Nothing is exported that the page does not name."""
    named = {part for _, ours, _, _ in ROWS for name in ours for part in [name.split(".")[0]]}
    beyond = set(spans(PAGE.split("## Beyond the Rust SDK")[1]))

    assert set(mistralrs_sdk.__all__) - named - beyond == set()
    assert beyond <= set(mistralrs_sdk.__all__)
    assert beyond & named == set()


def test_every_refused_method_is_on_the_page():
    """A method that only says no is listed as refused, so that nobody finds it by surprise."""
    refused = {name for _, ours, status, _ in ROWS if status == "refused" for name in ours}

    for owner in ("ModelBuilder", "RequestBuilder", "Model"):
        for method, thing in inspect.getmembers(resolve(owner), inspect.isfunction):
            if (thing.__doc__ or "").startswith("Not done") and not method.endswith("_with_model"):
                assert f"{owner}.{method}" in refused


def test_a_strictly_checked_program_uses_every_public_name():
    """tests/typed_surface.py, which pyright reads in strict mode, leaves none out."""
    program = (ROOT / "tests" / "typed_surface.py").read_text(encoding="utf-8")

    assert program.startswith("# pyright: strict")
    missing = [n for n in mistralrs_sdk.__all__ if not re.search(rf"\b{n}\b", program)]
    assert missing == []


def test_every_page_is_listed_in_the_readme():
    """Whoever reads README.md finds each page of docs/, and no page that is not there."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    index = readme.split("## Documentation")[1]

    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r"^\* \[docs/([\w.]+)\]\(docs/\1\)", index, re.MULTILINE)) == pages


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_of_a_page_lead_to_files(page):
    """A link to a file of the repository is to one that is there."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))

    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_page_about_runner_names_what_is_refused():
    """Each field and argument that must keep its default is named in docs/runner.md."""
    page = (ROOT / "docs" / "runner.md").read_text(encoding="utf-8").split("## What is refused")[1]
    classes = (
        *(mistralrs_sdk.ChatCompletionRequest, mistralrs_sdk.CompletionRequest),
        *(mistralrs_sdk.Which.Plain, mistralrs_sdk.Which.GGUF, mistralrs_sdk.Which.Embedding),
    )
    refused = {field.name for c in classes for field in attrs.fields(c) if field.validator}

    assert refused <= set(spans(page))
