"""`mistralrs-sdk completions SHELL`: a script that lets a shell complete commands and flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PROGRAM = "mistralrs-sdk"

Tree = Mapping[tuple[str, ...], Sequence[str]]
"""What may follow each command, () for the program itself: its flags and sub-commands."""


def add_parser(commands: Any, *, program: argparse.ArgumentParser) -> None:
    """Add the command to the subparsers; `program` is the whole parser, which is completed."""
    parser = commands.add_parser(
        "completions",
        help="print a script that completes commands and flags",
        description="Print a completion script. bash: "
        'eval "$(mistralrs-sdk completions bash)" in ~/.bashrc; zsh: the same with zsh in '
        "~/.zshrc, after compinit; fish: "
        "mistralrs-sdk completions fish > ~/.config/fish/completions/mistralrs-sdk.fish",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(command=lambda args: _print(args.shell, program))


def words_of(parser: argparse.ArgumentParser) -> dict[tuple[str, ...], list[str]]:
    """The flags and sub-commands of a parser and of all below it."""
    return dict(_walk(parser, ()))


def script(shell: str, tree: Tree) -> str:
    """The script for bash, zsh (through its emulation of bash) or fish."""
    if shell == "fish":
        return "\n".join(_fish(tree)) + "\n"
    text = _BASH.replace("@CASES@", "\n".join(_bash_cases(tree))).replace("@PROGRAM@", PROGRAM)
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text


def _print(shell: str, parser: argparse.ArgumentParser) -> int:
    print(script(shell, words_of(parser)), end="")
    return 0


def _walk(
    parser: argparse.ArgumentParser, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    words: list[str] = []
    below: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:  # argparse has no public way to list what a parser takes
        if action.help != argparse.SUPPRESS:
            words += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            below += action.choices.items()
    yield path, [*(name for name, _ in below), *words]
    for name, found in below:
        yield from _walk(found, (*path, name))


def _bash_cases(tree: Tree) -> Iterator[str]:
    for path, words in tree.items():
        yield f'    "{" ".join(path)}") words="{" ".join(words)}" ;;'


def _fish(tree: Tree) -> Iterator[str]:
    for path, words in tree.items():
        below = [word for word in words if not word.startswith("-")]
        seen = [f"__fish_seen_subcommand_from {name}" for name in path]
        if below:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(below)}")
        condition = f"-n '{'; and '.join(seen)}' " if seen else ""
        if below:
            yield f"complete -c {PROGRAM} -f {condition}-a '{' '.join(below)}'"
        for word in words:
            if word.startswith("--"):
                yield f"complete -c {PROGRAM} {condition}-l {word[2:]}"
            elif word.startswith("-"):
                yield f"complete -c {PROGRAM} {condition}-s {word[1:]}"


_BASH = """\
_mistralrs_sdk() {
  local current="${COMP_WORDS[COMP_CWORD]}" path="" words="" word
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    [[ $word == -* ]] && break
    path="${path:+$path }$word"
  done
  case "$path" in
@CASES@
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  if [[ ${#COMPREPLY[@]} -eq 0 ]]; then
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}
complete -o default -F _mistralrs_sdk @PROGRAM@
"""
