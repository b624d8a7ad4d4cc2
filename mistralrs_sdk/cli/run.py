"""`mistralrs-sdk run`: one answer, or a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from mistralrs_sdk import (
    EngineClosedError,
    EngineDeadError,
    MistralRsError,
    ReasoningEffort,
    RequestBuilder,
    RequestError,
    SamplingParams,
    TextMessageRole,
)
from mistralrs_sdk.cli.model_flags import add_model_flags, builder_from

if TYPE_CHECKING:
    from mistralrs_sdk import Model, Usage

HELP = """\
/help              show this
/system TEXT       set the system prompt; without TEXT, remove it
/clear             forget the conversation; the system prompt stays
/temperature F     0 always takes the most likely token
/topk N            choose among the N most likely tokens; 0 is off
/topp F            choose among the most likely tokens up to this mass; 1 is off
/adapter ALIAS     answer with this LoRA adapter (also: use ALIAS); none is the model alone,
                   list shows those there are; without ALIAS, show which it is
/exit              leave, as Ctrl-D does; Ctrl-C stops an answer"""

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

_OFF = ("", "0", "false", "no", "off")
"""What the variable of a switch may hold for off."""


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the program."""
    parser = commands.add_parser(
        "run",
        help="answer one prompt, or chat in the terminal",
        description="Answer one prompt (-i), or chat in the terminal. With -i and no sampling flag "
        "the most likely tokens are taken; a conversation samples with the model's own defaults.",
    )
    add_model_flags(parser, max_seqs=1)
    parser.add_argument("-i", "--input", metavar="TEXT", help="answer this and leave")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, metavar="F", help="0: most likely token")
    sampling.add_argument("--top-k", type=int, metavar="N", help="among the N most likely; 0: off")
    sampling.add_argument("--top-p", type=float, metavar="F", help="up to this mass; 1: off")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="longest answer, in tokens")
    answers = parser.add_argument_group("answers")
    answers.add_argument("--adapter", metavar="ALIAS", help="answer with this LoRA adapter")
    answers.add_argument(
        "--thinking",
        nargs="?",
        const="true",
        choices=("true", "false"),
        help="ask for reasoning before the answer, or against it (as the model likes)",
    )
    answers.add_argument(
        "--reasoning-effort",
        choices=tuple(effort.value for effort in ReasoningEffort),
        help="how much reasoning (as the model likes)",
    )
    noise = parser.add_mutually_exclusive_group()
    noise.add_argument("-q", "--quiet", action="store_true", help="print nothing but answers")
    noise.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show the log, as setting RUST_LOG or MISTRALRS_DEBUG does; RUST_LOG sets its level",
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Build the model and answer; returns the exit code."""
    chosen = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    sampling = SamplingParams(**chosen, max_len=args.max_tokens)
    if args.input is not None and set(chosen.values()) == {None}:
        sampling = attrs.evolve(sampling, top_k=1)
    request = RequestBuilder().set_adapter(args.adapter)
    if args.thinking is not None:
        request = request.enable_thinking(args.thinking == "true")
    if args.reasoning_effort is not None:
        request = request.with_reasoning_effort(args.reasoning_effort)
    builder = builder_from(args)
    if args.quiet:
        builder = builder.with_progress(False)
    elif args.verbose or _wants_log(os.environ):
        builder = builder.with_logging()
    # the loop runs only while something is awaited: at the prompt the terminal has the main thread,
    # so that Ctrl-C and Ctrl-D arrive there
    with asyncio.Runner() as runner:
        model = runner.run(builder.build())
        try:
            chat = Chat(
                model=model, runner=runner, sampling=sampling, request=request, quiet=args.quiet
            )
            if args.input is None:
                return talk(chat)
            chat.ask(args.input)
            return 0
        finally:
            runner.run(model.aclose())


@attrs.define(kw_only=True)
class Chat:
    """A conversation with a model: what was said, and how the next answer is drawn."""

    model: Model
    runner: asyncio.Runner
    sampling: SamplingParams
    request: RequestBuilder = attrs.field(factory=RequestBuilder)
    """What every turn asks for besides: the adapter, and whether to reason."""
    quiet: bool = False
    system: str | None = None
    turns: list[tuple[TextMessageRole, str]] = attrs.field(factory=list)

    def ask(self, text: str) -> None:
        """Print the answer to `text` as it comes, and remember both.

        Reasoning is shown dimmed on a terminal, and never remembered. Ctrl-C raises
        KeyboardInterrupt; what was answered until then is remembered.
        """
        request = self.request.set_sampling(self.sampling)
        if self.system is not None:
            request = request.add_message(TextMessageRole.SYSTEM, self.system)
        for role, said in (*self.turns, (TextMessageRole.USER, text)):
            request = request.add_message(role, said)
        pieces: list[str] = []
        thoughts = Thoughts(shown=sys.stdout.isatty() and not self.quiet)
        try:
            usage = self.runner.run(_print_answer(self.model, request, pieces, thoughts))
        finally:
            thoughts.end()
            answer = "".join(pieces)
            if answer:
                print(flush=True)
                self.turns.append((TextMessageRole.USER, text))
                self.turns.append((TextMessageRole.ASSISTANT, answer))
        if usage is not None and not self.quiet:
            print(_speed(usage), file=sys.stderr)

    def obey(self, line: str) -> None:
        """Carry out a /command.

        Raises:
            RequestError: there is no such command, or its value is wrong.
        """
        name, _, value = line.partition(" ")
        value = value.strip()
        if name == "/help":
            print(HELP)
        elif name == "/system":
            self.system = value or None
        elif name == "/clear":
            self.turns.clear()
        elif name == "/temperature":
            self.sampling = attrs.evolve(self.sampling, temperature=_number(name, value, float))
        elif name == "/topk":
            self.sampling = attrs.evolve(self.sampling, top_k=_number(name, value, int))
        elif name == "/topp":
            self.sampling = attrs.evolve(self.sampling, top_p=_number(name, value, float))
        elif name == "/adapter":
            self._choose_adapter(value)
        else:
            raise RequestError(f"there is no command {name}; /help shows those there are")

    def _choose_adapter(self, value: str) -> None:
        loaded = [info.alias for info in self.runner.run(self.model.list_lora_adapters())]
        word, _, alias = value.partition(" ")
        if value == "list":
            print("\n".join(loaded) or "(no adapter is loaded)")
        elif not value:
            print(self.request.adapter or "(none: the model alone)")
        elif value == "none":
            self.request = self.request.set_adapter(None)
        else:
            alias = alias.strip() if word == "use" and alias.strip() else value
            if alias not in loaded:
                raise RequestError(
                    f"there is no adapter {alias!r}: loaded are {', '.join(loaded) or 'none'}; "
                    "start with --lora ALIAS=SOURCE to have one"
                )
            self.request = self.request.set_adapter(alias)


@attrs.define(kw_only=True)
class Thoughts:
    """Reasoning on its way to the terminal, dimmed; it goes nowhere unless it is to be shown."""

    shown: bool
    open: bool = False

    def add(self, piece: str) -> None:
        """Print a piece of it."""
        if self.shown and piece:
            print(piece if self.open else _DIM + piece, end="", flush=True)
            self.open = True

    def end(self) -> None:
        """What comes next is something else, on a line of its own."""
        if self.open:
            print(_PLAIN, flush=True)
            self.open = False


def talk(chat: Chat) -> int:
    """Read and answer lines until /exit or the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (line editing and history for input())
    terminal = sys.stdin.isatty()
    if terminal and not chat.quiet:
        print("/help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves.", file=sys.stderr)
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            if terminal:
                print()
            return 0
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
            continue
        if line == "/exit":
            return 0
        try:
            if line.startswith("/"):
                chat.obey(line)
            elif line:
                chat.ask(line)
        except KeyboardInterrupt:
            print("(stopped)", file=sys.stderr)
        except (EngineDeadError, EngineClosedError):
            raise
        except MistralRsError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)


async def _print_answer(
    model: Model, request: RequestBuilder, pieces: list[str], thoughts: Thoughts
) -> Usage | None:
    """Print the answer piece by piece and keep the pieces; leaving early ends the request."""
    usage = None
    async with await model.stream_chat_request(request) as stream:
        async for chunk in stream:
            for choice in chunk.choices:
                thoughts.add(choice.delta.reasoning_content or "")
                piece = choice.delta.content or ""
                if piece:
                    thoughts.end()
                pieces.append(piece)
                print(piece, end="", flush=True)
            usage = chunk.usage or usage
    return usage


def _wants_log(environ: Mapping[str, str]) -> bool:
    """Whether a variable asks for log lines, which would otherwise go nowhere."""
    debug = environ.get("MISTRALRS_DEBUG", "").strip().lower()
    return bool(environ.get("RUST_LOG", "").strip()) or debug not in _OFF


def _speed(usage: Usage) -> str:
    return (
        f"prompt: {usage.prompt_tokens} tokens, {usage.avg_prompt_tok_per_sec:.1f} tokens/s; "
        f"decode: {usage.completion_tokens} tokens, {usage.avg_compl_tok_per_sec:.1f} tokens/s"
    )


def _number(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise RequestError(f"{name} ({text!r}) needs {wanted}") from None
