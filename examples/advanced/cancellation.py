"""Start many requests and end them early, in every way: `python cancellation.py [MODEL]`."""

import asyncio

from demo_model import model_path

from mistralrs_sdk import Model, ModelBuilder, RequestBuilder

STORY = RequestBuilder().add_message("user", "Tell me a long story.").set_sampler_ignore_eos(True)


async def leave_early(model: Model) -> int:
    """Leaving a stream ends its request."""
    read = 0
    async with await model.stream_chat_request(STORY) as stream:
        async for _ in stream:
            read += 1
            if read == 5:
                break
    return read


async def abort_from_outside(model: Model) -> str:
    """Whoever knows the id of a response can end it; what there is so far is the answer."""
    stream = await model.stream_chat_request(STORY)
    asyncio.get_running_loop().call_later(0.3, model.abort, stream.id)
    return (await stream.collect()).choices[0].finish_reason


async def give_up(model: Model) -> str:
    """Cancelling the task that waits ends the request too."""
    try:
        async with asyncio.timeout(0.3):
            await model.send_chat_request(STORY)
    except TimeoutError:
        return "timed out"
    return "finished"


async def main(path: str) -> None:
    async with await ModelBuilder(path).with_max_num_seqs(8).build() as model:
        waiting = [asyncio.create_task(model.send_chat_request(STORY)) for _ in range(20)]
        await asyncio.sleep(0.2)
        stats = await model.stats()
        print(f"{stats.running} run, {stats.waiting} wait")
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)

        print(await asyncio.gather(leave_early(model), abort_from_outside(model), give_up(model)))
        stats = await model.stats()
        print(f"{stats.running} run, {stats.waiting} wait, {stats.used_blocks} blocks in use")
        print(await model.chat("What is the capital of France?"))


if __name__ == "__main__":
    asyncio.run(main(model_path()))
