"""`ModelBuilder` for text models under its other name, and for GGUF files by name."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from mistralrs_sdk.builders.model_builder import ModelBuilder, PathLike, model_id_text
from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.errors import ConfigError


@attrs.frozen(init=False, repr=False)
class TextModelBuilder(ModelBuilder):
    """`ModelBuilder` under the name it has in mistral.rs for text models alone: it does the same.

    `TextModelBuilder("Qwen/Qwen3-4B")`; what the model is, its own files say.

    Raises:
        ConfigError, UnsupportedError: from each method, as `ModelBuilder`.
    """


@attrs.frozen(init=False, repr=False)
class GgufModelBuilder(ModelBuilder):
    """A `ModelBuilder` for named GGUF files of a folder or hub repository.

    `GgufModelBuilder("folder", ["model.Q4_K_M.gguf"])`; of a split model the first file is enough.

    Raises:
        ConfigError, UnsupportedError: from each method, as `ModelBuilder`; also if no file is
            named, or one that does not end in .gguf.
    """

    def __init__(self, model_id: PathLike, files: Iterable[PathLike]) -> None:
        source = ModelSource(model_id=model_id_text(model_id), files=files)
        wrong = [file for file in source.files if not file.lower().endswith(".gguf")]
        if wrong or not source.files:
            shown = repr(wrong[0]) if wrong else "an empty list"
            raise ConfigError(
                f"GgufModelBuilder files: {shown} given; name at least one file, "
                "and each must end in .gguf"
            )
        self._start(source)

    def _head(self) -> str:
        return f"{type(self).__name__}({self.source.model_id!r}, {list(self.source.files)!r})"
