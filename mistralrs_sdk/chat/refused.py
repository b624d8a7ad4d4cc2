"""Setters of mistral.rs' requests for what is not done here: each says so, and the way out."""

from __future__ import annotations

from mistralrs_sdk.unsupported import unsupported_method

_TEXT_ONLY = "models here read text only; add_message takes it"
_NO_SEARCH = "nothing here searches the web; offer your own search with with_tool_callback"
_NO_FILES = "tools here produce no files; let a tool callback keep what it makes"
_NO_INPUT = "files are not given to the model; put their text into a message"


class RefusedMedia:
    """Messages with more than text: `UnsupportedError`, whatever they are given."""

    __slots__ = ()

    add_image_message = unsupported_method("add_image_message", _TEXT_ONLY)
    add_audio_message = unsupported_method("add_audio_message", _TEXT_ONLY)
    add_video_message = unsupported_method("add_video_message", _TEXT_ONLY)
    add_multimodal_message = unsupported_method("add_multimodal_message", _TEXT_ONLY)


class RefusedSettings(RefusedMedia):
    """Search and files: `UnsupportedError`, whatever they are given."""

    __slots__ = ()

    with_web_search_options = unsupported_method("with_web_search_options", _NO_SEARCH)
    require_file = unsupported_method("require_file", _NO_FILES)
    require_file_described = unsupported_method("require_file_described", _NO_FILES)
    with_files = unsupported_method("with_files", _NO_FILES)
    with_input_file = unsupported_method("with_input_file", _NO_INPUT)
    with_input_files = unsupported_method("with_input_files", _NO_INPUT)
