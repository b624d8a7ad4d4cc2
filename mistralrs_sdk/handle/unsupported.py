"""`ModelUnsupported`: what `Model` has in mistral.rs and cannot do here; each method says so."""

from __future__ import annotations

from mistralrs_sdk.unsupported import unsupported_method

_NO_IMAGES = "no model here makes images"
_NO_SPEECH = "no model here speaks"
_NO_CALIBRATION = (
    "importance matrices are not collected here; make one with llama.cpp's llama-imatrix, give it "
    "to with_imatrix and quantise with with_isq"
)
_NO_FILES = "tools here produce no files; let a tool callback keep what it makes"


class ModelUnsupported:
    """Names that raise `UnsupportedError` with the way out, whatever they are given."""

    generate_image = unsupported_method("generate_image", _NO_IMAGES)
    generate_image_with_model = unsupported_method("generate_image_with_model", _NO_IMAGES)
    generate_speech = unsupported_method("generate_speech", _NO_SPEECH)
    generate_speech_with_model = unsupported_method("generate_speech_with_model", _NO_SPEECH)
    begin_calibration = unsupported_method("begin_calibration", _NO_CALIBRATION)
    begin_calibration_with_model = unsupported_method(
        "begin_calibration_with_model", _NO_CALIBRATION
    )
    calibration_status = unsupported_method("calibration_status", _NO_CALIBRATION)
    calibration_status_with_model = unsupported_method(
        "calibration_status_with_model", _NO_CALIBRATION
    )
    apply_calibration = unsupported_method("apply_calibration", _NO_CALIBRATION)
    apply_calibration_with_model = unsupported_method(
        "apply_calibration_with_model", _NO_CALIBRATION
    )
    find_file = unsupported_method("find_file", _NO_FILES)
