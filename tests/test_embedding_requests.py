"""What can be sent to an embedding model, and the ids it becomes."""

from __future__ import annotations

from array import array

import pytest
from tokenizers import Tokenizer

from mistralrs_sdk.chat.embedding_encoder import EmbeddingEncoder
from mistralrs_sdk.chat.embeddings import (
    EmbeddingRequest,
    EmbeddingRequestBuilder,
    EmbeddingResponse,
    as_embedding_request,
)
from mistralrs_sdk.errors import RequestError, UnsupportedError
from tests.embedding_models import bare_folder


def encoder(**settings) -> EmbeddingEncoder:
    tokenizer = Tokenizer.from_file(str(bare_folder("qwen3") / "tokenizer.json"))
    settings = {"limit": 8, "vocab_size": 512, "prompts": {"query": "ask "}, **settings}
    return EmbeddingEncoder(tokenizer, **settings)


def ids_of(asked, **settings) -> list[tuple[int, ...]]:
    return [one.ids for one in encoder(**settings).encode(as_embedding_request(asked))]


def test_a_builder_keeps_the_order_and_never_changes():
    """Texts and ids stand in the order they were added, in a new builder each time."""
    empty = EmbeddingRequest.builder()

    full = empty.add_prompt("a").add_tokens([1, 2]).add_prompts(["b", "c"])
    full = full.add_tokens_batch([[3], [4]]).with_truncate_sequence(True).with_prompt_name("query")

    assert empty == EmbeddingRequestBuilder()
    assert full.build() == EmbeddingRequest(
        ["a", [1, 2], "b", "c", [3], [4]], truncate_sequence=True, prompt_name="query"
    )


def test_a_request_is_written_as_in_both_packages():
    """`EmbeddingRequest(input, truncate_sequence)` is what a builder makes of the same."""
    made = EmbeddingRequest.builder().add_prompt("a").with_truncate_sequence(True).build()

    assert EmbeddingRequest("a", True) == EmbeddingRequest(input=["a"], truncate_sequence=True)
    assert EmbeddingRequest("a", True) == made
    assert EmbeddingRequest([1, 2]).inputs == ((1, 2),)
    with pytest.raises(RequestError, match=r"truncate_sequence \(3\)"):
        EmbeddingRequest("a", 3)


@pytest.mark.parametrize("asked", [EmbeddingRequestBuilder(), []], ids=["builder", "list"])
def test_an_empty_request_is_refused(asked):
    """Nothing to embed is an error, as in mistral.rs."""
    with pytest.raises(RequestError, match="empty: add_prompt"):
        as_embedding_request(asked)


@pytest.mark.parametrize(
    ("asked", "inputs"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
        (EmbeddingRequestBuilder().add_prompt("a"), ("a",)),
    ],
    ids=str,
)
def test_plain_values_are_requests(asked, inputs):
    """A text, texts, ids and lists of ids stand for a request."""
    assert as_embedding_request(asked).inputs == inputs


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (b"a", "bytes cannot be embedded"),
        (7, "int cannot be embedded"),
        ({"a"}, "set cannot be embedded"),
        ([1.5], "no list of token ids"),
        ([[1.5]], "token id 1.5 is no whole number"),
        ([True], "token id True is no whole number"),
        ([["a"]], "token id 'a' is no whole number"),
    ],
    ids=str,
)
def test_other_values_are_refused(asked, message):
    """The error names what was given."""
    with pytest.raises(RequestError, match=message):
        as_embedding_request(asked)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.add_prompt(3), "3 is no str"),
        (lambda b: b.add_prompts("abc"), "use add_prompt for one"),
        (lambda b: b.add_tokens("abc"), "no list of token ids"),
        (lambda b: b.with_truncate_sequence(1), "must be True or False"),
        (lambda b: b.with_prompt_name(""), "prompt_name"),
    ],
)
def test_builder_methods_check_their_arguments(call, message):
    """What is wrong is refused where it is written."""
    with pytest.raises(RequestError, match=message):
        call(EmbeddingRequestBuilder())


def test_dimensions_are_refused_by_name():
    """Asking for shorter vectors is not ignored."""
    with pytest.raises(UnsupportedError, match=r"with_dimensions\(128\)"):
        EmbeddingRequestBuilder().with_dimensions(128)


def test_texts_get_special_tokens_and_ids_do_not():
    """The tokenizer's EOS ends a text; ids are taken as they are."""
    text, ids = ids_of(["zz", [5, 6]])

    assert text[-1] == 2
    assert len(text) == 3
    assert ids == (5, 6)


def test_a_too_long_input_is_refused_by_number():
    """The error says which one, how long it is and what helps."""
    with pytest.raises(RequestError, match="input 1 has 11 tokens and the model takes at most 8"):
        ids_of(["z", "z" * 10])
    with pytest.raises(RequestError, match="input 0 has 9 tokens"):
        ids_of([[5] * 9])


def test_truncation_drops_the_end_and_keeps_special_tokens():
    """A cut text still ends with the EOS; cut ids just end."""
    cut = EmbeddingRequestBuilder().with_truncate_sequence(True)

    assert ids_of(cut.add_prompt("z" * 12)) == ids_of("z" * 7)
    assert ids_of(cut.add_tokens([*range(3, 20)])) == [tuple(range(3, 11))]


def test_an_instruction_is_put_in_front_of_texts_only():
    """By name, or by default; ids are left as they are."""
    query = EmbeddingRequestBuilder().add_prompt("zz").add_tokens([5]).with_prompt_name("query")

    assert ids_of(query) == [*ids_of("ask zz"), (5,)]
    assert ids_of("zz", default_prompt_name="query") == ids_of("ask zz")


def test_an_unknown_instruction_is_refused():
    """The error lists those the model has."""
    with pytest.raises(RequestError, match="no prompt named 'doc'; those it has: 'query'"):
        ids_of(EmbeddingRequestBuilder().add_prompt("a").with_prompt_name("doc"))


def test_an_instruction_can_be_left_out_of_pooling():
    """Its tokens are counted without the EOS, and one token always remains."""
    asked = EmbeddingRequestBuilder().add_prompt("zz").with_prompt_name("query").build()

    (counted,) = encoder(include_prompt=False).encode(asked)
    (whole,) = encoder().encode(asked)

    assert counted.skip == len(ids_of("ask ")[0]) - 1
    assert whole.skip == 0
    bare = EmbeddingRequestBuilder().add_prompt("").with_prompt_name("query").build()
    (only,) = encoder(include_prompt=False).encode(bare)
    assert only.skip == len(only.ids) - 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([[]], "input 0 is empty"),
        ([[512]], r"token id 512 is outside the vocabulary \(0 to 511\)"),
        ([[-1]], "token id -1 is outside"),
        (["ok", "bad \ud800"], "input 1 is not valid Unicode: lone surrogate at character 4"),
    ],
)
def test_bad_inputs_are_refused(asked, message):
    """Before anything is computed."""
    with pytest.raises(RequestError, match=message):
        ids_of(asked)


def test_a_response_is_lists_arrays_and_openai_json():
    """The same numbers three ways, and what was used."""
    response = EmbeddingResponse(
        model="m", vectors=(array("f", [1, 0.5]), array("f", [0, 2])), prompt_tokens=7
    )

    assert response.embeddings == [[1.0, 0.5], [0.0, 2.0]]
    assert (response.dimensions, response.total_tokens) == (2, 7)
    written = response.to_dict()
    assert written["data"][1] == {"object": "embedding", "index": 1, "embedding": [0.0, 2.0]}
    assert written["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
