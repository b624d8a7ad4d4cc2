"""What may be asked of in-situ quantisation, and which type each weight then gets."""

from __future__ import annotations

import pickle

import pytest

from mistralrs_sdk import (
    ConfigError,
    EngineConfig,
    GgufModelBuilder,
    IsqBits,
    IsqType,
    LayerTopology,
    ModelBuilder,
    Runner,
    Topology,
    UnsupportedError,
    Which,
    runner,
)
from mistralrs_sdk.isq import CUDA_TYPES, RUNNABLE_TYPES, TYPE_OF_BITS, parse_isq
from mistralrs_sdk.quant.isq import (
    layer_of,
    refuse_unused,
    resolve_cuda_type,
    resolve_type,
    target_type,
)

NEAREST = {
    "Q8_1": "q8_0",
    "Q8K": "q8_0",
    "F8Q8": "q8_0",
    "AFQ8": "q8_0",
    "AFQ6": "q6k",
    "AFQ4": "q4k",
    "AFQ3": "q3k",
    "AFQ2": "q2k",
    "MXFP4": "q4k",
}
GGML = {
    "q4_0": "Q4_0",
    "q4_1": "Q4_1",
    "q5_0": "Q5_0",
    "q5_1": "Q5_1",
    "q8_0": "Q8_0",
    "q2k": "Q2_K",
    "q3k": "Q3_K",
    "q4k": "Q4_K",
    "q5k": "Q5_K",
    "q6k": "Q6_K",
    "hqq4": "HQQ4",
    "hqq8": "HQQ8",
}
UP_PROJ = "model.layers.3.mlp.up_proj"
MATRICES = ("model.embed_tokens", "model.layers.0.mlp.up_proj", UP_PROJ, "lm_head")


def q8_in(layers) -> Topology:
    return Topology().with_range(layers, LayerTopology(isq="q8_0"))


@pytest.mark.parametrize("text", ["q4k", "Q4K", " q4_k ", "Q4_K", IsqType.Q4K])
def test_a_type_is_read_in_any_case(text):
    """mistral.rs' and GGUF's names of a type are one setting."""
    assert EngineConfig(isq=text).isq is IsqType.Q4K
    assert ModelBuilder("x").with_isq(text) == ModelBuilder("x").with_isq(IsqType.Q4K)


@pytest.mark.parametrize("bits", [4, "4", " 4 ", IsqBits.FOUR, IsqBits.Four])
def test_bits_are_read_from_numbers_and_text(bits):
    """A number of bits may be written in any of these ways, and as text where a type may be."""
    assert ModelBuilder("x").with_auto_isq(bits).config.isq is IsqBits.FOUR
    assert parse_isq(bits) is IsqBits.FOUR


def test_there_are_the_types_and_bits_of_mistral_rs():
    """22 types, six widths."""
    assert len(IsqType) == 22
    assert [bits.value for bits in IsqBits] == [2, 3, 4, 5, 6, 8]


@pytest.mark.parametrize("wrong", ["", "7", "q9k", "q4_k_m", "q4_0_k", "k", 7, 4.0, True, b"q4k"])
def test_what_is_neither_type_nor_bits_is_refused(wrong):
    """The error shows the value and what there is."""
    with pytest.raises(ConfigError, match=r"isq \(.*must be 2, 3.*q4_0.*hqq4") as caught:
        EngineConfig(isq=wrong)

    assert repr(wrong) in str(caught.value)
    with pytest.raises(ConfigError, match=r"with_isq\("):
        ModelBuilder("x").with_isq(wrong)


@pytest.mark.parametrize("wrong", ["q4k", 7, None, IsqType.Q4K, [4]])
def test_auto_isq_takes_bits_only(wrong):
    """A type belongs in with_isq, which the error says."""
    with pytest.raises(ConfigError, match=r"with_auto_isq\(.*8.*with_isq"):
        ModelBuilder("x").with_auto_isq(wrong)


@pytest.mark.parametrize("name", NEAREST)
def test_types_that_are_not_computed_with_name_the_nearest(name):
    """A type of other devices is refused where it is written, with what to use instead."""
    match = rf"{IsqType(name).value}\) is not supported: use {NEAREST[name]},"

    with pytest.raises(UnsupportedError, match=rf"with_isq\(.*{match}"):
        ModelBuilder("x").with_isq(name)
    with pytest.raises(UnsupportedError, match=match):
        LayerTopology(isq=name)


def test_every_type_is_computed_with_or_has_a_nearest_one():
    """No type is forgotten in either list."""
    assert {kind.value for kind in RUNNABLE_TYPES} == set(GGML)
    assert {*RUNNABLE_TYPES, *CUDA_TYPES, *map(IsqType, NEAREST)} == set(IsqType)


def test_the_later_of_isq_and_auto_isq_holds():
    """They set one thing."""
    builder = ModelBuilder("x")

    assert builder.with_isq("q4k").with_auto_isq(8).config.isq is IsqBits.EIGHT
    assert builder.with_auto_isq(8).with_isq("q4k").config.isq is IsqType.Q4K


def test_a_gguf_may_be_quantised_again():
    """GgufModelBuilder has the same settings."""
    builder = GgufModelBuilder("x", ["a.gguf"]).with_isq("q4k").with_topology(q8_in((0, 1)))

    assert builder.with_imatrix("m").config == EngineConfig(
        isq=IsqType.Q4K, topology=q8_in((0, 1)), imatrix="m"
    )


@pytest.mark.parametrize(
    "builder",
    [
        ModelBuilder("x").with_isq("q4k").with_topology(q8_in((0, 4))).with_imatrix("m.dat"),
        ModelBuilder("x").with_auto_isq(8),
    ],
)
def test_builders_with_isq_are_values(builder):
    """They survive pickle, hash by value, and their repr is the chain that made them."""
    assert pickle.loads(pickle.dumps(builder)) == builder
    again = eval(repr(builder), globals())
    assert again == builder
    assert hash(again) == hash(builder)


@pytest.mark.parametrize(
    "settings",
    [{"isq": "q4k"}, {"isq": 2}, {"isq": "q8_0", "topology": Topology.from_str("1: {isq: 5}")}],
)
def test_an_imatrix_needs_a_type_that_uses_one(settings):
    """One K type anywhere is enough."""
    assert EngineConfig(imatrix="m", **settings).imatrix == "m"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "without something to quantise"),
        ({"topology": Topology()}, "without something to quantise"),
        ({"topology": Topology.from_str("1: {device: cpu}")}, "without something to quantise"),
        ({"isq": 8}, r"isq \(8\): only q2k to q6k"),
        ({"isq": "hqq4", "topology": q8_in((0, 1))}, r"isq \(hqq4, q8_0\): only q2k to q6k"),
    ],
)
def test_an_imatrix_that_nothing_would_use_is_refused(settings, named):
    """It is never silently ignored."""
    with pytest.raises(ConfigError, match=rf"imatrix \('m'\) has no effect.*{named}"):
        EngineConfig(imatrix="m", **settings)


def test_the_call_that_makes_an_imatrix_useless_is_refused():
    """The error names the method that was called, whichever comes second."""
    with pytest.raises(ConfigError, match=r"^with_imatrix\('m'\): imatrix"):
        ModelBuilder("x").with_imatrix("m")
    with pytest.raises(ConfigError, match=r"^with_auto_isq\(.*EIGHT.*imatrix \('m'\)"):
        ModelBuilder("x").with_isq("q4k").with_imatrix("m").with_auto_isq(8)


@pytest.mark.parametrize("field", ["topology", "imatrix"])
def test_values_of_the_wrong_type_are_refused(field):
    """A number is no topology and no path."""
    with pytest.raises(ConfigError, match=rf"{field} \(3\)"):
        EngineConfig(isq="q4k", **{field: 3})


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", None])
def test_a_topology_may_name_the_models_own_device(device):
    """Under any of its names."""
    topology = Topology().with_range((0, 2), LayerTopology(device=device))

    assert EngineConfig(device=device, topology=topology).topology is topology


@pytest.mark.parametrize(
    ("own", "named"), [("cpu", "cuda:1"), ("cuda:1", "cuda:0"), ("mps", "cpu")]
)
def test_layers_on_another_device_are_refused(own, named):
    """The key, both devices and the way out are named, in whatever order they are set."""
    topology = Topology().with_range((0, 2), LayerTopology(device=named))
    match = rf"topology 0-2: device \({named}\).*model is on {own}.*with_device"

    with pytest.raises(UnsupportedError, match=rf"with_topology\(.*{match}"):
        ModelBuilder("x").with_device(own).with_topology(topology)
    with pytest.raises(UnsupportedError, match=rf"with_device\('{own}'\): {match}"):
        ModelBuilder("x").with_topology(topology).with_device(own)


def test_layers_on_two_devices_are_refused():
    """Also while the model's device is still open."""
    with pytest.raises(UnsupportedError, match=r"topology 4: device \(cuda:0\).*is on cpu"):
        EngineConfig(topology=Topology.from_str("0-4: {device: cpu}\n4: {device: 'cuda[0]'}"))


def test_methods_that_cannot_be_honoured_name_another():
    """Experts and calibration are refused by name, not ignored."""
    with pytest.raises(UnsupportedError, match=r"with_mixture_qexperts_isq .*with_topology"):
        ModelBuilder("x").with_mixture_qexperts_isq()
    with pytest.raises(UnsupportedError, match=r"with_calibration_file .*with_imatrix"):
        ModelBuilder("x").with_calibration_file("c.txt")


@pytest.mark.parametrize("which", [Which.Plain, Which.GGUF])
def test_runner_takes_isq_topology_and_imatrix(which, tmp_path, monkeypatch):
    """Its topology is a path, as in mistralrs, or a Topology."""
    (tmp_path / "t.yaml").write_text("0-4: {isq: q8_0}")
    built = []
    monkeypatch.setattr(runner.BlockingModel, "from_builder", built.append)
    model = ("x",) if which is Which.Plain else ("x", "y.gguf")

    for topology in (tmp_path / "t.yaml", q8_in((0, 4))):
        Runner(which(*model, topology=topology, imatrix="m"), in_situ_quant="4")

    expected = EngineConfig(isq=IsqBits.FOUR, topology=q8_in((0, 4)), imatrix="m")
    assert [builder.config for builder in built] == [expected, expected]


@pytest.mark.parametrize("name", GGML)
def test_types_have_ggml_names(name):
    """What quantises them knows them by these."""
    assert resolve_type(IsqType(name)) == GGML[name]


def test_bits_are_k_types_and_q8_0():
    """As mistral.rs chooses on CPU and CUDA."""
    names = [resolve_type(bits) for bits in TYPE_OF_BITS]

    assert names == ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0"]


def test_resolving_a_type_that_is_not_computed_with_is_refused():
    """A type that came past the settings is not passed on."""
    for resolve in (resolve_type, resolve_cuda_type):
        with pytest.raises(UnsupportedError, match="afq4"):
            resolve(IsqType.AFQ4)


def test_float8_is_a_type_of_gpus():
    """It is a setting, and refused where a CPU is to compute with it."""
    assert EngineConfig(isq="fp8").isq is IsqType.F8E4M3
    with pytest.raises(UnsupportedError, match=r"isq \(f8e4m3\).*on CUDA only: use q8_0"):
        resolve_type(IsqType.F8E4M3)


@pytest.mark.parametrize(
    ("isq", "name"),
    [
        (4, "INT4/32 (Q4_K)"),
        (8, "INT8"),
        ("q4k", "INT4/32 (Q4_K)"),
        ("q4_0", "INT4/32 (Q4_0)"),
        ("q4_1", "INT4/32 (Q4_1)"),
        ("hqq4", "INT4/32 (HQQ4)"),
        ("f8e4m3", "F8E4M3"),
    ],
)
def test_what_cuda_computes_with_has_forms_of_its_own(isq, name):
    """Four bits keep their numbers; 8 is int8 by rows."""
    assert resolve_cuda_type(parse_isq(isq)) == name


@pytest.mark.parametrize(
    ("isq", "nearest"),
    [
        *((2, 4), (3, 4), (5, 8), (6, 8), ("q2k", 4), ("q3k", 4)),
        *(("q5_0", 8), ("q6k", 8), ("q8_0", 8), ("hqq8", 8)),
    ],
)
def test_what_cuda_does_not_compute_with_names_the_nearest(isq, nearest):
    """It is not quietly something else: fewer bits may be what makes it fit."""
    match = rf"isq \({isq}\) is not computed with on CUDA: use {nearest}, the nearest of 4, 8, q4_0"
    with pytest.raises(UnsupportedError, match=match):
        resolve_cuda_type(parse_isq(isq))


@pytest.mark.parametrize(("isq", "wide"), [(4, "INT8"), (8, "INT8"), ("f8e4m3", "F8E4M3")])
def test_on_cuda_embedding_and_head_get_eight_bits(isq, wide):
    """And a topology that names one gets what it says."""
    topology = Topology().with_pattern("lm_head", LayerTopology(isq="q4_0"))
    isq = parse_isq(isq)

    for name in ("model.embed_tokens", "lm_head"):
        assert target_type(name, None, isq=isq, topology=None, on_cuda=True) == wide
    found = target_type("lm_head", None, isq=isq, topology=topology, on_cuda=True)
    assert found == "INT4/32 (Q4_0)"


@pytest.mark.parametrize("isq", [None, *RUNNABLE_TYPES, *IsqBits])
def test_without_a_topology_layers_get_the_type_that_was_asked_for(isq):
    """And stay as they are if none was."""
    expected = None if isq is None else resolve_type(isq)

    assert target_type(UP_PROJ, 3, isq=isq, topology=None) == expected


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
@pytest.mark.parametrize("isq", RUNNABLE_TYPES)
def test_embedding_and_head_are_promoted(name, isq):
    """Up to four bits to Q6_K, above to Q8_0, HQQ to HQQ8."""
    wide = "Q6_K" if isq in ("q2k", "q3k", "q4k", "q4_0", "q4_1") else "Q8_0"

    expected = "HQQ8" if isq.startswith("hqq") else wide
    assert target_type(name, None, isq=isq, topology=None) == expected


def test_a_topology_wins_over_the_type_for_all():
    """Where it has a type; elsewhere the other holds."""
    topology = q8_in((3, 4)).with_range((3, 5), LayerTopology(device="cpu"))

    assert target_type(UP_PROJ, 3, isq=IsqBits.FOUR, topology=topology) == "Q8_0"
    assert target_type(UP_PROJ, 3, isq=None, topology=topology) == "Q8_0"
    assert target_type(UP_PROJ, 4, isq=IsqBits.FOUR, topology=topology) == "Q4_K"
    assert target_type(UP_PROJ, 4, isq=None, topology=topology) is None


def test_a_topology_wins_over_the_promotion():
    """Who names the head gets what they say."""
    topology = Topology().with_pattern("^lm_head$", LayerTopology(isq="q2k"))

    assert target_type("lm_head", None, isq=IsqBits.FOUR, topology=topology) == "Q2_K"
    assert target_type("model.embed_tokens", None, isq=IsqBits.FOUR, topology=topology) == "Q6_K"


def test_layer_of_reads_the_number_in_a_name():
    """Modules outside the layers have none."""
    assert layer_of("model.layers.17.self_attn.q_proj") == 17
    assert [layer_of(name) for name in ("model.embed_tokens", "lm_head", "layers_2.x")] == [
        None
    ] * 3


@pytest.mark.parametrize("key", ["4", "4-9", "/v_proj/", r"/self_attn\./"])
def test_entries_about_nothing_in_the_model_are_refused(key):
    """The key and what the model has are named."""
    topology = Topology.from_str(f"0-99: {{isq: q4k}}\n{key}: {{isq: q4k}}")

    with pytest.raises(
        ConfigError, match=r"layers 0 to 3 and model\.embed_tokens, lm_head"
    ) as caught:
        refuse_unused(topology, MATRICES)
    assert f"topology: {key} is about nothing" in str(caught.value)


@pytest.mark.parametrize("key", ["3", "2-9", "/up_proj$/", "/lm_head/", r"/up_proj\.weight$/"])
def test_entries_that_meet_a_matrix_are_not_refused(key):
    """A range may end beyond the last layer, and a name may have .weight behind."""
    refuse_unused(Topology.from_str(f"{key}: {{isq: q4k}}"), MATRICES)
