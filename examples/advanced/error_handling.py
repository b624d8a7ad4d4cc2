"""What can go wrong, and which error says so: `python error_handling.py [MODEL]`."""

import asyncio

from demo_model import model_path

from mistralrs_sdk import (
    ConfigError,
    Constraint,
    InferenceError,
    MistralRsError,
    ModelBuilder,
    ModelLoadError,
    QueueFullError,
    RequestBuilder,
    RequestError,
)


async def main(path: str) -> None:
    try:
        ModelBuilder(path).with_max_num_seqs(0)
    except ConfigError as error:  # a bad setting, where it is written
        print(f"ConfigError: {error}")

    try:
        await ModelBuilder("no/such/folder").build()
    except ModelLoadError as error:  # not found, damaged, too large ...
        print(f"ModelLoadError: {error}")

    async with await ModelBuilder(path).with_max_num_seqs(1).with_max_queue(1).build() as model:
        question = RequestBuilder().add_message("user", "Tell me a story.")
        try:
            await model.send_chat_request(question.set_constraint(Constraint.Regex("(")))
        except RequestError as error:  # the request is at fault; nothing was computed
            print(f"RequestError: {error}")

        try:
            await model.send_chat_request(question.with_deadline(0.3).set_sampler_ignore_eos(True))
        except InferenceError as error:  # it failed midway: there may be a part of the answer
            partial = error.partial_response
            text = partial.choices[0].message.content if partial else ""
            print(f"InferenceError: {error}; so far: {(text or '')[:40]!r}")

        answers = await asyncio.gather(
            *(model.send_chat_request(question.set_sampler_max_len(8)) for _ in range(4)),
            return_exceptions=True,
        )
        full = [error for error in answers if isinstance(error, QueueFullError)]
        print(f"QueueFullError: {len(full)} of 4, {full[0]}")

    try:
        await model.chat("Are you still there?")
    except MistralRsError as error:  # the base of all
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
