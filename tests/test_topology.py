"""A topology says which layers get what: overlaps, ends, names, and YAML it cannot read."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk import ConfigError, IsqBits, IsqType, LayerTopology, Topology, UnsupportedError
from mistralrs_sdk.isq import RUNNABLE_TYPES

NAME = "model.layers.3.self_attn.q_proj"
Q4K, Q8 = LayerTopology(isq="q4k"), LayerTopology(isq="q8_0")

ranges = st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda r: range(r[0], r[0] + r[1]))
types = st.sampled_from([*RUNNABLE_TYPES, *IsqBits])
layer_settings = st.builds(
    LayerTopology, isq=st.none() | types, device=st.sampled_from([None, "cpu", "cuda[1]", "metal"])
)
patterns = st.sampled_from([r"q_proj$", r"layers\.[0-3]\.", "mlp", "lm_head", ""])
PIECES = [
    *("0", "0-4", "4-0", "1-1", "/q/", "/(/", "'/[[a]/'", "-", "isq", "device", "q4k", "cpu", "~"),
    *(":", ": ", "\n", "\n  ", "{", "}", "[", "]", ",", "&a ", "*a", "<<", "? ", "- ", "|", ">"),
    *("'", '"', "#", "!!int ", "!<", "%YAML", "---", "...", '"\\UFFFFFFFF"', '"\\x"', "\t", "\0"),
]


def topology_of(entries) -> Topology:
    """A topology of (range or pattern, settings)."""
    built = Topology.empty()
    for selector, layer in entries:
        add = built.with_range if isinstance(selector, range) else built.with_pattern
        built = add(selector, layer)
    return built


@given(entries=st.lists(st.tuples(ranges, types), max_size=8), layer=st.integers(0, 20))
def test_the_later_of_overlapping_ranges_wins(entries, layer):
    """A layer has the type of the last range it is in."""
    topology = topology_of((layers, LayerTopology(isq=isq)) for layers, isq in entries)

    types_of_layer = [isq for layers, isq in entries if layer in layers]
    assert topology.isq_of(NAME, layer) == (types_of_layer[-1] if types_of_layer else None)


@given(layers=ranges)
def test_the_end_of_a_range_is_not_in_it(layers):
    """Its first and last layer are; modules outside the layers are not."""
    topology = Topology().with_range((layers.start, layers.stop), Q4K)

    assert topology.isq_of(NAME, layers.stop - 1) is IsqType.Q4K
    assert topology.isq_of(NAME, layers.start) is IsqType.Q4K
    assert topology.isq_of(NAME, layers.stop) is None
    assert topology.isq_of(NAME, layers.start - 1) is None
    assert topology.isq_of("lm_head", None) is None


@given(entries=st.lists(st.tuples(ranges | patterns, layer_settings), max_size=6))
@settings(max_examples=50)
def test_yaml_and_calls_say_the_same(entries):
    """Every topology can be written as YAML, and its repr evaluates to it."""
    lines = []
    for selector, layer in entries:
        key = f"{selector.start}-{selector.stop}" if isinstance(selector, range) else None
        lines.append(f"{key or f'/{selector}/'}:")
        device = {"cuda:1": "cuda[1]", "mps": "metal[0]"}.get(layer.device or "", layer.device)
        lines.append(f"  isq: {'' if layer.isq is None else layer.isq.value}")
        lines.append(f"  device: {device or 'null'}")
    topology = topology_of(entries)

    assert Topology.from_str("\n".join(lines)) == topology
    assert eval(repr(topology), globals()) == topology


@given(text=st.text(max_size=40) | st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@settings(max_examples=200)
def test_text_that_is_no_topology_is_a_config_error_and_nothing_else(text):
    """Whatever is read gives a Topology or a ConfigError."""
    with contextlib.suppress(ConfigError):
        assert isinstance(Topology.from_str(text), Topology)


def test_a_name_wins_over_ranges_and_the_later_name_over_the_former():
    """The order of ranges and names does not matter among each other."""
    topology = Topology.from_str(
        "/q_proj/: {isq: q2k}\n/self_attn.*q_proj/: {isq: q8_0}\n0-9: {isq: q4k}\n"
    )

    assert topology.isq_of(NAME, 3) is IsqType.Q8_0
    assert topology.isq_of("model.layers.3.mlp.up_proj", 3) is IsqType.Q4K
    assert topology.isq_of("q_proj", None) is IsqType.Q2K


@pytest.mark.parametrize("pattern", ["q_proj$", r"q_proj\.weight$", "^model", r"\.3\."])
def test_a_name_is_searched_with_and_without_weight(pattern):
    """The module's and the tensor's name both match."""
    assert Topology().with_pattern(pattern, Q4K).isq_of(NAME, 3) is IsqType.Q4K
    assert Topology().with_pattern(pattern, Q4K).isq_of("lm_head", None) is None


def test_an_entry_without_a_type_leaves_the_one_below():
    """Setting a device does not take a type away."""
    topology = Topology.from_str("0-9: {isq: q4k}\n3: {device: cpu}\n/q_proj/: {device: cpu}\n")

    assert topology.isq_of(NAME, 3) is IsqType.Q4K


def test_repeated_keys_are_entries_in_the_order_of_the_file():
    """YAML libraries drop the first of two equal keys; here the later wins where it stands."""
    topology = Topology.from_str("0-4: {isq: q4k}\n2: {isq: q8_0}\n0-4: {isq: q2k}\n")

    assert topology.isq_of(NAME, 2) is IsqType.Q2K


@pytest.mark.parametrize("text", ["", "# nothing", "{}"])
def test_empty_yaml_is_an_empty_topology(text):
    """A file without entries sets nothing."""
    assert Topology.from_str(text) == Topology.empty() == Topology()


def test_a_single_number_is_one_layer():
    """`3` is `3-4`; bits may stand for a type."""
    assert Topology.from_str("3: {isq: 8}") == Topology().with_range(
        range(3, 4), LayerTopology(isq=IsqBits.EIGHT)
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0-4: {isq: q4k}\n4-4: {isq: q4k}", r"line 2, 4-4: the end \(4\).*above 4"),
        ("a: {isq: q4k}", "line 1, a: a key must be a layer, a range"),
        ("-1: {isq: q4k}", "line 1, -1: a key must be"),
        ("9999999999: {isq: q4k}", "a key must be"),
        ("? [1]\n: {isq: q4k}", "line 1: a key must be"),
        ("0:\n  isq: q9", r"line 1, 0: isq \('q9'\) must be"),
        ("0:\n  isq: [q4k]", "line 1, 0: isq must be one value"),
        ("0:\n  isq: q4k\n  isq: q2k", "line 1, 0: isq is given twice"),
        ("0:\n  quant: q4k", r"unknown setting \(quant\); known are isq and device"),
        ("0:\n  [a]: q4k", "unknown setting"),
        ("0: q4k", 'must have settings of its own, such as "isq: q4k"'),
        ("0: {device: gpu}", r'device \(\'gpu\'\) must be "cpu", "cuda\[N\]"'),
        ("0: {device: 'metal[1]'}", "device"),
        ("'/(/': {isq: q4k}", "is no regular expression"),
        ("'/[[a]/': {isq: q4k}", "is no regular expression"),
        ("'/a{99999999999}/': {isq: q4k}", "is no regular expression"),
        ("- 0", 'must map layers to settings, such as "0-8: {isq: q4k}"'),
        ("0: {", "the topology is not YAML"),
        ('0: "\\UFFFFFFFF"', "the topology is not YAML"),
        ("[" * 600, "the topology is not YAML"),
    ],
)
def test_errors_say_where_and_what(text, named):
    """The line, the key and what would be right."""
    with pytest.raises(ConfigError, match=named):
        Topology.from_str(text)


def test_a_type_that_is_not_computed_with_is_named_with_its_place():
    """UnsupportedError stays UnsupportedError."""
    with pytest.raises(UnsupportedError, match=r"line 2, 4-8: isq \(afq4\).*use q4k"):
        Topology.from_str("0: {isq: q4k}\n4-8: {isq: AFQ4}")


def test_a_file_is_read_and_named_in_errors(tmp_path):
    """from_path is from_str of its text."""
    path = tmp_path / "layers.yaml"
    path.write_text("0-4: {isq: q4k}", encoding="utf-8")

    assert Topology.from_path(path) == Topology().with_range((0, 4), Q4K)
    path.write_text("0-4: {isq: q}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"layers\.yaml, line 1, 0-4: isq"):
        Topology.from_path(path)


@pytest.mark.parametrize("path", ["missing.yaml", ".", "a\0b", None, 3])
def test_a_file_that_cannot_be_read_is_a_config_error(path, tmp_path, monkeypatch):
    """Missing, a folder, no path at all, not UTF-8."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")

    for each in (path, "bytes.yaml"):
        with pytest.raises(ConfigError, match=r"the topology file .* cannot be read"):
            Topology.from_path(each)


@pytest.mark.parametrize("layers", [(4, 4), (5, 4), (-1, 4), range(0, 8, 2), range(8, 0, -1)])
def test_ranges_that_do_not_count_up_are_refused(layers):
    """Empty, negative and stepping ranges are no layers."""
    with pytest.raises(ConfigError, match="must count up one by one"):
        Topology().with_range(layers, Q4K)


@pytest.mark.parametrize("layers", [4, "0-4", (0, 4, 8), (0.0, 4), (False, True), None])
def test_what_is_no_range_is_refused(layers):
    """A range or a pair, nothing else."""
    with pytest.raises(ConfigError, match=r"with_range\(.*\(0, 8\)"):
        Topology().with_range(layers, Q4K)


def test_a_layer_must_be_a_layer_topology():
    """A bare type is refused, as are names that are no text."""
    with pytest.raises(ConfigError, match="must be a LayerTopology"):
        Topology().with_range((0, 4), "q4k")
    with pytest.raises(ConfigError, match="must be a LayerTopology"):
        Topology(entries=[(range(4), None)])
    with pytest.raises(ConfigError, match="must be a range"):
        Topology(entries=[("0-4", Q4K)])
    with pytest.raises(ConfigError, match=r"entries .* must be pairs"):
        Topology(entries=[range(3)])
    with pytest.raises(ConfigError, match=r"with_pattern\(3\)"):
        Topology().with_pattern(3, Q4K)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("cpu", "cpu"),
        ("cuda", "cuda:0"),
        ("cuda[2]", "cuda:2"),
        ("cuda:2", "cuda:2"),
        ("metal", "mps"),
        ("metal[0]", "mps"),
        ("mps", "mps"),
        (None, None),
    ],
)
def test_devices_have_torchs_names(device, name):
    """mistral.rs' spelling and torch's are one device."""
    assert LayerTopology(device=device).device == name


def test_a_topology_is_a_value():
    """It never changes, hashes by value, and survives pickle and copy."""
    one = Topology().with_range((0, 4), Q4K)
    two = one.with_pattern("q_proj", Q8)

    assert one == Topology().with_range(range(4), LayerTopology(isq=IsqType.Q4K)) != two
    assert len({one, two, Topology.from_str("0-4: {isq: Q4_K}")}) == 2
    assert pickle.loads(pickle.dumps(two)) == two == copy.deepcopy(two)
    assert two.entries[1][0] == re.compile("q_proj")
    with pytest.raises(AttributeError):
        one.entries = ()


def test_unused_lists_keys_about_no_module():
    """As YAML writes them, in order."""
    topology = Topology.from_str("7: {}\n0-4: {}\n/x/: {}\n8-9: {}\n5-7: {}\n")

    assert topology.unused([(NAME, 3), ("lm_head", None)]) == ("7", "/x/", "8", "5-7")
