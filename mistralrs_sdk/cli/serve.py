"""`mistralrs-sdk serve`: models over HTTP, for the clients of OpenAI and Anthropic."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from mistralrs_sdk import ConfigError
from mistralrs_sdk.cli.agent_flags import add_agent_flags, agent_warning, with_agent_tools
from mistralrs_sdk.cli.mcp_file import read_mcp_config
from mistralrs_sdk.cli.model_flags import add_model_flags
from mistralrs_sdk.cli.serve_models import MAX_SEQS, AnyBuilder, ConfigFile, builder_of

if TYPE_CHECKING:
    from mistralrs_sdk import McpClientConfig
    from mistralrs_sdk.server import ServerSettings

API_KEY = "MISTRALRS_API_KEY"
RUNTIME_LORA = "MISTRALRS_ALLOW_RUNTIME_LORA_UPDATING"
KEEP_ALIVE = "KEEP_ALIVE_INTERVAL"
MCP_CONFIG = "MCP_CONFIG_PATH"

_OFF = ("", "0", "false", "no", "off")


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the program."""
    parser = commands.add_parser(
        "serve",
        help="answer over HTTP, as OpenAI and Anthropic do",
        description="Answer over HTTP. Clients of OpenAI and Anthropic work with it as they are; "
        "/ is a page for people and /docs lists the endpoints.",
    )
    add_model_flags(parser, max_seqs=MAX_SEQS, several=True)
    more = parser.add_argument_group("several models")
    more.add_argument(
        "--embedding-model-id",
        action="append",
        metavar="MODEL",
        help="Hugging Face id or folder of a model that embeds; may be repeated",
    )
    more.add_argument(
        "--default-model-id",
        metavar="ID",
        help="the model of requests that name none (the first)",
    )
    more.add_argument(
        "--config",
        action=ConfigFile,
        metavar="FILE",
        help="TOML file whose keys are these flags, with a [[models]] table for each model",
    )
    _add_server_flags(parser.add_argument_group("server"))
    add_agent_flags(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="no log and no progress bars")
    parser.set_defaults(command=serve, models=[])


def serve(args: argparse.Namespace) -> int:
    """Load the models and answer until told to stop; returns the exit code."""
    try:
        # only to know that all is there before a model is loaded
        import uvicorn  # noqa: F401

        import mistralrs_sdk.server.app  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve needs {error.name}: pip install 'mistralrs_sdk[server]'"
        ) from error
    from mistralrs_sdk.server.running import listening_on, run_server

    settings = settings_from(args, os.environ)
    builder = with_agent_tools(builder_of(args, mcp=mcp_config_from(args, os.environ)), args)
    with listening_on(settings.host, settings.port) as place:
        if settings.open_to_others:
            _say(
                f"warning: host {settings.host} lets other machines in, and there is no API key: "
                f"whoever reaches this port may use it; set --api-key or {API_KEY}"
            )
        if warning := agent_warning(args, api_key=settings.api_key):
            _say(f"{warning}; set --api-key or {API_KEY}")
        run_server(_serve(builder, settings, place))
    return 0


def settings_from(args: argparse.Namespace, environ: Mapping[str, str]) -> ServerSettings:
    """The server's settings; where a flag is not given, a variable may be.

    Raises:
        ConfigError: one is out of range.
    """
    from mistralrs_sdk.server import ServerSettings

    runtime_lora = environ.get(RUNTIME_LORA, "").strip().lower() not in _OFF
    settings = ServerSettings(
        host=args.host,
        port=args.port,
        api_key=args.api_key or environ.get(API_KEY) or None,
        cors_origins=tuple(args.cors_origin or ()),
        allowed_hosts=_hosts(args),
        max_body_bytes=args.max_body_mb * 2**20,
        keep_alive_seconds=_keep_alive(args, environ),
        drain_seconds=args.drain_seconds,
        access_log=None if args.disable_access_log else args.access_log_format,
        access_log_health=args.access_log_health,
        request_id_header=not args.disable_request_id_header,
        metrics=not args.disable_metrics,
        docs=not args.no_docs,
        web_page=not args.no_ui,
        allow_diagnostics=args.allow_diagnostics,
        allow_runtime_adapters=args.allow_runtime_adapters or runtime_lora,
        max_tool_rounds=args.max_tool_rounds,
        tool_dispatch_url=args.tool_dispatch_url,
        agent_permission=args.agent_permission or "auto",
    )
    if settings.on_loopback and settings.api_key is None and not args.allowed_host:
        return attrs.evolve(settings, allowed_hosts=())
    return settings


def mcp_config_from(args: argparse.Namespace, environ: Mapping[str, str]) -> McpClientConfig | None:
    """The MCP servers of the file that the flag names, or a variable; None: there is no file.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong.
    """
    file = args.mcp_config or environ.get(MCP_CONFIG, "").strip()
    return read_mcp_config(Path(file)) if file else None


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-p", "--port", type=int, default=1234, metavar="N", help="0 takes a free one (1234)")
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="0.0.0.0 lets other machines in (127.0.0.1)",
    )
    add("--api-key", metavar="KEY", help=f"what clients must send ({API_KEY}, or nothing)")
    add(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="let pages of this origin call, * is any; may be repeated (none)",
    )
    add(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="answer where it is called so, beside addresses and localhost, * is any; may be "
        "repeated (on loopback without a key none, else any)",
    )
    add("--max-body-mb", type=int, default=50, metavar="MB", help="longest request, in MiB (50)")
    add(
        "--keep-alive-seconds",
        type=float,
        metavar="S",
        help=f"a comment after so long without an event ({KEEP_ALIVE} in ms, or 10)",
    )
    add(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="how long answers may take to end after Ctrl-C or SIGTERM (30)",
    )
    add("--no-ui", action="store_true", help="no web page at /")
    add("--no-docs", action="store_true", help="no /docs and no OpenAPI description")
    add("--disable-access-log", action="store_true", help="log no requests")
    add("--access-log-format", choices=("text", "json"), default="text", help="(text)")
    add("--access-log-health", action="store_true", help="log /health and /metrics too")
    add("--disable-request-id-header", action="store_true", help="send no x-request-id")
    add("--disable-metrics", action="store_true", help="no /metrics")
    add(
        "--allow-diagnostics",
        action="store_true",
        help="let clients run doctor and tune, each in a process of its own",
    )
    add(
        "--allow-runtime-adapters",
        action="store_true",
        help=f"let clients load and unload LoRA adapters (also {RUNTIME_LORA})",
    )
    add(
        "--max-tool-rounds",
        type=int,
        metavar="N",
        help="rounds of tool calls executed here, for requests that do not say (256)",
    )
    add("--tool-dispatch-url", metavar="URL", help="where tool calls are sent to be executed")
    add(
        "--mcp-config",
        metavar="FILE",
        help=f"JSON file of MCP servers, whose tools every chat is offered ({MCP_CONFIG}, or none)",
    )


def _hosts(args: argparse.Namespace) -> tuple[str, ...] | None:
    names = tuple(args.allowed_host or ())
    return None if not names or "*" in names else names


def _keep_alive(args: argparse.Namespace, environ: Mapping[str, str]) -> float:
    if args.keep_alive_seconds is not None:
        return args.keep_alive_seconds
    text = environ.get(KEEP_ALIVE, "").strip()
    if not text:
        return 10.0
    try:
        return float(text) / 1000
    except ValueError:
        raise ConfigError(f"{KEEP_ALIVE} ({text!r}) must be a number of milliseconds") from None


async def _serve(builder: AnyBuilder, settings: ServerSettings, place: socket.socket) -> None:
    import uvicorn

    from mistralrs_sdk.server import create_app
    from mistralrs_sdk.server.running import uvicorn_config

    class Server(uvicorn.Server):
        """Says when it listens, and leaves signals to `_stopping`."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            _say(f"listening on {_address(place)} (models: {', '.join(model.list_models())})")

        def capture_signals(self) -> Any:
            # uvicorn's own way raises the signal again at the end, before the model is closed
            return contextlib.nullcontext()

    async with await builder.build() as model:
        app = create_app(model, settings=settings)
        server = Server(uvicorn_config(app, settings))
        with _stopping(server):
            await server.serve([place])


def _address(place: socket.socket) -> str:
    host, port = place.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _stopping(server: Any) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the server in good order; a second one does not wait."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if not server.should_exit:
            _say("stopping: waiting for answers that run; again to stop at once")
        server.force_exit = server.should_exit
        server.should_exit = True

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
