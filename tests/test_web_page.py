"""The web page's files and headers, and the numbers of its panel, without a browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

import mistralrs_sdk
from mistralrs_sdk.server import web_page
from tests.web_page_server import FakeServer

WEB = Path(mistralrs_sdk.__file__).parent / "server" / "web"
SCRIPTS = sorted(WEB.glob("*.js"))


@pytest.fixture
def client() -> TestClient:
    return TestClient(FakeServer().app)


class Tags(HTMLParser):
    """Every tag of a page with its attributes, those inside labels, and inline code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.in_labels: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self._in_label = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if self._in_label:
            self.in_labels.append(self.tags[-1])
        self._in_label = self._in_label or tag == "label"

    def handle_endtag(self, tag: str) -> None:
        self._in_label = self._in_label and tag != "label"

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in ("script", "style"):
            self.inline += data


@pytest.fixture
def page() -> Tags:
    return Tags((WEB / web_page.PAGE).read_text())


@pytest.mark.parametrize("path", ["/", "/ui"])
def test_page_is_at_the_root_and_where_mistral_rs_has_it(client: TestClient, path: str) -> None:
    """Both addresses show the page."""
    answer = client.get(path)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == (WEB / web_page.PAGE).read_text()


@pytest.mark.parametrize("name", sorted(web_page.ASSETS))
def test_every_part_of_the_page_is_served_with_its_type(client: TestClient, name: str) -> None:
    """What is in the folder is sent as it is, under /ui/."""
    answer = client.get(f"/ui/{name}")
    assert answer.headers["content-type"].partition(";")[0] == web_page.ASSETS[name]
    assert answer.content == (WEB / name).read_bytes()


def test_folder_holds_what_is_served_and_nothing_else() -> None:
    """No file of the page is forgotten, and none is left over."""
    assert {file.name for file in WEB.iterdir()} == {web_page.PAGE, *web_page.ASSETS}


def test_wheel_holds_the_page() -> None:
    """An installed package has the page's files: they are no Python, so a builder may drop them."""
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling")
    root = Path(mistralrs_sdk.__file__).parents[1]
    if not (root / "pyproject.toml").exists():
        pytest.skip("needs the source tree")
    included = {file.path for file in wheel.WheelBuilder(str(root)).recurse_included_files()}
    assert {str(file) for file in WEB.iterdir()} <= included


@pytest.mark.parametrize("path", ["/", *(f"/ui/{name}" for name in sorted(web_page.ASSETS))])
def test_every_part_carries_the_policy(client: TestClient, path: str) -> None:
    """A browser loads and runs only this server's files, and puts the page into no frame."""
    headers = client.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy.pop("trusted-types") == "'none'"
    own = {"connect-src", "img-src", "script-src", "style-src"}
    assert policy == {name: "'self'" if name in own else "'none'" for name in policy}
    assert {"default-src", "base-uri", "form-action", "frame-ancestors", *own} == policy.keys()
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_page_has_nothing_inline(page: Tags) -> None:
    """Scripts, styles and handlers are in files of their own, as the policy wants it."""
    assert page.inline.strip() == ""
    names = {name for _, attributes in page.tags for name in attributes}
    assert not [name for name in names if name == "style" or name.startswith("on")]


def test_page_loads_from_relative_addresses_only(page: Tags) -> None:
    """It works without a network and wherever the app is mounted."""
    links = [
        attributes[name]
        for _, attributes in page.tags
        for name in ("src", "href")
        if attributes.get(name) and not attributes[name].startswith("#")
    ]
    assert links
    assert {link for link in links if link.removeprefix("ui/") not in web_page.ASSETS} == set()


@pytest.mark.parametrize("file", [*SCRIPTS, WEB / "page.css"], ids=lambda file: file.name)
def test_files_name_no_other_server(file: Path) -> None:
    """Neither scripts nor styles hold an address outside, and scripts build no markup of text."""
    text = file.read_text()
    assert not re.search(r"https?://\w|url\(|@import", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)


def test_every_field_has_a_name(page: Tags) -> None:
    """A screen reader can say what each field is for: it is in a label, or has one elsewhere."""
    labels = {attributes.get("for") for tag, attributes in page.tags if tag == "label"}
    fields = [entry for entry in page.tags if entry[0] in ("input", "select", "textarea")]
    assert len(fields) > 10
    named = [each for each in fields if each in page.in_labels or each[1].get("id") in labels]
    assert named == fields


def test_unchanged_file_is_not_sent_again(client: TestClient) -> None:
    """A browser that has a file asks whether it is the same, and is told so."""
    first = client.get("/ui/page.js")
    again = client.get("/ui/page.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert first.headers["cache-control"] == "no-cache"


def test_unknown_file_is_404(client: TestClient) -> None:
    """The folder is not looked into: only the known names are answered."""
    for name in ("nothing.js", "index.html", "..%2Fweb_page.py"):
        answer = client.get(f"/ui/{name}")
        assert answer.status_code == 404, name
    assert "'nothing.js'" in client.get("/ui/nothing.js").json()["error"]["message"]


def test_public_paths_are_the_page_and_not_the_numbers() -> None:
    """Who has no key sees the page, which asks for one, and nothing of what the server does."""
    parts = {f"/ui/{name}" for name in web_page.ASSETS}
    assert {"/", "/ui", *parts} == web_page.PUBLIC_PATHS
    routes = {route.path for route in web_page.routes()} - {"/ui/{name}"}
    assert routes - web_page.PUBLIC_PATHS == {web_page.STATS_PATH}


def test_numbers_of_the_default_model(client: TestClient) -> None:
    """Without a name the panel gets what the default model does, and what it could."""
    stats = client.get(web_page.STATS_PATH).json()
    assert stats == {
        "model": "tiny",
        "loaded": True,
        "context": 256,
        "adapters": ["polite"],
        "running": 3,
        "waiting": 2,
        "capacity": 32,
        "blocks_used": 64,
        "blocks_total": 256,
        "prefix_lookups": 8,
        "prefix_hits": 6,
        "preemptions": 1,
        "tokens_processed": 1000,
    }


def test_looking_at_an_unloaded_model_does_not_load_it(client: TestClient) -> None:
    """The panel of a model that sleeps says so."""
    stats = client.get(web_page.STATS_PATH, params={"model": "sleeping"}).json()
    assert stats == {"model": "sleeping", "loaded": False}


def test_model_that_embeds_has_no_adapters(client: TestClient) -> None:
    """The panel works for every kind of model."""
    assert client.get(web_page.STATS_PATH, params={"model": "embedder"}).json()["adapters"] == []


def test_unknown_model_is_404(client: TestClient) -> None:
    """As in every other endpoint."""
    answer = client.get(web_page.STATS_PATH, params={"model": "nobody"})
    assert answer.status_code == 404
    assert "'nobody'" in answer.json()["error"]["message"]


def test_routes_do_not_need_the_rest_of_the_server() -> None:
    """The page alone is an app: its routes bring all they need but the model."""
    assert TestClient(Starlette(routes=web_page.routes())).get("/").status_code == 200
