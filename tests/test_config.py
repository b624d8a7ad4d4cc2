"""Settings refuse what they cannot mean, and say so with the way out."""

from __future__ import annotations

import math

import attrs
import pytest

from mistralrs_sdk import (
    ConfigError,
    EngineConfig,
    MemoryGpuConfig,
    ModelDType,
    PagedAttentionConfig,
    PagedCacheType,
    TokenSource,
)
from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.machine import available_memory, default_num_threads

SECRET = "hf_abcdefghijklmnop"


def test_defaults_are_those_of_mistral_rs():
    """The defaults are the documented ones."""
    config = EngineConfig()

    assert (config.max_num_seqs, config.prefix_cache_n) == (32, 16)
    assert config.max_num_batched_tokens == 4096
    assert config.max_prefill_chunk_tokens == 512
    assert config.max_decode_steps_before_prefill == 8
    assert PagedAttentionConfig().block_size == 32


@pytest.mark.parametrize(
    "name",
    [
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_prefill_chunk_tokens",
        "max_decode_steps_before_prefill",
        "max_model_len",
        "num_threads",
    ],
)
@pytest.mark.parametrize("value", [0, -1, True, 1.5, math.nan, "8"])
def test_counts_must_be_positive_whole_numbers(name, value):
    """Zero, negatives, booleans, fractions, NaN and text are no counts; the error shows it."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})

    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
    assert "at least 1" in str(caught.value)


@pytest.mark.parametrize("value", [-1, False, 0.5, "3"])
def test_prefix_cache_n_and_seed_must_be_whole_and_not_negative(value):
    """prefix_cache_n and seed start at 0."""
    with pytest.raises(ConfigError, match="prefix_cache_n"):
        EngineConfig(prefix_cache_n=value)
    with pytest.raises(ConfigError, match="seed"):
        EngineConfig(seed=value)


def test_prefix_cache_n_zero_is_none():
    """0 and None are one setting: no prefix cache."""
    assert EngineConfig(prefix_cache_n=0) == EngineConfig(prefix_cache_n=None)


def test_upper_limits_are_named():
    """A seed has 64 bits, and threads have a bound."""
    assert EngineConfig(seed=2**64 - 1).seed == 2**64 - 1
    with pytest.raises(ConfigError, match="at most 18446744073709551615"):
        EngineConfig(seed=2**64)
    with pytest.raises(ConfigError, match="at most 1024"):
        EngineConfig(num_threads=1025)


def test_token_budget_smaller_than_the_sequences_is_refused():
    """Each running sequence needs one token a step; both settings are named."""
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(8\).*max_num_seqs \(9\)"):
        EngineConfig(max_num_batched_tokens=8, max_num_seqs=9)

    assert EngineConfig(max_num_batched_tokens=9, max_num_seqs=9).max_num_seqs == 9


def test_no_kv_cache_contradicts_paging():
    """Without a KV cache there is nothing to page."""
    with pytest.raises(ConfigError, match="no_kv_cache and paged_attn"):
        EngineConfig(no_kv_cache=True, paged_attn=PagedAttentionConfig())


def test_fp8_cache_on_the_cpu_is_refused():
    """The eight-bit cache is for GPUs."""
    paged = PagedAttentionConfig(cache_type=PagedCacheType.F8E4M3)

    with pytest.raises(ConfigError, match=r"f8e4m3.*cpu"):
        EngineConfig(device="cpu", paged_attn=paged)
    assert EngineConfig(device="cuda", paged_attn=paged).paged_attn is paged


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:3", "mps"])
def test_known_devices_are_taken(device):
    """The device names of torch that have a backend here."""
    assert EngineConfig(device=device).device == device


@pytest.mark.parametrize("device", ["", "metal", "cuda:", "cuda:-1", "CPU", 0])
def test_unknown_devices_are_refused(device):
    """Any other device is an error that lists the right ones."""
    with pytest.raises(ConfigError, match=r"device .*cuda:N"):
        EngineConfig(device=device)


def test_choices_are_taken_as_text():
    """A member and its text are the same setting; anything else lists the choices."""
    assert EngineConfig(dtype="bf16").dtype is ModelDType.BF16
    assert PagedAttentionConfig(cache_type="f8e4m3").cache_type is PagedCacheType.F8E4M3
    with pytest.raises(ConfigError, match="auto, bf16, f16, f32"):
        EngineConfig(dtype="float64")
    with pytest.raises(ConfigError, match="auto, f8e4m3"):
        PagedAttentionConfig(cache_type=[])


@pytest.mark.parametrize("size", [0, 7, 64, True, 16.0, "16"])
def test_block_size_is_one_of_three(size):
    """A block holds 8, 16 or 32 tokens."""
    with pytest.raises(ConfigError, match=r"block_size .*8, 16 or 32"):
        PagedAttentionConfig(block_size=size)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (MemoryGpuConfig.MbAmount, 0),
        (MemoryGpuConfig.MbAmount, 1.5),
        (MemoryGpuConfig.ContextSize, 0),
        (MemoryGpuConfig.ContextSize, True),
        (MemoryGpuConfig.Utilization, 0),
        (MemoryGpuConfig.Utilization, 1.01),
        (MemoryGpuConfig.Utilization, math.nan),
        (MemoryGpuConfig.Utilization, True),
        (MemoryGpuConfig.Utilization, "0.5"),
    ],
)
def test_memory_sizes_are_checked(make, value):
    """MiB and tokens are positive whole numbers, a utilization lies in (0, 1]."""
    with pytest.raises(ConfigError) as caught:
        make(value)

    assert repr(value) in str(caught.value)


def test_memory_size_keeps_kind_and_amount():
    """The three ways to size the pool stay apart."""
    assert MemoryGpuConfig.MbAmount(5) != MemoryGpuConfig.ContextSize(5)
    assert MemoryGpuConfig.Utilization(1).amount == 1
    with pytest.raises(ConfigError, match="kind"):
        MemoryGpuConfig("bytes", 5)
    with pytest.raises(ConfigError, match="gpu_memory"):
        PagedAttentionConfig(gpu_memory=0.5)


def test_settings_cannot_be_changed():
    """A config is a value."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        EngineConfig().seed = 1


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (f"literal:{SECRET}", TokenSource.Literal(SECRET)),
        ("literal:a:b", TokenSource.Literal("a:b")),
        ("env:MY_TOKEN", TokenSource.EnvVar("MY_TOKEN")),
        ("env", TokenSource.EnvVar("HUGGING_FACE_HUB_TOKEN")),
        ("path:folder/token", TokenSource.Path("folder/token")),
        ("cache", TokenSource.CacheToken()),
        ("none", TokenSource.None_()),
    ],
)
def test_token_source_reads_its_text_form(text, source):
    """mistral.rs' text forms."""
    assert TokenSource.parse(text) == source


@pytest.mark.parametrize("text", [SECRET, f"token:{SECRET}", "literal:", "cache:x", "", "path"])
def test_wrong_token_source_is_refused_without_showing_it(text):
    """What is not a source may be a token pasted in the wrong place: it is never repeated."""
    with pytest.raises(ConfigError, match="literal:TOKEN") as caught:
        TokenSource.parse(text)

    assert SECRET not in str(caught.value)


def test_token_source_never_shows_a_token():
    """repr, str and those of the config around it hide the token."""
    source = ModelSource(model_id="x", token_source=TokenSource.Literal(SECRET))

    assert SECRET not in f"{source} {source.token_source} {source!r}"


def test_token_source_resolves_for_the_hub(tmp_path, monkeypatch):
    """A token, None for the stored one, False for none."""
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    monkeypatch.setenv("MY_TOKEN", SECRET)

    assert TokenSource.Literal(SECRET).resolve() == SECRET
    assert TokenSource.EnvVar("MY_TOKEN").resolve() == SECRET
    assert TokenSource.Path(file).resolve() == SECRET
    assert TokenSource.CacheToken().resolve() is None
    assert TokenSource.None_().resolve() is False


def test_token_that_is_not_there_is_a_config_error(tmp_path, monkeypatch):
    """A missing variable or file is named."""
    monkeypatch.delenv("MY_TOKEN", raising=False)
    empty = tmp_path / "empty"
    empty.touch()

    with pytest.raises(ConfigError, match="MY_TOKEN"):
        TokenSource.EnvVar("MY_TOKEN").resolve()
    with pytest.raises(ConfigError, match="missing"):
        TokenSource.Path(tmp_path / "missing").resolve()
    with pytest.raises(ConfigError, match="empty"):
        TokenSource.Path(empty).resolve()


@pytest.mark.parametrize("name", ["model_id", "revision", "chat_template", "jinja_explicit"])
@pytest.mark.parametrize("value", ["", "  ", 3])
def test_sources_must_be_text(name, value):
    """An empty or non-text place is refused by name."""
    with pytest.raises(ConfigError, match=name):
        ModelSource(**{"model_id": "x", name: value})


def test_threads_default_to_physical_cores():
    """Two hyperthreads of a core count once."""
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {topology.format(cpu): f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}

    assert default_num_threads(cpus=lambda: range(8), read=siblings.get) == 4
    assert default_num_threads(cpus=lambda: {0, 1, 4}, read=siblings.get) == 2


def test_threads_without_topology_are_the_allowed_cpus():
    """Where the system does not tell, each logical CPU is a core; there is always one."""
    nothing = {}.get

    assert default_num_threads(cpus=lambda: {2, 3, 5}, read=nothing) == 3
    assert default_num_threads(cpus=lambda: (), read=nothing) == 1


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("150000 100000", 1), ("300000 100000", 3), ("max 100000", 8), ("20000 100000", 1)],
)
def test_threads_stay_within_the_cgroup_quota(quota, threads):
    """cgroup v2: the quota is rounded down, at least one thread."""
    read = {
        "/proc/self/cgroup": "0::/pod/box\n",
        "/sys/fs/cgroup/pod/box/cpu.max": quota,
    }.get

    assert default_num_threads(cpus=lambda: range(8), read=read) == threads


def test_quota_of_an_enclosing_cgroup_counts():
    """The tightest of the cgroup and its ancestors decides."""
    read = {
        "/proc/self/cgroup": "0::/pod/box\n",
        "/sys/fs/cgroup/pod/box/cpu.max": "max 100000",
        "/sys/fs/cgroup/pod/cpu.max": "200000 100000",
    }.get

    assert default_num_threads(cpus=lambda: range(8), read=read) == 2


def test_cgroup_v1_quota_counts():
    """cgroup v1: quota over period; in a container the host's path is not there, the root is."""
    read = {
        "/proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert default_num_threads(cpus=lambda: range(8), read=read.get) == 2

    read["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "-1\n"
    assert default_num_threads(cpus=lambda: range(8), read=read.get) == 8


MEMINFO = "MemTotal:       16000 kB\nMemAvailable:    8000 kB\nHugePages_Total:       0\n"


def test_available_memory_is_what_the_system_says():
    """MemAvailable, in bytes."""
    assert available_memory(read={"/proc/meminfo": MEMINFO}.get) == 8000 * 1024


def test_available_memory_stays_within_the_cgroup():
    """Limit minus usage, plus the file cache that the kernel can drop."""
    read = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "0::/box\n",
        "/sys/fs/cgroup/box/memory.max": "4096000\n",
        "/sys/fs/cgroup/box/memory.current": "3096000\n",
        "/sys/fs/cgroup/box/memory.stat": "anon 5\ninactive_file 500000\n",
    }
    assert available_memory(read=read.get) == 1_500_000

    read["/sys/fs/cgroup/box/memory.max"] = "max\n"
    assert available_memory(read=read.get) == 8000 * 1024


def test_available_memory_in_cgroup_v1():
    """v1 writes no limit as a huge number, and counts descendants in total_inactive_file."""
    read = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "3:memory:/box\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
        "/sys/fs/cgroup/memory/box/memory.limit_in_bytes": "1000000",
        "/sys/fs/cgroup/memory/box/memory.usage_in_bytes": "900000",
        "/sys/fs/cgroup/memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 50000\n",
    }
    assert available_memory(read=read.get) == 150_000

    read["/sys/fs/cgroup/memory/box/memory.usage_in_bytes"] = "2000000"
    assert available_memory(read=read.get) == 0


def test_available_memory_without_meminfo_is_half_of_the_ram():
    """macOS does not tell what is free."""
    assert available_memory(read={}.get, total=lambda: 1000) == 500


def test_this_machine_has_threads_and_memory():
    """The real readers work here."""
    assert default_num_threads() >= 1
    assert available_memory() > 0
