"""Give layers types of their own: `python topology.py [MODEL]`.

What the topology leaves out stays as the file has it, or as `with_isq` says.
"""

import asyncio

from demo_model import model_path

from mistralrs_sdk import LayerTopology, ModelBuilder, Topology

YAML = """
0-2:
  isq: Q8_0
"""


async def main(path: str) -> None:
    # the same from a file: with_topology_from_path("topology.yml")
    topology = Topology.from_str(YAML).with_pattern(r"layers\.1\..*o_proj", LayerTopology(isq="4"))
    async with await ModelBuilder(path).with_topology(topology).build() as model:
        line = next(line for line in model.describe().splitlines() if line.startswith("weights "))
        print(" ".join(line.split()))
        print(await model.chat("What is the capital of France?"))


if __name__ == "__main__":
    asyncio.run(main(model_path()))
