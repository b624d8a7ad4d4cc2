"""Conversations on the web page, in headless Chromium; skipped where there is none."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mistralrs_sdk.server.errors import HttpError
from tests.web_page_server import (
    USAGE,
    FakeServer,
    ask,
    opened,
    said,
    served_model,
    wait_for_models,
)


def test_answer_arrives_piece_by_piece(page: Any, server: FakeServer) -> None:
    """What has come is shown while the rest is awaited, and Stop stands where Send was."""
    server.answer, server.hold_after = [said("Hello"), said(", **you**"), said(reason="stop")], 1
    answer = ask(page, "Hi", wait=False)
    answer.get_by_text("Hello", exact=True).wait_for()
    assert page.get_by_role("button", name="Stop").is_visible()
    assert answer.get_attribute("aria-busy") == "true"
    server.go_on.set()
    page.locator("#send:visible").wait_for()
    assert answer.locator(".body").last.inner_html() == "<p>Hello, <strong>you</strong></p>"
    assert answer.get_attribute("aria-busy") == "false"


def test_finished_answer_is_announced_and_measured(page: Any, server: FakeServer) -> None:
    """Screen readers hear the answer once, whole; under it stand tokens and tokens per second."""
    answer = ask(page, "Hi")
    assert page.get_by_role("status").text_content() == "Hello!"
    facts = answer.locator(".speed-note").inner_text()
    assert re.fullmatch(r"5 tokens · 41\.5 tokens/s · first after \d\.\d\d s", facts)


def test_whole_conversation_is_sent(page: Any, server: FakeServer) -> None:
    """The model gets what both have said, without thoughts, and the answer with its usage."""
    server.answer = [said(thought="hm"), said("Hello!"), said(reason="stop"), USAGE]
    ask(page, "Hi")
    ask(page, "And <b>now</b>?")
    assert server.bodies[-1] == {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "And <b>now</b>?"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert page.locator(".message.user").last.locator(".body").inner_text() == "And <b>now</b>?"


def test_thoughts_are_folded(page: Any, server: FakeServer) -> None:
    """Thinking is there for who wants to see it, and apart from the answer."""
    server.answer = [said(thought="First **this**."), said("Done."), said(reason="stop")]
    answer = ask(page, "Hi")
    thought = answer.get_by_text("First this.")
    assert thought.is_hidden()
    answer.get_by_text("Thoughts").click()
    assert thought.is_visible()
    assert answer.locator(":scope > .body").inner_text() == "Done."


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_keeps_what_came_and_hangs_up(page: Any, server: FakeServer, how: str) -> None:
    """The server sees the client leave; the text so far stays and goes on in the conversation."""
    server.answer, server.hold_after = [said("Hello"), said(" never")], 1
    answer = ask(page, "Hi", wait=False)
    answer.get_by_text("Hello", exact=True).wait_for()
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    answer.get_by_text("stopped").wait_for()
    assert server.left.wait(5)
    assert answer.locator(":scope > .body").inner_text() == "Hello"
    assert answer.get_by_role("alert").is_hidden()
    server.hold_after = None
    ask(page, "Go on")
    assert server.bodies[-1]["messages"][1] == {"role": "assistant", "content": "Hello"}


def test_refusal_is_shown_and_can_be_tried_again(page: Any, server: FakeServer) -> None:
    """What the server has against a request is said in its words; the question is not lost."""
    server.refusal = HttpError(429, "the queue is full", headers={"retry-after": "3"})
    answer = ask(page, "Hi")
    assert answer.get_by_role("alert").inner_text() == "the queue is full Try again in 3 s."
    server.refusal = None
    answer.get_by_role("button", name="Try again").click()
    page.get_by_text("Hello!", exact=True).first.wait_for()
    assert server.bodies[0] == server.bodies[1]
    assert page.locator(".message").count() == 2


def test_failure_in_mid_stream_keeps_what_came(page: Any, server: FakeServer) -> None:
    """An error event ends the answer; its text and its reason both stay."""
    server.answer = [said("Half"), {"error": {"message": "the engine stopped"}}]
    answer = ask(page, "Hi")
    assert answer.get_by_role("alert").inner_text() == "the engine stopped"
    assert answer.locator(":scope > .body").inner_text() == "Half"


def test_answer_cut_at_the_limit_says_so(page: Any, server: FakeServer) -> None:
    """Who reads half a sentence sees why."""
    server.answer = [said("Half of"), said(reason="length"), USAGE]
    assert "cut at the most tokens allowed" in ask(page, "Hi").inner_text()


def test_edit_goes_back_to_a_message(page: Any, server: FakeServer) -> None:
    """The message returns to the field; what followed it is gone."""
    ask(page, "One")
    ask(page, "Two")
    page.locator(".message.user").first.hover()
    page.get_by_role("button", name="Edit").first.click()
    assert page.get_by_label("Message", exact=True).input_value() == "One"
    assert page.locator(".message").count() == 0


def test_conversation_outlives_a_reload_until_a_new_one(page: Any, server: FakeServer) -> None:
    """It stays in the tab until "New chat"."""
    ask(page, "Hi")
    page.reload()
    page.get_by_text("Hello!").wait_for()
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0
    page.reload()
    assert page.get_by_role("heading", name="What shall we talk about?").is_visible()


def test_text_of_a_model_does_not_run(page: Any, server: FakeServer) -> None:
    """Markup in answers stays text."""
    server.answer = [said("<img src=x onerror='window.ran = 1'><script>window.ran = 1</script>")]
    answer = ask(page, "Hi")
    assert answer.locator("img, script").count() == 0
    assert page.evaluate("window.ran") is None


def test_page_works_where_the_app_is_mounted(browser: Any) -> None:
    """All addresses are relative: the app may live under a path of another one."""
    with (
        FakeServer(prefix="/llm").running() as server,
        opened(browser, server.address) as page,
    ):
        page.get_by_text("3 running").wait_for()
        assert "Hello!" in ask(page, "Hi").inner_text()


def test_page_talks_to_a_real_model(browser: Any) -> None:
    """With the real server, settings reach the model, and the page shows what comes of it."""
    with served_model() as address, opened(browser, address) as page:
        wait_for_models(page)
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Max tokens").fill("6")
        facts = ask(page, "hello").locator(".speed-note").inner_text()
        assert re.fullmatch(r"6 tokens · .* tokens/s · .* · cut at the most tokens allowed", facts)
        too_long = ask(page, "hello " * 2000)
        assert "tokens" in too_long.get_by_role("alert").inner_text()
        page.get_by_text("ready", exact=True).wait_for()
