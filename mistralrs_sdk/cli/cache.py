"""`mistralrs-sdk cache`: the models that were downloaded, and how to be rid of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mistralrs_sdk import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

_WIDTH = 160
"""Of a table that goes to a file or a pipe."""


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the program."""
    parser = commands.add_parser("cache", help="list or delete downloaded models")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    shown = actions.add_parser("list", help="list what is in the hub's cache")
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.set_defaults(command=list_models)
    deleted = actions.add_parser("delete", help="delete a model, or one revision of it")
    deleted.add_argument("-m", "--model-id", required=True, metavar="ID", help="as list shows it")
    deleted.add_argument(
        "--revision", metavar="REV", help="only this branch, tag or commit (whole or its beginning)"
    )
    deleted.add_argument("-y", "--yes", action="store_true", help="do not ask")
    deleted.set_defaults(command=delete_model)
    for action in (shown, deleted):
        action.add_argument(
            "--hf-cache", type=Path, metavar="FOLDER", help="the cache (huggingface_hub's own)"
        )


def list_models(args: argparse.Namespace) -> int:
    """Print the repositories in the cache, the largest first."""
    found = _scan(args.hf_cache)
    repos = sorted(
        found.repos if found else (), key=lambda repo: (-repo.size_on_disk, repo.repo_id)
    )
    if args.json:
        entries = [
            {
                "id": repo.repo_id,
                "type": repo.repo_type,
                "bytes": repo.size_on_disk,
                "files": repo.nb_files,
                "last_accessed": repo.last_accessed,
                "path": str(repo.repo_path),
                "revisions": [
                    {"commit": revision.commit_hash, "refs": sorted(revision.refs)}
                    for revision in sorted(repo.revisions, key=lambda r: r.commit_hash)
                ],
            }
            for repo in repos
        ]
        print(json.dumps(entries, indent=2))
    elif not repos:
        print("The cache is empty.")
    else:
        _print_table(repos)
    for warning in found.warnings if found else ():
        print(f"warning: {' '.join(str(warning).split())}", file=sys.stderr)
    return 0


def delete_model(args: argparse.Namespace) -> int:
    """Delete what -m names, after asking; the exit code is 1 if the answer is no."""
    found = _scan(args.hf_cache)
    named = [repo for repo in (found.repos if found else ()) if repo.repo_id == args.model_id]
    if found is None or not named:
        raise ConfigError(
            f"{args.model_id} is not in the cache: mistralrs-sdk cache list shows what is"
        )
    hashes = [
        revision.commit_hash
        for repo in named
        for revision in repo.revisions
        if args.revision is None
        or args.revision in revision.refs
        or revision.commit_hash.startswith(args.revision)
    ]
    if not hashes:
        raise ConfigError(f"{args.model_id} has no revision {args.revision} in the cache")
    if args.revision is not None and len(hashes) > 1:
        raise ConfigError(f"--revision {args.revision} is the beginning of {len(hashes)} commits")
    # of this repository alone: one that was copied on the hub has the same commits
    strategies = [
        dataclasses.replace(found, repos=frozenset({repo})).delete_revisions(
            *[revision.commit_hash for revision in repo.revisions if revision.commit_hash in hashes]
        )
        for repo in named
    ]
    size = f"{sum(strategy.expected_freed_size for strategy in strategies) / 2**20:.1f} MiB"
    question = f"Delete {args.model_id} ({len(hashes)} revisions, {size})?"
    if not args.yes and not _agreed(question):
        print("Nothing was deleted.", file=sys.stderr)
        return 1
    for strategy in strategies:
        strategy.execute()
    print(f"Deleted {args.model_id}: {size} are free again.")
    return 0


def _scan(folder: Path | None) -> HFCacheInfo | None:
    """What is in the cache; None if there is none yet."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(folder)
    except CacheNotFound:
        return None
    except ValueError as error:
        raise ConfigError(f"--hf-cache {folder} is no folder: {error}") from error


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is nobody to ask here: add --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _print_table(repos: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("Model")
    for name in ("Size", "Files", "Revisions", "Last used"):
        table.add_column(name, justify="right")
    for repo in repos:
        kind = "" if repo.repo_type == "model" else f" ({repo.repo_type})"
        table.add_row(
            repo.repo_id + kind,
            repo.size_on_disk_str,
            str(repo.nb_files),
            str(len(repo.revisions)),
            time.strftime("%Y-%m-%d", time.localtime(repo.last_accessed)),
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)
    console.print(f"{len(repos)} in all", highlight=False)
