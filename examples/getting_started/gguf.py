"""Fetch a GGUF file from the hub and run it: `python gguf.py [REPOSITORY FILE]`.

The repository may as well be a folder. Files that were fetched once are not fetched again.
"""

import asyncio
import sys

from mistralrs_sdk import GgufModelBuilder

REPOSITORY = "bartowski/SmolLM2-135M-Instruct-GGUF"
FILE = "SmolLM2-135M-Instruct-Q4_K_M.gguf"


async def main(repository: str, file: str) -> None:
    builder = GgufModelBuilder(repository, [file]).with_max_model_len(2048)
    # for a private repository: .with_token_source("env:MY_TOKEN"), for a commit .with_hf_revision
    async with await builder.build() as model:
        print(await model.chat("What is the capital of France?"))


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:3] or (REPOSITORY, FILE))))
