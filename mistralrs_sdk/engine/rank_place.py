"""Which rank of a tensor-parallel model this process is, and which ones it starts itself."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.switches import switched_on

NO_NCCL = "MISTRALRS_NO_NCCL"

_GLOBAL_SIZE = "MISTRALRS_MN_GLOBAL_WORLD_SIZE"
_LOCAL_SIZE = "MISTRALRS_MN_LOCAL_WORLD_SIZE"
_HEAD_WORKERS = "MISTRALRS_MN_HEAD_NUM_WORKERS"
_HEAD_PORT = "MISTRALRS_MN_HEAD_PORT"
_HEAD_ADDRESS = "MISTRALRS_MN_WORKER_SERVER_ADDR"
_WORKER_ID = "MISTRALRS_MN_WORKER_ID"


@attrs.frozen(kw_only=True)
class RankPlace:
    """One process among the ranks of a model."""

    rank: int
    size: int
    local_rank: int
    """Its number on this machine, which is that of its CUDA device."""
    local_size: int
    """Ranks on this machine."""
    starts: range = range(0)
    """The other ranks, on this machine, that this process starts."""
    meeting: tuple[str, int] | None = None
    """Where rank 0 is met; None if all ranks are started by it."""
    agent_store: bool = False
    """Whether torchrun keeps the store there, and not rank 0."""
    attempt: int = 0
    """How often torchrun has started all of them again."""

    def of(self, rank: int) -> RankPlace:
        """The place of a rank that this process starts."""
        local = self.local_rank + rank - self.rank
        return attrs.evolve(self, rank=rank, local_rank=local, starts=range(0))


def place_of(environ: Mapping[str, str], size: int) -> RankPlace:
    """This process's place among `size` ranks.

    mistral.rs' MISTRALRS_MN_* variables speak first, then torchrun's (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT); without either, all ranks are on this machine and
    this process, rank 0, starts the others.

    Raises:
        ConfigError: a variable is missing, is no number or contradicts `size`.
    """
    if environ.get(_GLOBAL_SIZE, "").strip():
        return _several_machines(environ, size)
    if _number(environ, "WORLD_SIZE", default=1) > 1:
        return _torchrun(environ, size)
    return RankPlace(rank=0, size=size, local_rank=0, local_size=size, starts=range(1, size))


def refuse_without_nccl(environ: Mapping[str, str], size: int) -> None:
    """Refuse several CUDA devices where MISTRALRS_NO_NCCL forbids what connects them.

    Raises:
        ConfigError: it does.
    """
    if switched_on(environ, NO_NCCL):
        raise ConfigError(
            f"{NO_NCCL} ({environ[NO_NCCL]!r}) turns tensor parallelism on CUDA off, and "
            f"tensor_parallel is {size}: unset the one or leave out with_tensor_parallel"
        )


def _torchrun(environ: Mapping[str, str], size: int) -> RankPlace:
    _require_size(environ, "WORLD_SIZE", size)
    rank = _number(environ, "RANK", least=0, below=size)
    local_rank = _number(environ, "LOCAL_RANK", default=rank, least=0, below=size)
    return RankPlace(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=_number(environ, "LOCAL_WORLD_SIZE", default=1),
        meeting=(_text(environ, "MASTER_ADDR"), _number(environ, "MASTER_PORT", below=65536)),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0, least=0),
    )


def _several_machines(environ: Mapping[str, str], size: int) -> RankPlace:
    """mistral.rs': one process per machine, which starts the machine's other ranks."""
    _require_size(environ, _GLOBAL_SIZE, size)
    local = _number(environ, _LOCAL_SIZE)
    if environ.get(_WORKER_ID, "").strip():
        first = (_number(environ, _WORKER_ID, least=0) + 1) * local
        host, _, port = _text(environ, _HEAD_ADDRESS).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{_HEAD_ADDRESS} ({environ[_HEAD_ADDRESS]!r}) must be host:port")
        meeting = host.strip("[]"), int(port)
    else:
        first = 0
        workers = _number(environ, _HEAD_WORKERS)
        meeting = "127.0.0.1", _number(environ, _HEAD_PORT, below=65536)
        if (workers + 1) * local != size:
            raise ConfigError(
                f"{_HEAD_WORKERS} ({workers}) and the head with {_LOCAL_SIZE} ({local}) ranks each "
                f"are {(workers + 1) * local} ranks, and {_GLOBAL_SIZE} is {size}"
            )
    if first + local > size:
        raise ConfigError(
            f"{_WORKER_ID} ({environ[_WORKER_ID]}) with {_LOCAL_SIZE} ({local}) goes beyond "
            f"{_GLOBAL_SIZE} ({size}); the ids begin with 0"
        )
    return RankPlace(
        rank=first,
        size=size,
        local_rank=0,
        local_size=local,
        starts=range(first + 1, first + local),
        meeting=meeting,
    )


def _require_size(environ: Mapping[str, str], name: str, size: int) -> None:
    there = _number(environ, name)
    if there != size:
        raise ConfigError(
            f"tensor_parallel is {size} and {name} is {there}: give with_tensor_parallel({there}), "
            f"or start {size} processes"
        )


def _text(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "").strip()
    if not text:
        raise ConfigError(f"{name} is not set, and the ranks cannot meet without it")
    return text


def _number(
    environ: Mapping[str, str],
    name: str,
    *,
    default: int | None = None,
    least: int = 1,
    below: int | None = None,
) -> int:
    if default is not None and not environ.get(name, "").strip():
        return default
    text = _text(environ, name)
    if not text.isdecimal() or int(text) < least or (below is not None and int(text) >= below):
        limit = "" if below is None else f", below {below}"
        raise ConfigError(f"{name} ({text!r}) must be a whole number of at least {least}{limit}")
    return int(text)
