"""The tasks of a tape's operations; a thread does one at a time. Each kind is compiled separately, when needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from forerun.core.compiling import compiled
from forerun.kernels.attention.attention_block import attend_code
from forerun.kernels.attention.attention_combine import settle
from forerun.kernels.attention.attention_scan import scan
from forerun.kernels.attention.float64_attention import attend_plainly
from forerun.kernels.attention.ordered_attention import read_attend, read_attend_code
from forerun.kernels.attention.topk_attention import attend_chosen, choose_tasks
from forerun.kernels.attention.topk_rank import rank, read_sought_op, shorten
from forerun.kernels.linear.decoder_ops import embed, norm, read_embed, read_norm, read_rotary, turn
from forerun.kernels.linear.linear import linear_begin, linear_task, linear_tasks, panels_of, read_linear, read_panels
from forerun.kernels.quantized.stored_linear import (
    lookup,
    read_lookup,
    read_stored,
    read_stored_code,
    stored_begin,
    stored_code,
    stored_task,
    stored_tasks,
)
from forerun.kernels.runtime.addresses import Job, address_of, integers

DO_EMBED, DO_NORM, DO_LINEAR, DO_TURN, DO_SCAN, DO_SETTLE, DO_PLAINLY, DO_STORED, DO_LOOKUP = range(9)
DO_SHORTEN, DO_RANK, DO_CHOOSE = range(9, 12)
BEGIN = -1
"""Instead of a task: a thread's preparation before its first task of an operation."""


class TapeFields(NamedTuple):
    """One pass, as threads see it: addresses and counts.

    Attributes:
        threads: threads that have started.
        n: number of tokens.
        wanted: number of tokens whose logits are wanted; ``wanted_list`` has their indices.
        x, y: default input and output of linear layers that name no addresses.
        rows, units, owners, parents: tables of attention, see ``canonical.py``; ``owners`` has each token's row.
        positions: each token's position for the model, and ``places`` that in its cache.
        parts: room for attention's states.
        slots: each thread's scratch memory.
    """

    threads: int
    ops: int
    first: int
    counters: int
    n: int
    wanted: int
    wanted_list: int
    ids: int
    x: int
    y: int
    rows: int
    units: int
    unit_count: int
    owners: int
    positions: int
    places: int
    parents: int
    parts: int
    slots: int
    slot_size: int


TAPE = Job(TapeFields)
read_tape = TAPE.reader()


@compiled
def tasks_of(tape: TapeFields, op: int) -> int:
    """The number of tasks of an operation."""
    code = integers(op, 1)[0]
    if code == DO_LINEAR:
        return linear_tasks(read_linear(op))
    if code == DO_STORED:
        return stored_tasks(read_stored(op))
    if code == DO_NORM:
        return tape.wanted if read_norm(op).which else tape.n
    if code == DO_SCAN:
        return int(tape.unit_count * read_attend(op).kv_heads)
    if code == DO_SETTLE:
        return int(tape.n * read_attend(op).kv_heads)
    if code == DO_PLAINLY:
        return int(tape.n * read_attend(op).heads)
    if code == DO_SHORTEN:
        return int(tape.n * read_sought_op(op).kv_heads)
    if code == DO_RANK:
        return int(tape.unit_count * read_sought_op(op).kv_heads)
    if code == DO_CHOOSE:
        return choose_tasks(read_sought_op(op), tape.n)
    return tape.n


@compiled
def do_linear(address: int, op: int, code: int, task: int, slot: int) -> None:
    """Some panels for all tokens."""
    tape, linear, panels = read_tape(address), read_linear(op), read_panels(code)
    n = tape.wanted if linear.which else tape.n
    if task == BEGIN:
        linear_begin(linear, panels, n, linear.x if linear.x else tape.x, slot)
    else:
        linear_task(linear, panels, n, linear.y if linear.y else tape.y, task, slot)


@compiled
def do_stored(address: int, op: int, code: int, task: int, slot: int) -> None:
    """Some pairs of panels for all tokens."""
    tape, stored, shared = read_tape(address), read_stored(op), read_stored_code(code)
    n, x = tape.wanted if stored.which else tape.n, stored.x if stored.x else tape.x
    if task == BEGIN:
        stored_begin(stored, shared, n, x, slot)
    else:
        stored_task(stored, shared, n, x, stored.y if stored.y else tape.y, task, slot)


@compiled
def do_lookup(address: int, op: int, code: int, task: int, slot: int) -> None:
    """One token."""
    if task != BEGIN:
        lookup(read_lookup(op), read_tape(address).ids, task, slot)


@compiled
def do_norm(address: int, op: int, code: int, task: int, slot: int) -> None:
    """One token."""
    if task != BEGIN:
        norm(read_norm(op), read_tape(address).wanted_list, task, slot)


@compiled
def do_embed(address: int, op: int, code: int, task: int, slot: int) -> None:
    """One token."""
    if task != BEGIN:
        embed(read_embed(op), read_tape(address).ids, task, slot)


@compiled
def do_turn(address: int, op: int, code: int, task: int, slot: int) -> None:
    """One token."""
    if task != BEGIN:
        tape = read_tape(address)
        turn(read_rotary(op), tape.rows, tape.owners, tape.positions, task, slot)


@compiled
def do_scan(address: int, op: int, code: int, task: int, slot: int) -> None:
    """One unit and KV head."""
    if task != BEGIN:
        tape = read_tape(address)
        scan(read_attend(op), read_attend_code(code), tape.rows, tape.units, tape.places, tape.parts, task, slot)


@compiled
def do_settle(address: int, op: int, code: int, task: int, slot: int) -> None:
    """One token and KV head."""
    if task != BEGIN:
        tape = read_tape(address)
        settle(
            read_attend(op), read_attend_code(code), tape.rows, tape.owners, tape.places, tape.parents, tape.parts,
            task, slot,
        )  # fmt: skip


@compiled
def do_plainly(address: int, op: int, code: int, task: int, slot: int) -> None:
    """One token and head."""
    if task != BEGIN:
        tape = read_tape(address)
        attend_plainly(read_attend(op), tape.rows, tape.owners, tape.places, tape.parents, task, slot)


@compiled
def do_shorten(address: int, op: int, code: int, task: int, slot: int) -> None:
    """One token and KV head."""
    if task != BEGIN:
        tape = read_tape(address)
        shorten(read_sought_op(op), tape.rows, tape.owners, task, slot)


@compiled
def do_rank(address: int, op: int, code: int, task: int, slot: int) -> None:
    """One unit and KV head."""
    if task != BEGIN:
        rank(read_sought_op(op), read_tape(address).units, task, slot)


@compiled
def do_choose(address: int, op: int, code: int, task: int, slot: int) -> None:
    """One token and tile of heads."""
    if task != BEGIN:
        tape = read_tape(address)
        attend_chosen(read_sought_op(op), tape.rows, tape.owners, tape.parents, task, slot)


STEPS: dict[int, Callable[[int, int, int, int, int], None]] = {
    DO_EMBED: do_embed,
    DO_NORM: do_norm,
    DO_LINEAR: do_linear,
    DO_TURN: do_turn,
    DO_SCAN: do_scan,
    DO_SETTLE: do_settle,
    DO_PLAINLY: do_plainly,
    DO_STORED: do_stored,
    DO_LOOKUP: do_lookup,
    DO_SHORTEN: do_shorten,
    DO_RANK: do_rank,
    DO_CHOOSE: do_choose,
}


def code_of(fields: Any) -> tuple[int, ...]:
    """Addresses of an operation's machine code: of the task function, and of the code that it calls."""
    step = address_of(STEPS[fields.code], 5)
    if fields.code == DO_LINEAR:
        return (step, *panels_of(fields.kind))
    if fields.code == DO_STORED:
        return (step, *stored_code())
    return (step, *attend_code()) if fields.code in (DO_SCAN, DO_SETTLE) else (step,)
