"""See what a model would take in memory before it is loaded: `python plan.py [MODEL]`."""

import asyncio

from demo_model import model_path

from mistralrs_sdk import ConfigError, ModelBuilder, ModelLoadError


async def main(path: str) -> None:
    builder = ModelBuilder(path)
    print(await builder.plan())

    for max_num_seqs in (4, 64):
        plan = await builder.with_max_num_seqs(max_num_seqs).with_max_model_len(2048).plan()
        fit = plan.sequences_of(1000)
        print(f"max_num_seqs {max_num_seqs}: {fit} sequences of 1000 tokens fit at once")

    # what does not fit is refused here, before a weight is read
    try:
        await builder.with_max_model_len(10_000_000).plan()
    except (ConfigError, ModelLoadError) as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
