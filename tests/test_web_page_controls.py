"""The web page's settings, panel, themes and keys, in headless Chromium."""

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
    wait_for_models,
)

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


def focused(page: Any) -> str:
    """The id, name or label of what has the focus."""
    return page.evaluate(
        "(({id, name, ariaLabel, tagName}) => id || name || ariaLabel || tagName)"
        "(document.activeElement)"
    )


def test_settings_are_sent_and_kept(page: Any, server: FakeServer) -> None:
    """Each field is its key of the API, as a number where it is one; a reload keeps them."""
    fields = {"Temperature": "0.5", "Max tokens": "64", "Top p": "0.9", "Top k": "40"}
    fields |= {"Min p": "0.05", "Seed": "7", "Presence": "0.1", "Frequency": "0.2"}
    for label, value in (fields | {"Repetition": "1.1", "Stop at": "END"}).items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Thinking").select_option("off")
    page.get_by_role("textbox", name="System prompt").fill("Be brief.")
    page.reload()
    wait_for_models(page)
    ask(page, "Hi")
    body = server.bodies[0]
    assert body.pop("messages")[0] == {"role": "system", "content": "Be brief."}
    assert body == {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "max_tokens": 64,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 7,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "enable_thinking": False,
        "stop": ["END"],
    }
    page.get_by_role("button", name="Reset settings").click()
    ask(page, "Hi")
    assert server.bodies[1].keys() == {"model", "messages", "stream", "stream_options"}


def test_setting_out_of_range_is_pointed_at(page: Any, server: FakeServer) -> None:
    """Nothing is sent; the field gets the focus, even if the panel was closed."""
    page.get_by_label("Temperature").fill("9")
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Message", exact=True).fill("Hi")
    page.keyboard.press("Enter")
    assert focused(page) == "temperature"
    assert server.bodies == []
    assert page.get_by_label("Message", exact=True).input_value() == "Hi"


def test_model_and_adapter_are_chosen(page: Any, server: FakeServer) -> None:
    """Adapters are offered beside the model that has them, and only there."""
    models = page.get_by_label("Model", exact=True)
    assert models.locator("option").all_inner_texts() == ["tiny", "sleeping"]
    page.get_by_label("Adapter").select_option("polite")
    ask(page, "Hi")
    assert (server.bodies[0]["model"], server.bodies[0]["adapter"]) == ("tiny", "polite")
    models.select_option("sleeping")
    page.get_by_text("unloaded: the next message loads it").wait_for()
    assert page.get_by_label("Adapter").is_hidden()
    ask(page, "Hi")
    assert server.bodies[1]["model"] == "sleeping"
    assert "adapter" not in server.bodies[1]


def test_panel_shows_what_the_server_does(page: Any, server: FakeServer) -> None:
    """Running, waiting and cache use stand there, for eyes and for screen readers."""
    page.get_by_text("3 running").wait_for()
    meters = {name: page.get_by_role("meter", name=name) for name in ("Running", "Cache in use")}
    assert meters["Running"].get_attribute("aria-valuetext") == "3 of 32"
    assert meters["Cache in use"].get_attribute("aria-valuetext") == "25.0%"
    assert page.locator("#waiting").inner_text() == "2"
    assert page.locator("#hits").inner_text() == "75%"
    server.model.metrics_now.tokens_processed += 500
    page.locator("#speed").filter(has_not_text=re.compile("^0$")).wait_for()


def test_panel_says_that_the_server_is_gone(page: Any, server: FakeServer) -> None:
    """Nobody waits for an answer that cannot come; when it is back, so is the panel."""
    page.get_by_text("3 running").wait_for()
    page.context.set_offline(True)
    page.get_by_text("cannot be reached", exact=True).wait_for()
    page.context.set_offline(False)
    page.get_by_text("3 running").wait_for()


def test_page_opened_too_early_gets_its_models_later(browser: Any, server: FakeServer) -> None:
    """Who opens the page while the server cannot answer need not load it again."""
    with opened(browser, server.address) as page:
        page.route("**/v1/**", lambda route: route.abort())
        page.reload()
        page.get_by_text("cannot be reached", exact=True).wait_for()
        assert page.locator("#model option").count() == 0
        page.unroute_all()
        wait_for_models(page)


def test_key_is_asked_for_where_there_is_one(browser: Any, server: FakeServer) -> None:
    """A person types it once; it goes with every request, and is not asked for when declined."""
    server.key = "secret"
    with opened(browser, server.address) as page:
        dialog = page.get_by_role("dialog", name="This server wants a key")
        dialog.wait_for()
        page.keyboard.press("Escape")
        page.wait_for_timeout(1300)  # longer than the panel waits
        assert dialog.is_hidden()
        assert "API key is missing" in ask(page, "Hi").get_by_role("alert").inner_text()
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        page.get_by_text("3 running").wait_for()
        page.get_by_role("button", name="Try again").click()
        page.get_by_text("Hello!", exact=True).first.wait_for()


# Looks and keys


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(browser: Any, server: FakeServer, scheme: str) -> None:
    """The page follows the system; every text has at least the contrast of WCAG AA, 4.5 to 1."""
    server.answer = [said("`code` [link](https://a.example)\n\n```\ncode\n```\n> quote"), USAGE]
    with opened(browser, server.address, color_scheme=scheme) as page:
        ask(page, "Hi")
        server.refusal = HttpError(400, "no")
        ask(page, "Hi")
        page.get_by_text("3 running").wait_for()
        assert page.evaluate(LOW_CONTRAST) == []
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (light == "rgb(251, 250, 248)") is (scheme == "light")


def test_theme_can_be_chosen(page: Any, server: FakeServer) -> None:
    """The button overrules the system and is remembered."""
    button = page.get_by_role("button", name="Dark theme")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    page.reload()
    assert button.get_attribute("aria-pressed") == "true"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == "rgb(22, 23, 26)"


def test_keyboard_reaches_everything_in_order(page: Any, server: FakeServer) -> None:
    """Tab goes through bar, conversation, message and panel; each stop shows that it is there."""
    page.get_by_label("Adapter").wait_for()
    page.locator(".skip").focus()
    seen = [focused(page)]
    while len(seen) < 40 and seen[-1] != "BODY":
        page.keyboard.press("Tab")
        seen.append(focused(page))
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert seen[-1] in ("BODY", "prompt") or page.evaluate(outline) != "none", seen[-1]
    first = ["A", "model", "adapter", "new-chat", "theme", "panel-toggle", "scroll", "prompt"]
    assert seen[: len(first)] == first
    assert seen[len(first) :][:3] == ["system", "temperature", "max_tokens"]


def test_keys_of_the_message_field(page: Any, server: FakeServer) -> None:
    """The field has the focus at first; Shift+Enter starts a line, Enter sends what is no blank."""
    assert focused(page) == "prompt"
    page.keyboard.press("Enter")
    page.keyboard.type("  ")
    page.keyboard.press("Enter")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.get_by_text("Hello!", exact=True).first.wait_for()
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["one\ntwo"]
    assert focused(page) == "prompt"


def test_narrow_screen_has_one_column(browser: Any, server: FakeServer) -> None:
    """Nothing scrolls sideways; the panel lies over the chat and gives the focus back."""
    server.answer = [said("a" * 300 + "\n\n```\n" + "b" * 300 + "\n```"), USAGE]
    with opened(browser, server.address, **PHONE) as page:
        ask(page, "w" * 300)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.locator("#scroll").evaluate("e => e.scrollWidth <= e.clientWidth")
        panel = page.get_by_role("complementary", name="Settings and server")
        assert panel.is_hidden()
        page.get_by_role("button", name="Settings", exact=True).click()
        assert panel.is_visible()
        assert page.locator("#chat").evaluate("e => e.inert")
        page.keyboard.press("Escape")
        assert panel.is_hidden()
        assert focused(page) == "panel-toggle"


LOW_CONTRAST = """() => {
  const parse = (color) => (color.match(/[\\d.]+/g) ?? []).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, alpha = 1] = parse(getComputedStyle(at).backgroundColor);
      if (alpha === 1) return [r, g, b];
    }
  };
  const low = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility()) continue;
    const [a, b] = [parse(getComputedStyle(element).color).slice(0, 3), behind(element)].map(light);
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) low.push(`${texts.currentNode.data} ${contrast.toFixed(2)}`);
  }
  return low;
}"""
