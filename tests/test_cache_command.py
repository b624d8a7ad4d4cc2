"""`mistralrs-sdk cache` and `completions`."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys

import pytest

from mistralrs_sdk.cli import main

COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture
def hub(tmp_path):
    """A cache with two models, one of them in two revisions."""
    for name, commits in (("org/big", COMMITS), ("org/small", COMMITS[:1])):
        repo = tmp_path / f"models--{name.replace('/', '--')}"
        (repo / "blobs").mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(commits[0])
        for number, commit in enumerate(commits):
            blob = repo / "blobs" / f"{number}{commit}"
            blob.write_bytes(b"x" * (1000 if name == "org/big" else 10))
            snapshot = repo / "snapshots" / commit
            snapshot.mkdir(parents=True)
            (snapshot / "model.safetensors").symlink_to(blob)
    return tmp_path


def listed(hub, capsys):
    assert main(["cache", "list", "--hf-cache", str(hub), "--json"]) == 0
    return {entry["id"]: entry for entry in json.loads(capsys.readouterr().out)}


def test_models_are_listed_the_largest_first(hub, capsys):
    """With size, files and revisions, as a table and as JSON."""
    found = listed(hub, capsys)

    assert list(found) == ["org/big", "org/small"]
    assert (found["org/big"]["bytes"], len(found["org/big"]["revisions"])) == (2000, 2)
    assert main(["cache", "list", "--hf-cache", str(hub)]) == 0
    assert "org/small" in capsys.readouterr().out


def test_a_cache_that_is_not_there_is_empty(tmp_path, capsys):
    """No error: nothing was downloaded yet."""
    assert main(["cache", "list", "--hf-cache", str(tmp_path / "none")]) == 0

    assert capsys.readouterr().out == "The cache is empty.\n"


def test_a_model_is_deleted_whole(hub, capsys):
    """All revisions of it, and nothing else."""
    assert main(["cache", "delete", "-m", "org/big", "-y", "--hf-cache", str(hub)]) == 0

    assert "org/big" in capsys.readouterr().out
    assert list(listed(hub, capsys)) == ["org/small"]


@pytest.mark.parametrize(("revision", "left"), [("main", COMMITS[1]), ("bbb", COMMITS[0])])
def test_one_revision_is_deleted_by_ref_or_beginning(revision, left, hub, capsys):
    """The others stay."""
    flags = ["-m", "org/big", "--revision", revision, "-y", "--hf-cache", str(hub)]

    assert main(["cache", "delete", *flags]) == 0

    capsys.readouterr()
    (found,) = listed(hub, capsys)["org/big"]["revisions"]
    assert found["commit"] == left


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-m", "org/none", "-y"], "org/none is not in the cache"),
        (["-m", "org/big", "--revision", "c", "-y"], "no revision c"),
        (["-m", "org/big"], "--yes"),
    ],
)
def test_what_cannot_be_deleted_is_an_error(flags, says, hub, capsys, monkeypatch):
    """An unknown model or revision, or nobody there to ask; nothing is deleted."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))

    assert main(["cache", "delete", *flags, "--hf-cache", str(hub)]) == 1

    assert says in capsys.readouterr().err
    assert len(listed(hub, capsys)) == 2


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, 1), ("", 1, 2)])
def test_deleting_asks_first(answer, code, left, hub, capsys, monkeypatch):
    """Anything but yes deletes nothing."""
    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))

    assert main(["cache", "delete", "-m", "org/big", "--hf-cache", str(hub)]) == code

    capsys.readouterr()
    assert len(listed(hub, capsys)) == left


def completed(script, *words):
    """What bash would offer for the last of these words."""
    line = " ".join(f"'{word}'" for word in ("mistralrs-sdk", *words))
    ask = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _mistralrs_sdk\n"
    ask += 'printf "%s\\n" "${COMPREPLY[@]}"'
    return subprocess.run(
        ["bash", "-c", ask], capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_flags(capsys, tmp_path, monkeypatch):
    """Commands first, then the flags of the command, in sub-commands too; else files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traffic.jsonl").touch()
    assert main(["completions", "bash"]) == 0
    script = capsys.readouterr().out

    assert completed(script, "be") == ["bench"]
    assert completed(script, "bench", "--conc") == ["--concurrency"]
    assert completed(script, "bench", "--dataset", "traf") == ["traffic.jsonl"]
    assert completed(script, "cache", "del") == ["delete"]
    assert completed(script, "cache", "delete", "--rev") == ["--revision"]


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("zsh", "bashcompinit"),
        ("fish", "complete -c mistralrs-sdk -n '__fish_seen_subcommand_from bench' -l concurrency"),
    ],
)
def test_other_shells_have_scripts_too(shell, line, capsys):
    """zsh through bash's way of completing, fish in its own words."""
    assert main(["completions", shell]) == 0

    assert line in capsys.readouterr().out
