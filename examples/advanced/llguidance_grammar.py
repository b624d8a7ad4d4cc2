"""Hold answers to grammars, one of them made of others: `python llguidance_grammar.py [MODEL]`."""

import asyncio

from demo_model import model_path

from mistralrs_sdk import Constraint, ModelBuilder, RequestBuilder

SHOPPING = r"""
start: item (", " item){2}
item: amount " " thing
amount: /[1-9]/
thing: "apples" | "eggs" | "carrots" | "loaves of bread"
"""
VERDICT = {
    "grammars": [
        # the first one is the whole answer; the others are used in it by their names
        {"lark_grammar": 'start: @judgement " because of " @reason "."'},
        {"name": "judgement", "lark_grammar": 'start: "guilty" | "not guilty"'},
        {"name": "reason", "lark_grammar": "start: /[a-z]{2,10}( [a-z]{2,10}){0,2}/"},
    ]
}


async def main(path: str) -> None:
    shopping = RequestBuilder().add_message("user", "Write a shopping list.")
    verdict = RequestBuilder().add_message("user", "Did the cat steal the fish? Give a verdict.")
    async with await ModelBuilder(path).build() as model:
        answers = await asyncio.gather(
            model.send_chat_request(shopping.set_constraint(Constraint.Lark(SHOPPING))),
            model.send_chat_request(verdict.set_constraint(Constraint.Llguidance(VERDICT))),
        )
    for answer in answers:
        print(answer.choices[0].message.content)


if __name__ == "__main__":
    asyncio.run(main(model_path()))
