"""The package as a whole: what importing it costs, its public names, and who may import whom."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import mistralrs_sdk

ROOT = Path(mistralrs_sdk.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

BASE = {
    "_version",
    "adapters",
    "config",
    "cpu_threads",
    "device_map",
    "distributed",
    "errors",
    "isq",
    "logs",
    "machine",
    "plan",
    "sampling_params",
    "switches",
    "token_source",
    "topology",
    "unsupported",
}
BELOW_MODELS = BASE | {"attention", "kernels", "layers", "quant"}
ENGINE = BELOW_MODELS | {"loading", "models"}
ALLOWED = {
    **{name: BASE for name in BASE},
    "unsupported_names": BASE,
    "kernels": BASE,
    "quant": BASE | {"kernels"},
    "attention": BASE | {"kernels"},
    "layers": BASE | {"attention", "kernels", "quant"},
    "models": BELOW_MODELS,
    "loading": BELOW_MODELS | {"models"},
    "engine": ENGINE,
    "constraints": BASE,
    "chat": BASE | {"constraints", "engine"},
    "answers": BASE | {"chat", "engine"},
    "tools": BASE | {"answers", "chat"},
    "serving": ENGINE | {"answers", "chat", "constraints", "engine", "tools"},
    "handle": BASE | {"answers", "chat", "engine", "serving", "tools"},
    "builders": BASE | {"engine", "handle", "serving", "tools"},
    "which": BASE | {"builders"},
    "runner_requests": BASE | {"chat", "constraints"},
    "runner": BASE | {"answers", "builders", "chat", "handle", "runner_requests", "tools", "which"},
}
"""The design's order, down only: what each part may import from the package at run time."""

PUBLIC_ONLY = {"cli", "integrations", "server"}
TORCH_FREE = (
    "adapters",
    "builders.adapter_methods",
    "builders.embedding_builder",
    "builders.lora_builder",
    "builders.model_builder",
    "builders.multi_model_builder",
    "builders.paged_attention",
    "builders.text_builders",
    "chat.answer_format",
    "chat.answer_parser",
    "chat.chat_text",
    "chat.detokenizer",
    "chat.embedding_encoder",
    "chat.embeddings",
    "chat.function_tools",
    "chat.incoming_text",
    "chat.messages",
    "chat.openai_request",
    "chat.refused",
    "chat.requests",
    "chat.responses",
    "chat.template",
    "chat.token_logprobs",
    "chat.tool_events",
    "chat.tool_formats",
    "chat.tool_grammar",
    "chat.tool_history",
    "chat.tools",
    "cli",
    "config",
    "constraints.compiled",
    "constraints.constraint",
    "constraints.json_schema",
    "constraints.matcher",
    "constraints.python_types",
    "constraints.vocabulary",
    "cpu_threads",
    "device_map",
    "engine.block_pool",
    "engine.default_scheduler",
    "engine.metrics",
    "engine.prefix_cache",
    "engine.request",
    "engine.scheduler",
    "engine.sequence",
    "engine.whole_prefix_cache",
    "errors",
    "handle.registry",
    "integrations.ray_serve",
    "isq",
    "logs",
    "machine",
    "plan",
    "quant.isq",
    "sampling_params",
    "serving.structured",
    "switches",
    "token_source",
    "tools.agent",
    "tools.agent_builder",
    "tools.callbacks",
    "tools.loop",
    "tools.mcp_client",
    "tools.sessions",
    "topology",
    "unsupported_names",
)
HOMES = {  # a library, and the only places that may import it
    "agents": ("integrations/openai_agents",),
    "flashinfer": ("attention/flashinfer.py",),
    "langchain_core": ("integrations/langchain",),
    "llguidance": ("constraints/",),
    "mcp": ("tools/mcp_client.py",),
    "prometheus_client": ("server/metrics.py",),
    "pydantic_ai": ("integrations/pydantic_ai",),
    "ray": ("integrations/ray_serve.py",),
    "starlette": ("server/",),
    "transformers": ("models/transformers.py", "loading/"),
}
BANNED_NAMES = {"utils", "common", "types", "constants", "helpers"}


def imports(file: Path) -> Iterator[str]:
    """Dotted names a file imports at run time, in functions too; not those for type checkers."""
    yield from _imports(ast.parse(file.read_text(encoding="utf-8")), file)


def _imports(node: ast.AST, file: Path) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{file}: imports are absolute here"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from _imports(child, file)


def part(file: Path) -> str:
    """The part of the package a file belongs to: its top folder or module."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_importing_the_package_loads_nothing_heavy():
    """`import mistralrs_sdk` stays instant: only itself and the standard library."""
    code = "import sys, mistralrs_sdk; print(*{n.partition('.')[0] for n in sys.modules})"

    loaded = set(run_python(code).split())

    heavy = {"attrs", "huggingface_hub", "jinja2", "numpy", "tokenizers", "torch", "transformers"}
    assert loaded & heavy == set()


def test_modules_without_torch_do_not_load_it():
    """Settings, text and scheduling work without torch: their imports take milliseconds."""
    present = [n for n in TORCH_FREE if (ROOT / n.replace(".", "/")).with_suffix(".py").exists()]
    code = (
        "import importlib, sys\n"
        f"for name in {[*present, 'cli']}:\n"
        "    importlib.import_module('mistralrs_sdk.' + name)\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
        "import mistralrs_sdk\n"
        "mistralrs_sdk.ModelBuilder('x').with_max_num_seqs(8)\n"
        "assert 'torch' not in sys.modules\n"
        "print('light')"
    )

    assert run_python(code) == "light\n"


def test_public_names_are_sorted_and_complete():
    """`__all__` is sorted, without repeats, and what dir() shows."""
    assert mistralrs_sdk.__all__ == sorted(set(mistralrs_sdk.__all__))
    assert dir(mistralrs_sdk) == mistralrs_sdk.__all__


@pytest.mark.parametrize("name", mistralrs_sdk.__all__)
def test_every_public_name_can_be_imported(name):
    """Each name leads to what it says."""
    thing = getattr(mistralrs_sdk, name)

    assert name == "__version__" or thing.__name__ == name


@pytest.mark.parametrize("name", mistralrs_sdk.__all__)
def test_every_public_name_and_method_says_what_it_is(name):
    """Each has a docstring, and so has each public method and property of a class."""
    thing = getattr(mistralrs_sdk, name)
    members = inspect.getmembers_static(thing) if inspect.isclass(thing) else []
    own = [
        (f"{name}.{key}", getattr(value, "__func__", value))
        for key, value in members
        if not key.startswith("_")
        and isinstance(value, types.FunctionType | property | classmethod | staticmethod)
    ]

    assert name == "__version__" or inspect.getdoc(thing)
    foreign = ("enum", "builtins", "typing", "collections")
    silent = [n for n, f in own if not inspect.getdoc(f) and f.__module__ not in foreign]
    assert silent == []


def test_unknown_public_name_is_an_attribute_error():
    """Lazy names do not change what a wrong name gives."""
    with pytest.raises(AttributeError, match="Modle"):
        _ = mistralrs_sdk.Modle


def test_type_checkers_and_the_interpreter_see_the_same_names():
    """The imports for type checkers name the modules that the lazy table names."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    checked = {
        alias.name: child.module
        for node in tree.body
        if isinstance(node, ast.If)
        for child in node.body
        if isinstance(child, ast.ImportFrom)
        for alias in child.names
    }

    lazy = {name: f"mistralrs_sdk.{home}" for name, home in mistralrs_sdk._HOME.items()}
    assert checked == lazy
    assert {*lazy, "__version__"} == set(mistralrs_sdk.__all__)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_down_only(file):
    """Each part imports only parts below it; the outermost use public names only."""
    here = part(file)
    for name in imports(file):
        package, _, rest = name.partition(".")
        if package != "mistralrs_sdk":
            continue
        there = rest.partition(".")[0]
        if here == "__init__":
            assert there == "_version"
        elif here in PUBLIC_ONLY:
            serves = here in ("cli", "integrations") and there == "server"
            public = rest in mistralrs_sdk.__all__
            assert there == here or public or serves, f"{here} imports {name}"
        else:
            assert here in ALLOWED, f"{here} has no place in the import order"
            assert there in ALLOWED[here] | {here}, f"{here} imports {name}"


def test_chat_uses_only_plain_types_of_the_engine():
    """Text handling knows requests and their outputs, not the machinery."""
    for file in (ROOT / "chat").glob("*.py"):
        for name in imports(file):
            if name.startswith("mistralrs_sdk.engine"):
                assert name.startswith("mistralrs_sdk.engine.request."), f"{file.name}: {name}"


@pytest.mark.parametrize("library", HOMES)
def test_some_libraries_have_one_home(library):
    """A library that is hard to test or slow to import stays in its place."""
    for file in FILES:
        place = file.relative_to(ROOT).as_posix()
        if not place.startswith(HOMES[library]):
            assert library not in {name.partition(".")[0] for name in imports(file)}, place


def test_no_catch_all_modules():
    """A module is named for what it holds."""
    for file in FILES:
        assert not BANNED_NAMES & set(file.relative_to(ROOT).with_suffix("").parts), file


def test_modules_say_what_they_hold():
    """Every module opens with a docstring, and none passes 600 lines."""
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        if text:
            assert ast.get_docstring(ast.parse(text)), f"{file} has no docstring"
        assert text.count("\n") <= 600, f"{file} is longer than 600 lines"


def test_every_public_module_is_reachable():
    """The home of each lazy name exists in the package."""
    for home in set(mistralrs_sdk._HOME.values()):
        assert importlib.util.find_spec(f"mistralrs_sdk.{home}"), home
