"""Reads the JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mistralrs_sdk.errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelLoadError: the file is missing or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.name} is missing in {path.parent}") from None
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Read a JSON object, {} if there is no such file.

    Raises:
        ModelLoadError: the file is there but holds no JSON object.
    """
    return read_json(path) if path.is_file() else {}
