"""Commands under torchrun: rank 0 runs the command; the other ranks hold their parts of the model and print nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

import typer

from forerun.cli.commands import USER_ERROR

if TYPE_CHECKING:
    from forerun.engine.engine import Engine

MULTI_RANK_COMMANDS = ("chat", "generate", "serve")


def ranks() -> int:
    """Return how many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def check_shared(command: str | None) -> None:
    """Raise ValueError for a command that would run separately in every process."""
    if ranks() > 1 and command not in MULTI_RANK_COMMANDS:
        allowed = ", ".join(MULTI_RANK_COMMANDS)
        raise ValueError(f"{command} runs in one process, and there are {ranks()}; allowed are {allowed}")


@contextmanager
def leading(engine: Engine) -> Iterator[None]:
    """Let the other ranks, if any, follow this one within this context."""
    from forerun.tensor_parallel.ranks import Leader

    if isinstance(engine.target, Leader):
        with engine.target.leading():
            yield
        _leave_ranks()
    else:
        yield


def followed(build: Callable[[], Engine]) -> bool:
    """On ranks other than 0, follow rank 0, which handles Ctrl-C, to the end with ``build``'s engine; return True."""
    if ranks() == 1 or os.environ["RANK"] == "0":
        return False
    from forerun.tensor_parallel.channel import LeaderError
    from forerun.tensor_parallel.ranks import Follower

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with closing(build()) as engine:
            assert isinstance(engine.target, Follower)
            for _ in engine.target.follow([]):
                pass
    except LeaderError:  # rank 0 prints it
        raise typer.Exit(USER_ERROR) from None
    _leave_ranks()
    return True


def _leave_ranks() -> None:
    """Leave the process group when the work is done. A gloo thread that still holds a message's tensors aborts the
    process if Python has exited; the barrier lets it finish. A rank killed meanwhile is no error."""
    import torch.distributed as dist

    with suppress(RuntimeError):  # torch.distributed's error for a lost peer
        dist.barrier()
    dist.destroy_process_group()
