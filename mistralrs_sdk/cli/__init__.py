"""The command line: `mistralrs-sdk COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mistralrs_sdk import MistralRsError, __version__
from mistralrs_sdk.cli import bench, cache, completions, doctor, run, serve, tune


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is its exit code: 0, 1 for an error, 130 for Ctrl-C.

    argparse itself exits with 2 where the command line cannot be understood.
    """
    parser = argparse.ArgumentParser(
        prog="mistralrs-sdk", description="Run language models on this machine."
    )
    parser.add_argument("--version", action="version", version=f"mistralrs-sdk {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (run, serve, bench, tune, doctor, cache):
        command.add_parser(commands)
    completions.add_parser(commands, program=parser)
    args = parser.parse_args(argv)
    # read when torch is imported, which no command has done yet: threads that wait for each other
    # then soon give way to whoever else computes on this machine (docs/performance.md)
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    try:
        return args.command(args)
    except MistralRsError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output left; what is still buffered must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
