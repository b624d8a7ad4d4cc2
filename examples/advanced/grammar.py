"""Hold answers to a regular expression: `python grammar.py [MODEL]`."""

import asyncio

from demo_model import model_path

from mistralrs_sdk import Constraint, ModelBuilder, RequestBuilder

QUESTIONS = {
    "Which colour is the sky?": r"(red|green|blue)",
    "When did the second world war end?": r"in 19[0-9]{2}",
    "Which animal says meow?": r"(dog|cat|cow)s?",
}


async def main(path: str) -> None:
    async with await ModelBuilder(path).build() as model:
        requests = [
            RequestBuilder().add_message("user", text).set_constraint(Constraint.Regex(pattern))
            for text, pattern in QUESTIONS.items()
        ]
        responses = await asyncio.gather(*map(model.send_chat_request, requests))

    for (question, pattern), response in zip(QUESTIONS.items(), responses, strict=True):
        print(f"{question} {response.choices[0].message.content}  ({pattern})")


if __name__ == "__main__":
    asyncio.run(main(model_path()))
