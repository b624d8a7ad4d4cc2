"""The same calls as with the `mistralrs` package, without an event loop: `python runner.py`."""

from pathlib import Path

from demo_model import model_path

from mistralrs_sdk import ChatCompletionRequest, Runner, Which


def main(path: str) -> None:
    file = Path(path)
    if file.suffix == ".gguf":
        which = Which.GGUF(quantized_model_id=str(file.parent), quantized_filename=file.name)
    else:
        which = Which.Plain(model_id=path)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with Runner(which=which, max_seqs=8, prefix_cache_n=16) as runner:
        request = ChatCompletionRequest(messages=question, model="default", top_k=1)
        response = runner.send_chat_completion_request(request)
        print(response.choices[0].message.content)
        print(f"{response.usage.avg_compl_tok_per_sec:.1f} tokens per second")

        for chunk in runner.send_chat_completion_request(
            ChatCompletionRequest(messages="Count to five.", max_tokens=32, stream=True)
        ):
            print(chunk.choices[0].delta.content, end="", flush=True)
        print()


if __name__ == "__main__":
    main(model_path())
