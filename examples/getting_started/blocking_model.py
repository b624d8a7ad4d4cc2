"""Use a model without an event loop, from several threads: `python blocking_model.py [MODEL]`."""

from concurrent.futures import ThreadPoolExecutor

from demo_model import model_path

from mistralrs_sdk import BlockingModel, ModelBuilder, RequestBuilder

WORDS = ("cat", "house", "water")


def main(path: str) -> None:
    with BlockingModel.from_builder(ModelBuilder(path)) as model:
        request = RequestBuilder().add_message("user", "Name a colour.").set_sampler_max_len(24)
        for chunk in model.stream_chat_request(request):
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()

        # threads that ask at the same time share the model's batches
        with ThreadPoolExecutor() as threads:
            questions = [f"What is the plural of {word}?" for word in WORDS]
            for word, answer in zip(WORDS, threads.map(model.chat, questions), strict=True):
                print(f"{word}: {answer}")


if __name__ == "__main__":
    main(model_path())
