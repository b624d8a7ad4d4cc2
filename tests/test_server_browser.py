"""The server as scripts in a browser use it: `fetch` and its stream, from here and elsewhere."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.web_page_server import launch_chromium, served_model

READ = """
async ({url, body, cut, key}) => {
  const headers = {'content-type': 'application/json'};
  if (key) headers.authorization = `Bearer ${key}`;
  const stop = new AbortController();
  const answer = await fetch(
    url, {method: 'POST', headers, body: JSON.stringify(body), signal: stop.signal});
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  const seen = {status: answer.status, type: answer.headers.get('content-type'),
                id: answer.headers.get('x-request-id'), text: '', last: ''};
  let rest = '';
  const take = bytes => {
    rest += decoder.decode(bytes, {stream: true});
    const parts = rest.split('\\n\\n');
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith('data: ')) continue;
      seen.last = part.slice(6);
      if (seen.last !== '[DONE]')
        seen.text += JSON.parse(seen.last).choices[0]?.delta.content ?? '';
    }
  };
  while (true) {
    const {done, value} = await reader.read();
    if (done) break;
    if (cut === 'leave') { stop.abort(); return seen; }
    for (let at = 0; at < value.length; at += cut) take(value.subarray(at, at + cut));
  }
  seen.rest = rest;
  return seen;
}
"""
"""Reads a stream as pages do, each chunk cut into pieces of `cut` bytes; "leave" ends it early."""

ASKED = {"messages": "hello", "temperature": 0, "max_tokens": 24}
WHOLE = """
async ({url, body}) => {
  const answer = await fetch(url, {method: 'POST', body: JSON.stringify(body)});
  return (await answer.json()).choices[0].message.content;
}
"""
CHAT = "v1/chat/completions"


def opened_at(browser: Any, address: str) -> Any:
    page = browser.new_context().new_page()
    page.set_default_timeout(10_000)
    page.goto(address)
    return page


def test_a_stream_can_be_cut_anywhere(browser: Any) -> None:
    """Whatever pieces the bytes come in, even within a character, the text is the whole answer."""
    with served_model() as address:
        page = opened_at(browser, f"{address}docs")
        whole = page.evaluate(WHOLE, {"url": address + CHAT, "body": ASKED})
        asked = {"url": address + CHAT, "body": {**ASKED, "stream": True}}
        seen = [page.evaluate(READ, {**asked, "cut": cut}) for cut in (1, 7, 100_000)]

    assert [each["text"] for each in seen] == [whole] * 3
    for each in seen:
        assert (each["status"], each["last"], each["rest"]) == (200, "[DONE]", "")
        assert each["type"].startswith("text/event-stream")


def test_aborting_a_fetch_ends_the_request(browser: Any) -> None:
    """The next one finds nothing running."""
    endless = {"messages": "hello", "ignore_eos": True, "stream": True}
    with served_model() as address:
        page = opened_at(browser, f"{address}docs")
        seen = page.evaluate(READ, {"url": address + CHAT, "body": endless, "cut": "leave"})
        page.wait_for_function(
            """async url => (await (await fetch(url)).json()).running === 0""",
            arg=f"{address}v1/system/stats",
        )

    assert seen["status"] == 200


def test_pages_of_other_origins_need_leave(browser: Any) -> None:
    """With it they send the key, read the stream and see the request's id; without, nothing."""
    body = {**ASKED, "stream": True}
    with served_model() as elsewhere:
        page = opened_at(browser, f"{elsewhere}docs")
        with served_model(api_key="k", cors_origins=[elsewhere.rstrip("/")]) as address:
            asked = {"url": address + CHAT, "body": body, "cut": 50, "key": "k"}
            seen = page.evaluate(READ, asked)
            keyless = page.evaluate(
                "async url => (await fetch(url, {method: 'POST', body: '{}'})).status",
                address + CHAT,
            )
        with served_model(api_key="k") as address, pytest.raises(Exception, match="fetch"):
            page.evaluate(READ, {**asked, "url": address + CHAT})

    assert (seen["status"], seen["last"]) == (200, "[DONE]")
    assert len(seen["id"]) == 32
    assert keyless == 401


SEND = """
async ({url, body}) => {
  await fetch(url, {method: 'POST', mode: 'no-cors', body});
  navigator.sendBeacon(url, body);
}
"""
"""What a page may have a browser send anywhere, without asking: a body that is not called JSON."""


def test_a_page_of_another_site_or_port_computes_nothing(browser: Any) -> None:
    """What it can send without asking is refused; the server's own page may send just that."""
    body = '{"messages": "hello", "max_tokens": 2}'
    with served_model() as address, served_model() as elsewhere:
        port = urlsplit(elsewhere).port
        seen = []
        for place in (elsewhere, f"http://localhost:{port}/", address):
            page = opened_at(browser, f"{place}docs")
            page.evaluate(SEND, {"url": address + CHAT, "body": body})
            counted = httpx2.get(f"{address}v1/system/stats").json()["tokens_processed"]
            seen.append(counted > 0)
            page.context.close()

    assert seen == [False, False, True]


def test_a_page_whose_name_leads_here_reads_nothing(browser: Any) -> None:
    """To the browser it is of one origin with the server; its name gives it away."""
    with served_model(allowed_hosts=[]) as address:
        port = urlsplit(address).port
        rules = f"--host-resolver-rules=MAP evil.example 127.0.0.1:{port}"
        misled = launch_chromium(browser.browser_type, rules)
        try:
            page = misled.new_page()
            statuses = [
                page.goto(f"http://{name}:{port}/v1/models").status
                for name in ("evil.example", "localhost", "127.0.0.1")
            ]
        finally:
            misled.close()

    assert statuses == [403, 200, 200]
