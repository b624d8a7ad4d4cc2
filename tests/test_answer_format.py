"""Which way of calling tools and of thinking is found for a model, and why."""

from __future__ import annotations

import pytest

from mistralrs_sdk.chat.answer_format import TOOL_FORMATS, find_answer_format
from mistralrs_sdk.chat.answer_parser import ReasoningTags

DEEPSEEK = TOOL_FORMATS["deepseek"].markers[0]


@pytest.mark.parametrize(
    ("template", "vocabulary", "expected"),
    [
        ("{{ '<tool_call>' }}", (), "hermes"),
        ("{{ '<tool_call><function=' }}", ("<tool_call>",), "qwen_xml"),
        ("{{ '[TOOL_CALLS]' }}", ("[TOOL_CALLS]",), "mistral"),
        ("{{ '<|tool_call>call:' }}", (), "gemma"),
        ("{{ '<start_function_call>' }}", (), "function_gemma"),
        (f"{{{{ '{DEEPSEEK}```json' }}}}", (), "deepseek"),
        (f"{{{{ '{DEEPSEEK}' }}}}", (), "deepseek_v31"),
        ("{{ tools }}", ("<|python_tag|>", "<|eot_id|>"), "llama"),
        ('{{ \'as {"name": function name, "parameters": object}\' }}', (), "llama"),
        ("{{ '<tool_call>' }}", ("<|python_tag|>",), "hermes"),
        ("{{ messages }}", ("<s>",), "hermes"),
        (None, (), "hermes"),
    ],
)
def test_the_format_of_calls_is_found(template, vocabulary, expected):
    """The template's own marks decide, then the vocabulary's; without any it is Hermes' way."""
    found = find_answer_format(template, vocabulary)

    assert found.tools is TOOL_FORMATS[expected]
    assert len(found.reasons) == 2


@pytest.mark.parametrize(
    ("template", "vocabulary", "expected"),
    [
        ("{{ '<think>\n' }}{{ c.split('</think>') }}", (), "<think>"),
        ("{{ messages }}", ("<think>", "</think>"), "<think>"),
        ("{{ '<|channel>thought\n<channel|>' }}", (), "<|channel>thought"),
        ("{{ '[THINK][/THINK]' }}", (), "[THINK]"),
        ("{{ messages }}", ("<s>",), None),
    ],
)
def test_the_tags_of_reasoning_are_found(template, vocabulary, expected):
    """A model whose template and vocabulary know no tags does not think."""
    tags = find_answer_format(template, vocabulary).reasoning

    assert (tags and tags.opens) == expected


def test_a_response_template_says_how_to_read_answers():
    """What transformers' response template declares comes before all signs."""
    declared = {
        "fields": {
            "reasoning_content": {"open": "<reason>\n", "close": "</reason>"},
            "tool_calls": {"open_pattern": "\\s*<tool_call>", "content": "json"},
        }
    }

    found = find_answer_format("{{ '[TOOL_CALLS]</think>' }}", (), response_template=declared)

    assert found.tools.name == "hermes"
    assert found.reasoning == ReasoningTags(opens="<reason>", closes="</reason>")


def test_reasons_name_the_sign_and_where_it_is():
    """The reasons are words for people."""
    found = find_answer_format("{{ '<tool_call>' }}", ("<think>", "</think>"))

    assert found.reasons == (
        "hermes calls: <tool_call> is in the chat template",
        "reasoning: </think> is in the vocabulary",
    )


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [("Q\n<think>\n", True), ("<think>", True), ("<think>\n\n</think>\n\n", False), ("Q", False)],
)
def test_a_prompt_may_end_inside_reasoning(prompt, opened):
    """A prompt that ends with the opening tag leaves the block to the model."""
    answers = find_answer_format("</think>", ())

    assert answers.begins_thinking(prompt) is opened


def test_no_parser_where_there_is_nothing_to_look_for():
    """Without tools and without reasoning all text is content."""
    assert find_answer_format("{{ messages }}", ()).parser("", ()) is None


def test_tokens_of_calls_are_kept_only_where_tools_are_offered():
    """Special tokens are left out of the text unless something reads them."""
    answers = find_answer_format("[TOOL_CALLS]<|channel>thought<channel|>", ())

    assert answers.tokens(tools=False) == {"<|channel>thought", "<|channel>", "<channel|>"}
    assert {"[TOOL_CALLS]", "[ARGS]"} <= answers.tokens(tools=True)
