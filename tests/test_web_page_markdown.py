"""What the web page makes of a model's Markdown, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.web_page_server import FakeServer, headless_chromium, opened

COPY = '<button type="button" class="text copy" data-copy="code">Copy</button>'
WEB_LINK = 'target="_blank" rel="noopener noreferrer"'


def code(language: str, text: str) -> str:
    head = f"<figcaption><span>{language}</span>{COPY}</figcaption>"
    return f'<figure class="code">{head}<pre tabindex="0"><code>{text}</code></pre></figure>'


CASES = {
    "paragraphs and line breaks": ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    "bold, italic, deleted": (
        "**b** *i* __b__ _i_ ~~d~~ ***both***",
        "<p><strong>b</strong> <em>i</em> <strong>b</strong> <em>i</em> <del>d</del> "
        "<strong><em>both</em></strong></p>",
    ),
    "bold in italic": ("*a **b** c*", "<p><em>a <strong>b</strong> c</em></p>"),
    "marks that are only characters": (
        "2 * 3 * 4, snake_case_name, **open, a ~~ b",
        "<p>2 * 3 * 4, snake_case_name, **open, a ~~ b</p>",
    ),
    "escaped marks": (r"\*not\* \_this\_", "<p>*not* _this_</p>"),
    "code spans hold no marks": ("`a **b** <c>`", "<p><code>a **b** &lt;c&gt;</code></p>"),
    "a code span with ticks": ("``a ` b``", "<p><code>a ` b</code></p>"),
    "code": (
        "```python\nif a < b:\n\n    # *c*\n```\nx",
        code("python", "if a &lt; b:\n\n    # *c*") + "<p>x</p>",
    ),
    "code without an end": ("~~~\na\n```\nb", code("text", "a\n```\nb")),
    "headings": ("# One\n#### Two #x", "<h3>One</h3><h6>Two #x</h6>"),
    "a rule": ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
    "a list after text": (
        "Say:\n- a\n- **b**",
        "<p>Say:</p><ul><li><span>a</span></li><li><span><strong>b</strong></span></li></ul>",
    ),
    "a numbered list goes on from its number": (
        "3. a\n4. b",
        '<ol start="3"><li><span>a</span></li><li><span>b</span></li></ol>',
    ),
    "a list in a list": (
        "1. a\n   - b\n   - c\n2. d",
        '<ol start="1"><li><span>a</span><ul><li><span>b</span></li><li><span>c</span></li></ul>'
        "</li><li><span>d</span></li></ol>",
    ),
    "a list with gaps": ("- a\n\n- b", "<ul><li><span>a</span></li><li><span>b</span></li></ul>"),
    "code in a list": (
        "- a\n  ```\n  b\n  ```\n\nc",
        f"<ul><li><span>a</span>{code('text', 'b')}</li></ul><p>c</p>",
    ),
    "a quote": ("> a\n> - b", "<blockquote><p>a</p><ul><li><span>b</span></li></ul></blockquote>"),
    "a table": (
        "| a | b |\n|---|--:|\n| `c` | 1 |",
        '<div class="table" tabindex="0"><table><thead><tr><th class="left">a</th>'
        '<th class="right">b</th></tr></thead><tbody><tr><td class="left"><code>c</code></td>'
        '<td class="right">1</td></tr></tbody></table></div>',
    ),
    "links": (
        "[**x**](https://a.example/b) and https://c.example.",
        f'<p><a href="https://a.example/b" {WEB_LINK}><strong>x</strong></a> and '
        f'<a href="https://c.example" {WEB_LINK}>https://c.example</a>.</p>',
    ),
    "links that run something are text": (
        "[x](javascript:alert(1)) [y](data:text/html,z)",
        "<p>[x](javascript:alert(1)) [y](data:text/html,z)</p>",
    ),
    "an image is a link": (
        "![cat](https://a.example/cat.png)",
        f'<p><a href="https://a.example/cat.png" {WEB_LINK}>cat</a></p>',
    ),
    "markup is text": (
        "<img src=x onerror=alert(1)> <script>alert(2)</script> &amp;",
        "<p>&lt;img src=x onerror=alert(1)&gt; &lt;script&gt;alert(2)&lt;/script&gt; &amp;amp;</p>",
    ),
}

SHOW = """async (text) => {
  const { MarkdownView } = await import("/ui/markdown.js");
  const element = document.createElement("div");
  new MarkdownView(element).set(text);
  return element.innerHTML;
}"""

GROW = """async (text) => {
  const { MarkdownView } = await import("/ui/markdown.js");
  const grown = document.createElement("div");
  const view = new MarkdownView(grown);
  const differing = [];
  for (let end = 1; end <= text.length; end += 1) {
    const whole = document.createElement("div");
    new MarkdownView(whole).set(text.slice(0, end));
    view.set(text.slice(0, end));
    if (grown.innerHTML !== whole.innerHTML) differing.push(end);
  }
  return differing;
}"""

KEEP = """async () => {
  const { MarkdownView } = await import("/ui/markdown.js");
  const element = document.createElement("div");
  const view = new MarkdownView(element);
  view.set("first\\n\\nsec");
  const first = element.firstChild;
  view.set("first\\n\\nsecond");
  return first === element.firstChild;
}"""

TIME = """async (text) => {
  const { MarkdownView } = await import("/ui/markdown.js");
  const start = performance.now();
  new MarkdownView(document.createElement("div")).set(text);
  return performance.now() - start;
}"""


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with (
        headless_chromium() as browser,
        FakeServer().running() as server,
        opened(browser, server.address) as page,
    ):
        yield page


@pytest.mark.parametrize("name", CASES)
def test_markdown_becomes_elements(page: Any, name: str) -> None:
    """What models use is drawn; everything else stays the text it is."""
    text, shown = CASES[name]
    assert page.evaluate(SHOW, text) == shown


def test_streamed_text_looks_like_the_whole(page: Any) -> None:
    """However far an answer has come, it is drawn as if that had arrived at once."""
    text = "\n\n".join(text for text, _ in CASES.values())
    assert page.evaluate(GROW, text) == []


def test_what_is_complete_is_not_drawn_again(page: Any) -> None:
    """Only blocks that change are replaced: a selection in the others outlives the stream."""
    assert page.evaluate(KEEP)


HOSTILE = {
    "marks that never close": "**a " * 4000,
    "alternating marks": "*_" * 4000,
    "brackets": "[" * 8000,
    "ticks": "`" * 8001 + "a",
    "quotes": "> " * 5000 + "x",
    "indents": "  " * 4000 + "- x",
    "lists": "".join("  " * depth + "- b\n" for depth in range(200)),
    "dashes": "-" * 8000 + "|\n" * 2,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text_is_drawn_quickly(page: Any, text: str) -> None:
    """No text makes the page hang: what is nested too deeply or never closed is shown plainly."""
    assert page.evaluate(TIME, text) < 2000  # milliseconds; a wide margin for busy machines
