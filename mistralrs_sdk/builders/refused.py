"""Settings of mistral.rs' builders for what is not done here: each says so, and the way out."""

from __future__ import annotations

from mistralrs_sdk.unsupported import unsupported_method

_NO_EXPERTS = (
    "no architecture here has experts; use with_isq, or with_topology with a /regex/ for some "
    "modules"
)
_NO_CALIBRATION = (
    "collect an importance matrix with llama.cpp's llama-imatrix and use with_imatrix instead"
)
_NO_UQFF = (
    "UQFF files are neither read nor written; quantise the original model with with_isq, or give "
    "GgufModelBuilder a GGUF file"
)
_NO_DRAFTS = "steps are not speculated with a second head or model; leave it out"
_NO_SLICES = "models run whole; leave it out"
_OWN_FILES = (
    "a GGUF file brings its tokenizer; with_tokenizer_json and with_chat_template replace it"
)
_NO_SEARCH = "nothing here searches the web; offer your own search with with_tool_callback"
_TEXT_ONLY = "models here read text only; leave it out"
_FOUND_OUT = "the model's own files say what it is; leave it out"


class RefusedSettings:
    """What `ModelBuilder` has in mistral.rs and not here: `UnsupportedError`, whatever is given."""

    __slots__ = ()

    with_mixture_qexperts_isq = unsupported_method("with_mixture_qexperts_isq", _NO_EXPERTS)
    with_calibration_file = unsupported_method("with_calibration_file", _NO_CALIBRATION)
    write_uqff = unsupported_method("write_uqff", _NO_UQFF)
    from_uqff = unsupported_method("from_uqff", _NO_UQFF)
    with_mtp_config = unsupported_method("with_mtp_config", _NO_DRAFTS)
    with_mtp_model = unsupported_method("with_mtp_model", _NO_DRAFTS)
    with_matformer_config_path = unsupported_method("with_matformer_config_path", _NO_SLICES)
    with_matformer_slice_name = unsupported_method("with_matformer_slice_name", _NO_SLICES)
    with_tok_model_id = unsupported_method("with_tok_model_id", _OWN_FILES)
    with_search = unsupported_method("with_search", _NO_SEARCH)
    with_search_callback = unsupported_method("with_search_callback", _NO_SEARCH)
    with_max_edge = unsupported_method("with_max_edge", _TEXT_ONLY)
    with_mmproj_files = unsupported_method("with_mmproj_files", _TEXT_ONLY)
    with_loader_type = unsupported_method("with_loader_type", _FOUND_OUT)
