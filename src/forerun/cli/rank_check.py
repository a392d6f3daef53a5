"""Commands under torchrun: rank 0 runs the command, the other ranks hold their parts of the model and stay silent."""

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
"""Commands that several processes run together."""


def ranks() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def check_shared(command: str | None) -> None:
    """Refuse a command that would run in every process by itself.

    Raises:
        ValueError: naming those that are allowed.
    """
    if ranks() > 1 and command not in MULTI_RANK_COMMANDS:
        allowed = ", ".join(MULTI_RANK_COMMANDS)
        raise ValueError(f"{command} runs in one process, and there are {ranks()}; allowed are {allowed}")


@contextmanager
def leading(engine: Engine) -> Iterator[None]:
    """A context in which the other ranks follow this one, if there are any."""
    from forerun.tensor_parallel.ranks import Leader

    if isinstance(engine.target, Leader):
        with engine.target.leading():
            yield
        _leave_ranks()
    else:
        yield


def followed(build: Callable[[], Engine]) -> bool:
    """Whether this is another rank than 0: then it followed rank 0 to the end. Ctrl-C is for rank 0 to handle.

    Args:
        build: makes this rank's engine; what it drafts with does not matter.
    """
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
    except LeaderError:  # which rank 0 prints
        raise typer.Exit(USER_ERROR) from None
    _leave_ranks()
    return True


def _leave_ranks() -> None:
    """Leave the other processes, once the work is done.

    A thread of gloo keeps the tensors of a message for a moment longer than the message takes, and aborts the process
    if Python has ended by then. While this one waits for the others, its threads come to their end. One that was killed
    meanwhile is no error any more.
    """
    import torch.distributed as dist

    with suppress(RuntimeError):  # what torch.distributed raises for a lost peer
        dist.barrier()
    dist.destroy_process_group()
