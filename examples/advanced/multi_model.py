"""Hold several models behind one handle: `python multi_model.py [MODEL]`.

Each has an engine of its own; here both are the same model under two names.
"""

import asyncio

from demo_model import model_path

from mistralrs_sdk import Model, ModelBuilder, MultiModelBuilder

QUESTION = "What is the capital of France?"


def show(model: Model) -> None:
    states = ", ".join(f"{id} is {status}" for id, status in model.list_models_with_status())
    print(f"{states}; the default is {model.get_default_model_id()}")


async def main(path: str) -> None:
    builder = ModelBuilder(path).with_max_model_len(1024)
    both = (
        MultiModelBuilder()
        .add_model_with_alias("fast", builder.with_max_num_seqs(2))
        .add_model_with_alias("careful", builder.with_max_num_seqs(8))
        .with_default_model("careful")
    )
    async with await both.build() as model:
        show(model)
        print(f"fast: {await model.chat(QUESTION, model_id='fast')}")

        model.set_default_model_id("fast")
        await model.unload_model("careful")  # its memory is free now
        show(model)
        # a request for it loads it again; `reload_model` does so beforehand
        print(f"careful: {await model.chat(QUESTION, model_id='careful')}")

        await model.remove_model("careful")
        show(model)


if __name__ == "__main__":
    asyncio.run(main(model_path()))
