"""Builders are values: they check at once, never change, and show what was set."""

from __future__ import annotations

import logging
import pickle
import sys
import types
from pathlib import Path

import pytest

from mistralrs_sdk import (
    ConfigError,
    EmbeddingModelBuilder,
    GgufModelBuilder,
    LoraModelBuilder,
    MemoryGpuConfig,
    ModelBuilder,
    ModelDType,
    PagedAttentionConfig,
    PagedAttentionMetaBuilder,
    PagedCacheType,
    TokenSource,
)

SECRET = "hf_abcdefghijklmnop"
PAGED = PagedAttentionMetaBuilder().with_block_size(16).build()


def on_progress(what, done, total):
    """A progress function that pickle can find."""


def full_builder():
    """Every method called once."""
    return (
        ModelBuilder("some/model")
        .with_max_num_seqs(8)
        .with_max_num_batched_tokens(256)
        .with_max_prefill_chunk_tokens(64)
        .with_max_decode_steps_before_prefill(2)
        .with_prefix_cache_n(None)
        .with_paged_attn(PAGED)
        .with_max_model_len(1024)
        .with_dtype("f32")
        .with_num_threads(2)
        .with_seed(7)
        .with_throughput_logging()
        .with_hf_revision("main")
        .from_hf_cache_path(Path("cache"))
        .with_token_source(TokenSource.EnvVar("MY_TOKEN"))
        .with_tokenizer_json("tokenizer.json")
        .with_chat_template("{{ messages }}")
        .with_jinja_explicit(Path("chat.jinja"))
        .with_force_cpu()
        .with_logging()
        .with_progress(on_progress)
    )


def test_settings_arrive_in_config_and_source():
    """Each method sets what it names."""
    builder = full_builder()
    config, source = builder.config, builder.source

    assert (config.max_num_seqs, config.max_num_batched_tokens) == (8, 256)
    assert (config.max_prefill_chunk_tokens, config.max_decode_steps_before_prefill) == (64, 2)
    assert (config.prefix_cache_n, config.paged_attn, config.max_model_len) == (None, PAGED, 1024)
    assert (config.dtype, config.device, config.num_threads) == (ModelDType.F32, "cpu", 2)
    assert (config.seed, config.throughput_logging) == (7, True)
    assert (source.model_id, source.files, source.revision) == ("some/model", (), "main")
    assert (source.cache_path, source.tokenizer_json) == ("cache", "tokenizer.json")
    assert source.token_source == TokenSource.EnvVar("MY_TOKEN")
    assert (source.chat_template, source.jinja_explicit) == ("{{ messages }}", "chat.jinja")
    assert builder.progress is on_progress


def test_builder_never_changes():
    """A method returns a new builder and leaves the old one alone."""
    before = ModelBuilder("x")
    after = before.with_max_num_seqs(8)

    assert before == ModelBuilder("x")
    assert after != before
    with pytest.raises(AttributeError):
        before.source = None


def test_builders_are_equal_by_value():
    """The same calls give equal builders with equal hashes, in whatever order."""
    one = ModelBuilder("x").with_seed(1).with_dtype("bf16")
    two = ModelBuilder(Path("x")).with_dtype(ModelDType.BF16).with_seed(1)

    assert one == two
    assert hash(one) == hash(two)
    assert len({one, two, ModelBuilder("x")}) == 2


@pytest.mark.parametrize("builder", [full_builder(), GgufModelBuilder("x", ["a.gguf"])])
def test_builders_survive_pickle(builder):
    """A builder can be sent to another process."""
    assert pickle.loads(pickle.dumps(builder)) == builder


def test_repr_is_the_chain_that_made_it():
    """Only what was set is shown, and evaluating it gives the builder back."""
    assert repr(ModelBuilder("x")) == "ModelBuilder('x')"
    assert repr(ModelBuilder("x").with_max_num_seqs(8)) == "ModelBuilder('x').with_max_num_seqs(8)"
    assert repr(ModelBuilder("x").with_device("cpu")) == "ModelBuilder('x').with_device('cpu')"
    assert repr(GgufModelBuilder("x", ("a.gguf",)).with_force_cpu().with_no_kv_cache()) == (
        "GgufModelBuilder('x', ['a.gguf']).with_no_kv_cache().with_force_cpu()"
    )
    shown = repr(full_builder().with_paged_attn(PagedAttentionConfig(block_size=8)))
    names = globals() | {"PagedCacheType": PagedCacheType}
    again = eval(shown.replace("<PagedCacheType.AUTO: 'auto'>", "'auto'"), names)
    assert again == full_builder().with_paged_attn(PagedAttentionConfig(block_size=8))


def test_repr_never_shows_a_token():
    """A literal token is hidden in the builder's repr."""
    builder = ModelBuilder("x").with_token_source(f"literal:{SECRET}")

    assert SECRET not in repr(builder)
    assert "TokenSource.Literal(...)" in repr(builder)


@pytest.mark.parametrize(
    ("method", "value", "rule"),
    [
        ("with_max_num_seqs", 0, "at least 1"),
        ("with_max_num_seqs", True, "whole number"),
        ("with_max_num_batched_tokens", -4, "at least 1"),
        ("with_max_prefill_chunk_tokens", 0, "at least 1"),
        ("with_max_decode_steps_before_prefill", 0.5, "at least 1"),
        ("with_prefix_cache_n", -1, "at least 0"),
        ("with_max_model_len", 0, "at least 1"),
        ("with_dtype", "int3", "auto, bf16, f16, f32"),
        ("with_device", "tpu", "cuda:N"),
        ("with_num_threads", 0, "at least 1"),
        ("with_seed", -1, "at least 0"),
        ("with_paged_attn", 0.9, "PagedAttentionConfig"),
        ("with_chat_template", "", "non-empty"),
        ("with_jinja_explicit", 3, "non-empty"),
        ("with_tokenizer_json", "", "non-empty"),
        ("with_hf_revision", "", "non-empty"),
        ("from_hf_cache_path", "", "non-empty"),
        ("with_progress", "yes", "True, False or a function"),
    ],
)
def test_each_method_checks_its_value(method, value, rule):
    """The error comes from the call itself and names method, value and allowed range."""
    with pytest.raises(ConfigError) as caught:
        getattr(ModelBuilder("x"), method)(value)

    assert str(caught.value).startswith(f"{method}({value!r}): ")
    assert rule in str(caught.value)


@pytest.mark.parametrize(
    "method", ["with_max_model_len", "with_seed", "with_device", "with_hf_revision", "with_dtype"]
)
def test_none_is_no_value(method):
    """To keep a default, the call is left out; only with_prefix_cache_n takes None."""
    with pytest.raises(ConfigError, match=rf"{method}\(None\)"):
        getattr(ModelBuilder("x"), method)(None)


@pytest.mark.parametrize("value", [SECRET, 42])
def test_wrong_token_source_is_not_shown(value):
    """What was given may be a token."""
    with pytest.raises(ConfigError, match=r"token.source") as caught:
        ModelBuilder("x").with_token_source(value)

    assert str(value) not in str(caught.value)


@pytest.mark.parametrize("model_id", ["", " ", None, 3, b"x"])
def test_model_id_must_be_text_or_a_path(model_id):
    """Without a place there is no model."""
    with pytest.raises(ConfigError, match="model_id"):
        ModelBuilder(model_id)


def test_contradictions_are_refused_where_they_are_written():
    """The second of two contradicting calls fails, in either order, naming both."""
    plain = ModelBuilder("x")

    with pytest.raises(ConfigError, match=r"with_device\('cuda'\).*with_force_cpu"):
        plain.with_force_cpu().with_device("cuda")
    with pytest.raises(ConfigError, match=r"with_force_cpu.*with_device\('cuda:1'\)"):
        plain.with_device("cuda:1").with_force_cpu()
    with pytest.raises(ConfigError, match=r"with_paged_attn.*no_kv_cache and paged_attn"):
        plain.with_no_kv_cache().with_paged_attn(PAGED)
    with pytest.raises(ConfigError, match=r"with_no_kv_cache\(\).*no_kv_cache and paged_attn"):
        plain.with_paged_attn(PAGED).with_no_kv_cache()
    fp8 = PagedAttentionMetaBuilder().with_paged_cache_type(PagedCacheType.F8E4M3).build()
    with pytest.raises(ConfigError, match=r"with_force_cpu\(\).*f8e4m3"):
        plain.with_paged_attn(fp8).with_force_cpu()


def test_force_cpu_agrees_with_device_cpu():
    """Saying the same thing twice is no contradiction."""
    assert ModelBuilder("x").with_device("cpu").with_force_cpu().config.device == "cpu"
    assert ModelBuilder("x").with_force_cpu().with_device("cpu").config.device == "cpu"


def test_template_and_explicit_template_may_both_be_set():
    """The explicit one wins later, as in mistral.rs."""
    source = ModelBuilder("x").with_chat_template("a").with_jinja_explicit("b.jinja").source

    assert (source.chat_template, source.jinja_explicit) == ("a", "b.jinja")


def test_gguf_builder_takes_file_names():
    """It has the methods of ModelBuilder and keeps its type and files."""
    builder = GgufModelBuilder(Path("folder"), ["a.gguf", "b.GGUF"]).with_seed(3)

    assert isinstance(builder, GgufModelBuilder)
    assert builder.source.files == ("a.gguf", "b.GGUF")
    assert builder.source.model_id == "folder"
    assert builder != ModelBuilder("folder").with_seed(3)


@pytest.mark.parametrize("files", [[], "a.gguf", ["a.bin"], [""], [3]])
def test_gguf_builder_refuses_other_files(files):
    """A list of at least one .gguf name is wanted."""
    with pytest.raises(ConfigError, match="file"):
        GgufModelBuilder("folder", files)


def test_paged_builder_builds_a_config():
    """Each method sets its field; without gpu_memory the size is automatic."""
    config = (
        PagedAttentionMetaBuilder()
        .with_block_size(8)
        .with_gpu_memory(MemoryGpuConfig.ContextSize(4096))
        .with_paged_cache_type("f8e4m3")
        .build()
    )

    assert config == PagedAttentionConfig(
        block_size=8,
        gpu_memory=MemoryGpuConfig.ContextSize(4096),
        cache_type=PagedCacheType.F8E4M3,
    )
    assert PagedAttentionMetaBuilder().build().gpu_memory is None


def test_paged_builder_checks_at_once():
    """The error names method and value."""
    with pytest.raises(ConfigError, match=r"with_block_size\(9\).*8, 16 or 32"):
        PagedAttentionMetaBuilder().with_block_size(9)
    with pytest.raises(ConfigError, match=r"with_gpu_memory\(0.5\)"):
        PagedAttentionMetaBuilder().with_gpu_memory(0.5)


@pytest.fixture
def fake_model(monkeypatch):
    """Stands for mistralrs_sdk.handle.model: building returns the builder itself."""

    class Model:
        @staticmethod
        async def build(builder):
            return ("built", builder)

    module = types.ModuleType("mistralrs_sdk.handle.model")
    module.Model = Model
    monkeypatch.setitem(sys.modules, "mistralrs_sdk.handle.model", module)


@pytest.fixture
def package_logger():
    """The package's logger, put back afterwards."""
    logger = logging.getLogger("mistralrs_sdk")
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


async def test_build_hands_itself_to_the_model(fake_model, package_logger):
    """build() is the only method that does work, and it leaves logging alone unless asked."""
    before = list(package_logger.handlers)
    builder = ModelBuilder("x")

    assert await builder.build() == ("built", builder)
    assert package_logger.handlers == before


async def test_logging_is_set_up_once(fake_model, package_logger, monkeypatch, capsys):
    """with_logging() adds one handler to standard error, at the level of RUST_LOG."""
    monkeypatch.setenv("RUST_LOG", "debug")
    await ModelBuilder("x").with_logging().build()
    await ModelBuilder("y").with_logging().build()

    package_logger.getChild("engine").debug("a step")

    assert capsys.readouterr().err.count("a step") == 1


async def test_unknown_log_level_is_said(fake_model, package_logger, monkeypatch, capsys):
    """An unknown RUST_LOG falls back to info with a warning."""
    monkeypatch.setenv("RUST_LOG", "loud")
    await ModelBuilder("x").with_logging().build()
    package_logger.debug("hidden")

    shown = capsys.readouterr().err
    assert "RUST_LOG ('loud')" in shown
    assert "hidden" not in shown


def test_a_lora_model_builder_wraps_a_builder_of_a_text_model():
    """Anything else is refused by name."""
    for other in ("x", EmbeddingModelBuilder("x")):
        with pytest.raises(ConfigError, match="from_text_model_builder"):
            LoraModelBuilder.from_text_model_builder(other)
