"""Load a LoRA adapter while the model runs: `python lora.py [MODEL ADAPTER]`.

ADAPTER is a folder in PEFT's layout, or a hub id; it must have been trained for MODEL.
"""

import asyncio
import sys

from mistralrs_sdk import AdapterError, LoraModelBuilder, ModelBuilder, RequestBuilder

MODEL, ADAPTER = "Qwen/Qwen2-0.5B-Instruct", "SHASWATSINGH3101/Qwen2-0.5B-Instruct_lora"


async def main(path: str, adapter: str) -> None:
    builder = LoraModelBuilder.from_text_model_builder(ModelBuilder(path))
    # .with_adapter("first", adapter) would load one with the model
    async with await builder.build() as model:
        info = await model.load_lora_adapter("first", adapter)
        print(f"{info.alias}: rank {info.rank}, {info.bytes / 2**20:.1f} MiB")

        # different adapters share the steps of the engine; None is the model as it is
        request = RequestBuilder().add_message("user", "Hello!").set_sampler_max_len(16)
        aliases = (None, "first")
        answers = await asyncio.gather(
            *(model.send_chat_request(request.set_adapter(alias)) for alias in aliases)
        )
        for alias, answer in zip(aliases, answers, strict=True):
            print(f"{alias}: {answer.choices[0].message.content!r}")

        await model.unload_lora_adapter("first")
        try:
            await model.send_chat_request(request.set_adapter("first"))
        except AdapterError as error:
            print(f"{error.kind}: {error}")


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:3] or (MODEL, ADAPTER))))
