"""`BlockingModel`: what `Model` does, without an event loop."""

from __future__ import annotations

import gc
import inspect
import threading

import pytest

from mistralrs_sdk import (
    BlockingModel,
    EngineClosedError,
    Model,
    RequestBuilder,
    RequestError,
    TextMessages,
    UnsupportedError,
)
from mistralrs_sdk.builders.multi_model_builder import MultiModelBuilder
from tests.model_helpers import tiny_builder, tiny_folder


def two_models() -> MultiModelBuilder:
    return (
        MultiModelBuilder()
        .add_model_with_alias("a", tiny_builder("llama"))
        .add_model_with_alias("b", tiny_builder("qwen3"))
    )


def public_methods(kind: type) -> set[str]:
    return {
        name for name, _ in inspect.getmembers(kind, inspect.isroutine) if not name.startswith("_")
    }


def test_the_blocking_model_mirrors_the_model():
    """The same methods with the same arguments; `close` is what `aclose` is there."""
    missing = public_methods(Model) - public_methods(BlockingModel)
    assert missing == {"aclose", "build"}

    for name in public_methods(Model) & public_methods(BlockingModel) - {"inner"}:
        ours, theirs = getattr(BlockingModel, name), getattr(Model, name)
        assert not inspect.iscoroutinefunction(ours), name
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(theirs).parameters
        ), name


def test_a_blocking_model_is_made_from_any_builder():
    """Under both names of mistral.rs."""
    with BlockingModel.from_auto_builder(tiny_builder()) as model:
        assert model.list_models() == [str(tiny_folder("llama"))]


def test_a_blocking_model_has_the_methods_of_several_models():
    """The same names and arguments, from plain code."""
    with BlockingModel.from_builder(two_models()) as model:
        messages = TextMessages().add_message("user", "hi")
        answer = model.send_chat_request(messages, model_id="b").choices[0].message.content
        assert answer == model.chat("hi", model_id="b")
        model.unload_model("b")
        assert model.list_models() == ["a"]
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in model.stream_chat_request(messages, model_id="b")
        ]
        assert "".join(pieces) == answer
        model.set_default_model_id("b")
        assert model.get_default_model_id() == "b"
    assert "closed" in repr(model)
    assert model.max_sequence_length() == 512


def test_completions_come_in_chunks_too():
    """An iterator of chunks, with what the whole completion has."""
    with BlockingModel.from_builder(tiny_builder()) as model:
        request = RequestBuilder().set_sampler_max_len(6)
        whole = model.send_completion_request("Hello", request, echo=True).choices[0].text
        chunks = model.stream_completion_request("Hello", request, echo=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole


def test_errors_come_through_as_they_are():
    """Those of a request, of an unknown model and of what is not done."""
    with BlockingModel.from_builder(tiny_builder()) as model:
        with pytest.raises(RequestError, match="empty"):
            model.send_completion_request([])
        with pytest.raises(RequestError, match="'c' is not known"):
            model.chat("hi", model_id="c")
        with pytest.raises(RequestError, match="'c' is not known"):
            model.stream_chat_request("hi", model_id="c")
        with pytest.raises(UnsupportedError, match="generate_image"):
            model.generate_image("a cat")


def test_several_threads_share_a_blocking_model():
    """Their requests run side by side, with the answers they have alone."""
    with BlockingModel.from_builder(tiny_builder()) as model:
        texts = [f"text {i}" for i in range(4)]
        alone = [model.chat(text) for text in texts]
        answers: dict[str, str] = {}
        threads = [
            threading.Thread(target=lambda text=text: answers.update({text: model.chat(text)}))
            for text in texts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert [answers[text] for text in texts] == alone


def test_closing_ends_what_other_threads_wait_for():
    """Each gets its error; nobody waits for a loop that has gone. Later calls fail as well."""
    model = BlockingModel.from_builder(tiny_builder())
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            while True:
                model.chat("hello")
        except EngineClosedError as error:
            errors.append(error)

    askers = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    closers = [threading.Thread(target=model.close, daemon=True) for _ in range(3)]
    for thread in (*askers, *closers):
        thread.start()
    for thread in (*askers, *closers):
        thread.join(30)
    assert len(errors) == 3
    with pytest.raises(EngineClosedError):
        model.chat("hello")


def test_a_call_inside_its_own_loop_is_refused():
    """It would wait for itself; a plain callback, on its own thread, may call."""
    with BlockingModel.from_builder(tiny_builder()) as model:

        async def inside() -> str:
            return model.chat("hello")

        with pytest.raises(RuntimeError, match="own event loop"):
            model._loop.run(inside())


@pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")
def test_a_dropped_model_leaves_no_threads():
    """Forgetting to close it costs a warning, not a thread for ever."""
    before = set(threading.enumerate())
    model = BlockingModel.from_builder(tiny_builder())
    threads = set(threading.enumerate()) - before
    assert any(thread.name == "mistralrs-blocking" for thread in threads)
    del model
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
