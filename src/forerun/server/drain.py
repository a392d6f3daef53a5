"""How a server ends: it takes no more, lets those who are there end for a while, then tells the rest that it closes."""

from __future__ import annotations

import asyncio
import math
import socket

import uvicorn
from fastapi import FastAPI

from forerun.server.scheduler import Scheduler

LAST_WORDS = 5
"""Seconds that clients have to take the end of their answers, once no more is decoded."""


class DrainingServer(uvicorn.Server):
    """uvicorn, which ends by the scheduler: what it cancels is told to its client.

    Args:
        app: from ``create_app``.
        host, port: where to listen.
        patience: seconds that requests may take to end by themselves.
    """

    def __init__(self, app: FastAPI, host: str, port: int, patience: float) -> None:
        wait = math.ceil(patience) + LAST_WORDS
        super().__init__(uvicorn.Config(app, host, port, access_log=False, timeout_graceful_shutdown=wait))
        self._scheduler: Scheduler = app.state.service.scheduler
        self._patience = patience

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See the module."""
        closing = asyncio.create_task(asyncio.to_thread(self._scheduler.close, self._patience))
        await super().shutdown(sockets)
        await closing
