"""The process in which the model's Python runs: one call after the other, with what earlier left.

It is run by its path with any Python 3, so it uses the standard library only. Calls come as lines
of JSON on one descriptor and their answers go out on another; what the code prints goes apart.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import sys
import traceback
import types


def main(requests_fd: int, answers_fd: int, limit: int) -> None:
    """Answer calls until there are no more. Texts are cut to `limit` characters."""
    for fd in (requests_fd, answers_fd):
        os.set_inheritable(fd, False)  # programs that the code starts have no part in it
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.path.insert(0, os.getcwd())
    sys.argv = [""]
    owner = os.getpid()
    with os.fdopen(requests_fd, encoding="utf-8") as requests:
        for number, line in enumerate(requests, start=1):
            answer = run(json.loads(line)["code"], module.__dict__, f"<call {number}>")
            if os.getpid() != owner:
                os._exit(0)  # the code has forked: one of the two answers
            answer = {key: cut(value, limit) for key, value in answer.items()}
            send(answers_fd, json.dumps(answer).encode() + b"\n")


def run(code: str, scope: dict[str, object], filename: str) -> dict[str, str]:
    """Execute code; a last line that is an expression gives the result, as in an interpreter."""
    answer: dict[str, str] = {}
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    try:
        tree = ast.parse(code, filename)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, filename, "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), filename, "eval"), scope)
            if value is not None:
                scope["_"] = value
                answer["result"] = repr(value)
    except BaseException as error:  # SystemExit, too: the session goes on
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != filename:
            trace = trace.tb_next  # what called the code is no part of it
        answer["exception"] = "".join(traceback.format_exception(type(error), error, trace))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception as error:
            answer.setdefault("exception", repr(error))  # the code has closed or replaced it
    return answer


def cut(text: str, limit: int) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def send(fd: int, data: bytes) -> None:
    """Write everything."""
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
