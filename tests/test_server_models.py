"""Models and adapters over HTTP: which there are, and what may be done with them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest

from mistralrs_sdk import Model, MultiModelBuilder
from mistralrs_sdk.server import ServerSettings
from tests.adapter_files import tiny_adapter
from tests.embedding_models import embedder, embedding_folder
from tests.model_helpers import tiny_builder
from tests.translated_apis import serving

CHAT = "/v1/chat/completions"
OPEN = ServerSettings(access_log=None, allow_runtime_adapters=True)


@contextlib.asynccontextmanager
async def browser(
    model: Model, settings: ServerSettings | None = None
) -> AsyncIterator[httpx2.AsyncClient]:
    """A plain client of a server in front of the model."""
    async with serving(model, settings) as url, httpx2.AsyncClient(base_url=url) as found:
        yield found


async def two_models() -> Model:
    """A model called small, the default, and one called large."""
    builder = MultiModelBuilder().add_model_with_alias("small", tiny_builder("llama"))
    return await builder.add_model_with_alias("large", tiny_builder("qwen2")).build()


async def test_models_are_listed_the_default_first():
    """ "default", then each with its status; the official client reads them."""
    async with (
        await two_models() as model,
        serving(model) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        listed = [entry async for entry in client.models.list()]
        one = await client.models.retrieve("large")

    assert [entry.id for entry in listed] == ["default", "small", "large"]
    assert {entry.status for entry in listed} == {"loaded"}
    assert one.id == "large"


async def test_a_request_names_its_model():
    """Each model answers for itself, and the answer says who it was."""
    asked = {"messages": "hello", "temperature": 0, "max_tokens": 6}
    async with await two_models() as model, browser(model) as http:
        answers = {
            name: (await http.post(CHAT, json={**asked, "model": name})).json()
            for name in ("small", "large", "default")
        }

    texts = {name: each["choices"][0]["message"]["content"] for name, each in answers.items()}
    assert texts["small"] == texts["default"] != texts["large"]
    assert [answers[name]["model"] for name in answers] == ["small", "large", "small"]


async def test_a_model_is_unloaded_and_comes_back():
    """Its status follows, and the next request loads it again."""
    async with await two_models() as model, browser(model) as http:

        async def post(what: str, name: str = "large") -> httpx2.Response:
            return await http.post(f"/v1/models/{what}", json={"model_id": name})

        unloaded = (await post("unload")).json()
        status = (await post("status")).json()
        listed = (await http.get("/v1/models")).json()["data"]
        reloaded = (await post("reload")).json()
        await post("unload")
        answer = await http.post(CHAT, json={"messages": "a", "model": "large", "max_tokens": 2})
        after = (await post("status")).json()
        shown = await http.get("/v1/models/default")

    assert unloaded == status == {"model_id": "large", "status": "unloaded"}
    assert [entry["status"] for entry in listed] == ["loaded", "loaded", "unloaded"]
    assert reloaded == after == {"model_id": "large", "status": "loaded"}
    assert answer.status_code == 200
    assert shown.json()["id"] == "default"


@pytest.mark.parametrize("what", ["unload", "reload", "status"])
async def test_an_unknown_model_is_404_whatever_is_asked(what):
    """Where mistral.rs says 200 with an error, the status says it."""
    async with await tiny_builder().build() as model, browser(model) as http:
        unknown = await http.post(f"/v1/models/{what}", json={"model_id": "nobody"})
        missing = await http.post(f"/v1/models/{what}", json={})
        shown = await http.get("/v1/models/nobody")

    assert unknown.status_code == shown.status_code == 404
    assert missing.status_code == 400


async def test_a_model_that_cannot_be_loaded_again_is_503(monkeypatch):
    """A request for it says why, and so does reload."""
    async with await tiny_builder().build() as model, browser(model) as http:
        name = model.get_default_model_id()
        await http.post("/v1/models/unload", json={"model_id": name})
        entry = model._models._entries[name]

        async def serve() -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(entry, "builder", type("Builder", (), {"serve": staticmethod(serve)}))
        reload = await http.post("/v1/models/reload", json={"model_id": name})
        chat = await http.post(CHAT, json={"messages": "hello"})
        health = await http.get("/health")

    assert reload.status_code == chat.status_code == 503
    assert "no room" in chat.json()["error"]["message"]
    assert health.status_code == 200  # what is not loaded is not dead


async def test_weights_are_quantised_anew():
    """/re_isq answers when it is done; a type that is none is 400."""
    async with await tiny_builder().build() as model, browser(model) as http:
        done = await http.post("/re_isq", json={"ggml_type": "q8_0"})
        wrong = await http.post("/re_isq", json={"ggml_type": "q99"})
        missing = await http.post("/re_isq", json={})
        answer = await http.post(CHAT, json={"messages": "hello", "max_tokens": 2})

    assert done.status_code == answer.status_code == 200
    assert wrong.status_code == missing.status_code == 400


async def test_chat_and_embeddings_share_a_server(tmp_path):
    """Models of both kinds answer side by side, each what it can."""
    builder = MultiModelBuilder().add_model_with_alias("chat", tiny_builder())
    builder = builder.add_model_with_alias("embed", embedder(embedding_folder(tmp_path)))
    async with await builder.build() as model, browser(model) as http:
        chat = await http.post(CHAT, json={"messages": "hello", "max_tokens": 2})
        vectors = await http.post("/v1/embeddings", json={"input": "hello", "model": "embed"})
        crossed = await http.post(CHAT, json={"messages": "hello", "model": "embed"})
        listed = (await http.get("/v1/models")).json()["data"]

    assert (chat.status_code, vectors.status_code, crossed.status_code) == (200, 200, 400)
    assert [entry["id"] for entry in listed] == ["default", "chat", "embed"]


async def test_adapters_are_loaded_used_and_unloaded(tmp_path):
    """With the switch on; an adapter may be named as the model, too."""
    tiny_adapter(tmp_path / "a", seed=1)
    asked = {"messages": "hello", "temperature": 0, "max_tokens": 8}
    async with (
        await tiny_builder().with_lora().build() as model,
        browser(model, OPEN) as http,
    ):

        async def text(**more: str) -> str:
            answer = (await http.post(CHAT, json={**asked, **more})).json()
            return answer["choices"][0]["message"]["content"]

        load = {"lora_name": "polite", "lora_path": str(tmp_path / "a")}
        loaded = (await http.post("/v1/load_lora_adapter", json=load)).json()
        again = await http.post("/v1/load_lora_adapter", json=load)
        in_place = await http.post("/v1/load_lora_adapter", json={**load, "load_inplace": True})
        listed = (await http.get("/v1/lora_adapters")).json()
        models = (await http.get("/v1/models")).json()["data"]
        texts = await text(), await text(adapter="polite"), await text(model="polite")
        for model_name in ("default", "polite"):
            told = {"model": model_name, "prompt": "hello"}
            ids = (await http.post("/tokenize", json=told)).json()["tokens"]
            back = await http.post("/detokenize", json={"model": model_name, "tokens": ids})
            assert back.json() == {"prompt": "hello"}
        name = {"lora_name": "polite", "expected_generation": "0" * 64}
        other = await http.post("/v1/unload_lora_adapter", json=name)
        gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": "polite"})
        missing = await http.post("/v1/unload_lora_adapter", json={"lora_name": "polite"})
        unknown = await http.post(CHAT, json={**asked, "adapter": "polite"})
        nowhere = await http.post("/v1/load_lora_adapter", json={**load, "lora_path": "./nowhere"})

    assert loaded["lora_name"] == "polite"
    assert [entry["lora_name"] for entry in listed["data"]] == ["polite"]
    assert models[-1]["id"] == "polite"
    assert models[-1]["parent"] == models[1]["id"]
    assert texts[0] != texts[1] == texts[2]
    assert (again.status_code, in_place.status_code, other.status_code) == (409, 200, 409)
    assert (gone.status_code, missing.status_code, unknown.status_code) == (200, 404, 404)
    assert (nowhere.status_code, nowhere.json()["error"]["param"]) == (400, "lora_path")


async def test_adapters_are_not_changed_without_the_switch(tmp_path):
    """The endpoints are not there; the list is."""
    async with await tiny_builder().with_lora().build() as model, browser(model) as http:
        load = {"lora_name": "a", "lora_path": str(tmp_path)}
        answers = [
            await http.post("/v1/load_lora_adapter", json=load),
            await http.post("/v1/unload_lora_adapter", json=load),
        ]
        listed = await http.get("/v1/lora_adapters")

    assert [answer.status_code for answer in answers] == [404, 404]
    assert listed.status_code == 200


async def test_a_model_that_takes_no_adapters_is_a_conflict():
    """As in mistral.rs: 409, with the kind of the error as its code."""
    async with await tiny_builder().build() as model, browser(model, OPEN) as http:
        listed = await http.get("/v1/lora_adapters")
        load = {"lora_name": "a", "lora_path": "somewhere"}
        loaded = await http.post("/v1/load_lora_adapter", json=load)
        wrong = await http.post("/v1/load_lora_adapter", json={"lora_name": 3})

    assert (listed.status_code, loaded.status_code, wrong.status_code) == (409, 409, 400)
    assert listed.json()["error"]["code"] == "runtime_unavailable"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((f"/v1/models/{what}", {"model_id": "default"}) for what in ("unload", "reload")),
        ("/v1/models/status", {"model_id": "default"}),
        ("/re_isq", {"ggml_type": "q8_0"}),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}),
    ],
)
async def test_a_key_that_would_have_no_effect_is_refused(path, body):
    """By its name, before anything is changed."""
    async with await tiny_builder().build() as model, browser(model, OPEN) as http:
        answer = await http.post(path, json={**body, "force": True})
        loaded = model.is_model_loaded()

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "force")
    assert loaded
