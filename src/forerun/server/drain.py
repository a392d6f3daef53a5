"""How a server ends: it takes no more, lets those who are there end for a while, then tells the rest that it closes."""

from __future__ import annotations

import asyncio
import gc
import math
import socket

import uvicorn
from fastapi import FastAPI

from forerun.server.connections import Connection
from forerun.server.scheduler import Scheduler

LAST_WORDS = 5
"""Seconds that clients have to take the end of their answers, once no more is decoded."""


class DrainingServer(uvicorn.Server):
    """uvicorn, which ends by the scheduler: what it cancels is told to its client.

    Args:
        app: from ``create_app``.
        host, port: where to listen.
        patience: seconds that requests may take to end by themselves.
        connections: at once, at most.
    """

    def __init__(self, app: FastAPI, host: str, port: int, patience: float, connections: int) -> None:
        config = uvicorn.Config(
            app,
            host,
            port,
            http=Connection,
            ws="none",
            limit_concurrency=connections,
            access_log=False,
            timeout_graceful_shutdown=math.ceil(patience) + LAST_WORDS,
        )
        super().__init__(config)
        self._scheduler: Scheduler = app.state.service.scheduler
        self._scheduler.on_failed = self._fail
        self._patience = patience
        self.failed = False
        """Whether it has ended because it could not go on."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. What is there by now stays: no collection of garbage, which all would wait for, looks at it again."""
        gc.freeze()
        await super().startup(sockets)

    def _fail(self) -> None:
        self.failed = self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See the module."""
        closing = asyncio.create_task(asyncio.to_thread(self._scheduler.close, self._patience))
        await super().shutdown(sockets)
        await closing
