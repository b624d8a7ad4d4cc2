"""The flags of `serve` that let models run code and commands, and what they make of a builder."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NoReturn

import attrs

from mistralrs_sdk import (
    AgentPermission,
    CodeExecutionConfig,
    ConfigError,
    ModelBuilder,
    MultiModelBuilder,
    NetworkMode,
    SandboxPolicy,
    ShellConfig,
)
from mistralrs_sdk.cli.serve_models import AnyBuilder

_CODE = {
    "code_exec_python": "python_path",
    "code_exec_timeout": "timeout_secs",
    "code_exec_workdir": "working_directory",
}
_SHELL = {
    "shell_path": "shell_path",
    "shell_timeout": "timeout_secs",
    "shell_workdir": "working_directory",
}
_BOUNDS = {
    "sb_max_memory_mb": "max_memory_mb",
    "sb_max_cpu_secs": "max_cpu_secs",
    "sb_max_procs": "max_procs",
    "sandbox_network": "network",
}
"""The flags with a value, and the settings they are."""

_REFUSED = {
    "--enable-search": "nothing here searches the web; offer a search with --mcp-config",
    "--search-embedding-model": "nothing here searches the web; offer a search with --mcp-config",
    "--skills-dir": "clients cannot upload skills; a program of yours adds them to its requests "
    "with RequestBuilder.with_shell_skill",
    "--sandbox-profile": "there are no profiles; set the bounds with --sandbox-network and "
    "--sb-max-memory-mb, --sb-max-cpu-secs, --sb-max-procs",
}
"""Flags of mistral.rs that nothing here does, and what to do instead."""


def add_agent_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the command; none is set unless it is given."""
    group = parser.add_argument_group("code and commands of the model, for requests that opt in")
    add = group.add_argument
    add("--agent", action="store_true", help="--enable-code-execution and --enable-shell")
    add(
        "--enable-code-execution",
        action="store_true",
        help='run Python for requests with "enable_code_execution": true',
    )
    add(
        "--enable-shell",
        action="store_true",
        help='run shell commands for requests with "enable_shell": true',
    )
    add("--code-exec-python", metavar="PROGRAM", help="the interpreter (the one that runs this)")
    add("--code-exec-timeout", type=float, metavar="S", help="longest call of Python (60)")
    add(
        "--code-exec-workdir",
        metavar="FOLDER",
        help="where Python works, for all clients (a folder for each session, which is removed)",
    )
    add("--shell-path", metavar="PROGRAM", help="the shell (/bin/sh)")
    add("--shell-timeout", type=float, metavar="S", help="longest command (600)")
    add(
        "--shell-workdir",
        metavar="FOLDER",
        help="where commands work, for all clients (a folder for each session, which is removed)",
    )
    add(
        "--agent-permission",
        choices=[str(each) for each in AgentPermission],
        help="run what models call at once, after the client approved, or not at all; for tools "
        "of --mcp-config and --tool-dispatch-url too; a request may be stricter (auto)",
    )
    add(
        "--sandbox",
        choices=("auto", "on", "off"),
        help="auto: confine as far as the kernel can; on: or fail; off: with all your rights "
        "(auto)",
    )
    add("--sb-max-memory-mb", type=int, metavar="MB", help="memory of a process, in MiB (2048)")
    add("--sb-max-cpu-secs", type=int, metavar="S", help="processor time of a process (600)")
    add("--sb-max-procs", type=int, metavar="N", help="processes of a session (64)")
    add(
        "--sandbox-network",
        choices=[str(each) for each in NetworkMode],
        help="what is reached: nothing, itself, everything (loopback)",
    )
    for name in _REFUSED:
        value = 0 if name == "--enable-search" else "?"
        add(name, action=_Refuse, nargs=value, help=argparse.SUPPRESS)


def with_agent_tools(builder: AnyBuilder, args: argparse.Namespace) -> AnyBuilder:
    """Let the models that chat run code and commands, as far as the flags say so.

    Raises:
        ConfigError: a flag has no effect beside the others, or a wrong value.
        UnsupportedError: this is not Linux.
    """
    code, shell = args.enable_code_execution or args.agent, args.enable_shell or args.agent
    _require(code, _CODE, args, "--enable-code-execution or --agent")
    _require(shell, _SHELL, args, "--enable-shell or --agent")
    switches = "--enable-code-execution, --enable-shell"
    _require(code or shell, ("sandbox", *_BOUNDS), args, f"{switches} or --agent")
    runs = code or shell or args.tool_dispatch_url is not None or _has_mcp(builder)
    switches += ", --agent, --mcp-config or --tool-dispatch-url"
    _require(runs, ("agent_permission",), args, switches)
    if not code and not shell:
        return builder
    shared = {"sandbox_policy": _policy(args)}
    code_config = _made("--code-exec-*", CodeExecutionConfig, _given(_CODE, args) | shared)
    shell_config = _made("--shell-*", ShellConfig, _given(_SHELL, args) | shared)

    def equipped(one: Any) -> Any:
        if not isinstance(one, ModelBuilder):  # it embeds
            return one
        one = one.with_code_execution(code_config) if code else one
        return one.with_shell_execution(shell_config) if shell else one

    if isinstance(builder, MultiModelBuilder):
        models = tuple((name, equipped(one)) for name, one in builder.models)
        changed: AnyBuilder = attrs.evolve(builder, models=models)
    else:
        changed = equipped(builder)
    if changed == builder:
        raise ConfigError(
            f"{_switch(args)} has no effect: no model here chats; leave it out, or name one with -m"
        )
    return changed


def agent_warning(args: argparse.Namespace, *, api_key: str | None) -> str | None:
    """What to say before it starts, if whoever reaches the server can have things run."""
    if api_key is not None or not (args.agent or args.enable_code_execution or args.enable_shell):
        return None
    bounds = ", with all your rights," if args.sandbox == "off" else ""
    pages = f", pages of {', '.join(args.cors_origin)} too" if args.cors_origin else ""
    return (
        f"warning: {_switch(args)} lets the model run what clients make it write{bounds} and there "
        f"is no API key: whoever reaches this port is a client{pages}"
    )


class _Refuse(argparse.Action):
    """A flag that nothing here does: said by its name, not ignored."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        why = _REFUSED[self.option_strings[0]]
        raise argparse.ArgumentError(self, f"it is not supported: {why}")


def _policy(args: argparse.Namespace) -> SandboxPolicy | None:
    bounds = _given(_BOUNDS, args)
    if args.sandbox != "off":
        return _made("--sandbox", SandboxPolicy, {**bounds, "strict": args.sandbox == "on"})
    if bounds:
        named = next(_flag(name) for name in _BOUNDS if getattr(args, name) is not None)
        raise ConfigError(
            f"--sandbox off and {named} contradict: without a sandbox its bounds cannot be set; "
            "leave one of them out"
        )
    return None


def _require(enabled: bool, names: Any, args: argparse.Namespace, switches: str) -> None:
    for name in names:
        if not enabled and getattr(args, name) is not None:
            raise ConfigError(f"{_flag(name)} has no effect without {switches}: add one of them")


def _has_mcp(builder: AnyBuilder) -> bool:
    several = isinstance(builder, MultiModelBuilder)
    every: list[Any] = [one for _, one in builder.models] if several else [builder]
    return any(isinstance(one, ModelBuilder) and one.tools.mcp is not None for one in every)


def _given(names: Mapping[str, str], args: argparse.Namespace) -> dict[str, Any]:
    found = {setting: getattr(args, name) for name, setting in names.items()}
    return {setting: value for setting, value in found.items() if value is not None}


def _made(flags: str, kind: Any, settings: Mapping[str, Any]) -> Any:
    try:
        return kind(**settings)
    except ConfigError as error:
        raise ConfigError(f"{flags}: {error}") from error


def _switch(args: argparse.Namespace) -> str:
    names = ("agent", "enable_code_execution", "enable_shell")
    return next(_flag(name) for name in names if getattr(args, name))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
