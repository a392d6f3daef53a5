"""States of recurrent layers have the bits of token-by-token reading, whatever was drafted, cut, forked or stored."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.recurrent.gated_states import BEFORE, GatedShape, TokenOrder
from forerun.kv.recurrent import KEPT_INPUTS, MAX_INPUTS, MAX_SNAPSHOTS, SNAPSHOT_TOKENS, RecurrentStates

SHAPE = GatedShape(1, 2, 4, 4, 1, True, True, 0.5)
CHANNELS, TAPS = 6, 4
TEXT = np.random.default_rng(0).integers(0, 50, 700)
CPU = torch.device("cpu")


def outputs(states: RecurrentStates, block: Block) -> torch.Tensor:
    """What two layers give for a block whose inputs depend on tokens alone, ``[n, CHANNELS + 8]``."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(50, CHANNELS + SHAPE.row_width + SHAPE.dim, generator=generator)
    weights = torch.randn(TAPS, CHANNELS, generator=generator)
    x, rows, q = table[block.tokens].split([CHANNELS, SHAPE.row_width, SHAPE.dim], 1)
    rows[:, -4:-2] = -rows[:, -4:-2].abs()  # gates are logarithms of decays
    convolved = states.convolve(0, x.contiguous(), weights, None, block)
    advanced = states.advance(1, SHAPE, rows.contiguous(), q.contiguous()[:, None], block)
    return torch.cat((convolved, advanced.flatten(1)), 1)


def read(states: RecurrentStates, text: Sequence[int], chunk: int = 1) -> torch.Tensor:
    """Read the rest of a text in chunks; its last token's outputs."""
    last = torch.empty(0)
    while states.length < len(text):
        block = Block(np.array(text[states.length : states.length + chunk]), DraftTree.empty(), states.length)
        last = outputs(states, block)[-1]
        states.commit(block, [])
    return last


def one_by_one(text: Sequence[int]) -> torch.Tensor:
    return read(RecurrentStates(), text)


def with_drafts(states: RecurrentStates, text: Sequence[int], rng: np.random.Generator) -> torch.Tensor:
    """Read the rest of a text by trees that hold some of it among wrong siblings."""
    uncommitted = Block(TEXT[: rng.integers(1, 200)], DraftTree.chain([1, 2]), states.length)
    outputs(states, uncommitted)  # without a trace
    while states.length < len(text) - 1:
        here = text[states.length :]
        right = here[1 : 1 + rng.integers(0, min(6, len(here) - 1))]
        wrong = [((np.array(right[:cut]) + (np.arange(cut) == cut - 1)) % 50).tolist() for cut in range(len(right) + 1)]
        branches = [*wrong, list(right)]
        tree = DraftTree.from_branches([branches[i] for i in rng.permutation(len(branches))], 32)
        path, node = [], -1
        for token in right:
            node = tree.children[node, int(token)]
            path.append(node)
        block = Block(np.array(here[:1]), tree, states.length)
        outputs(states, block)
        states.commit(block, path)
    return read(states, text)


def snapshots(states: RecurrentStates) -> list[int]:
    """The positions of the snapshots that are saved."""
    return sorted({int(name.partition(".")[0]) for name in states.saved_state(10_000)})


@given(st.integers(0, 1000), st.integers(2, 90))
def test_drafts_and_chunks_leave_the_bits_of_reading_one_by_one(seed, length):
    rng, states = np.random.default_rng(seed), RecurrentStates()
    read(states, TEXT[: rng.integers(0, length)], int(rng.integers(1, 100)))
    assert torch.equal(with_drafts(states, TEXT[:length], rng), one_by_one(TEXT[:length]))


@given(st.integers(0, 1000), st.integers(3, 160))
def test_a_text_that_was_cut_goes_on_with_the_same_bits(seed, length):
    rng, states = np.random.default_rng(seed), RecurrentStates()
    text = TEXT[:length] * 0 + 3 if seed % 3 == 0 else TEXT[:length]
    with_drafts(states, text, rng)
    goal = int(rng.integers(0, length + 1))
    left = states.truncate(goal)
    assert left == states.length <= goal
    if length - goal <= SNAPSHOT_TOKENS:
        assert left == goal
    other = np.concatenate((text[:left], TEXT[100:150]))
    assert torch.equal(with_drafts(states, other, rng), one_by_one(other))


@pytest.mark.parametrize("cut", [1270, 1100])
def test_a_long_text_that_was_cut_far_behind_a_snapshot_goes_on_with_the_same_bits(cut):
    """More tokens have to be read into the state than inputs are kept as a rule."""
    text, states = np.resize(TEXT, 1501), RecurrentStates()
    read(states, text, 512)
    assert states.truncate(cut) == cut
    other = np.concatenate((text[:cut], TEXT[100:140]))
    assert torch.equal(read(states, other, 104), one_by_one(other))


def test_a_draft_that_is_longer_than_the_inputs_that_are_kept_goes_on_with_the_same_bits():
    states, drafted = RecurrentStates(), KEPT_INPUTS + 30
    read(states, TEXT[:10])
    block = Block(TEXT[10:11], DraftTree.chain(TEXT[11 : 11 + drafted]), 10)
    outputs(states, block)
    states.commit(block, range(drafted))
    assert torch.equal(read(states, TEXT[:700], MAX_INPUTS), one_by_one(TEXT[:700]))


def test_a_fork_and_its_origin_go_on_independently():
    rng, states = np.random.default_rng(2), RecurrentStates()
    with_drafts(states, TEXT[:150], rng)
    fork = states.fork()
    for one, other in ((states, fork), (fork, states)):
        assert one.length == 150
        for text in (np.concatenate((TEXT[:150], TEXT[:9])), np.concatenate((TEXT[:150], TEXT[50:60]))):
            assert torch.equal(with_drafts(one, text, rng), one_by_one(text))
            assert one.truncate(150) == 150
        assert other.length == 150


def test_stored_snapshots_go_on_with_the_same_bits():
    states = RecurrentStates()
    read(states, TEXT[:500], 120)
    stored = states.saved_state(400)
    again = RecurrentStates().beginning({name: t.clone() for name, t in stored.items()}, 390)
    assert again.length == 384
    assert torch.equal(read(again, TEXT[:600], 50), one_by_one(TEXT[:600]))
    assert RecurrentStates().beginning({}, 390).length == 0


def test_there_are_few_snapshots_of_a_long_text_and_the_last_ones_are_close():
    states = RecurrentStates()
    read(states, np.resize(TEXT, 20 * SNAPSHOT_TOKENS), 100)
    positions = snapshots(states)
    assert positions[-2:] == [19 * SNAPSHOT_TOKENS, 20 * SNAPSHOT_TOKENS]
    assert len(positions) <= MAX_SNAPSHOTS + 2 and positions[0] <= 4 * SNAPSHOT_TOKENS


def test_snapshots_stay_where_messages_begin_and_are_no_more_for_it():
    text, turns = np.resize(TEXT, 40 * SNAPSHOT_TOKENS + 10), [0, 70, 700, 1000, 1100, 1300, 1500, 1990, 2100, 2500]
    states = RecurrentStates()
    states.keep_at(turns)
    read(states, text, 100)
    positions = snapshots(states)
    assert {64, 640, 1472, 1984, 2048, 2496} <= set(positions) and len(positions) <= MAX_SNAPSHOTS + 2
    again = states.beginning(states.saved_state(10_000), 2200)  # as a prompt begins that was changed in its last turn
    assert again.length == 2048
    other = np.concatenate((text[:2200], text[:900]))
    assert torch.equal(read(again, other, 50), one_by_one(other))
    positions = snapshots(again)
    assert {64, 640, 1472, 1984, 2048} <= set(positions) and len(positions) <= MAX_SNAPSHOTS + 2


def test_a_model_that_was_cast_and_a_block_somewhere_else_are_refused():
    """States are float32 for models of several types, so they do not show it themselves."""
    states, rows, q = RecurrentStates(), torch.zeros(1, SHAPE.row_width), torch.zeros(1, 1, SHAPE.dim)
    with pytest.raises(ValueError, match="the block starts at 5, but the states have 0 tokens"):
        outputs(states, Block(TEXT[:3], DraftTree.empty(), 5))
    first, second = (Block(TEXT[n : n + 1], DraftTree.empty(), n) for n in range(2))
    states.advance(1, SHAPE, rows, q, first)
    states.commit(first, [])
    with pytest.raises(ValueError, match=r"torch.float32 rows, but the model's are torch.bfloat16"):
        states.advance(1, SHAPE, rows, q.bfloat16(), second)
    states.advance(1, SHAPE, rows, q, second)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40))
def test_no_state_is_overwritten_before_its_last_child_has_read_it(numbers):
    parents = np.array([number % (i + 1) - 1 for i, number in enumerate(numbers)])
    order, held = TokenOrder.of(parents, {}, CPU), dict[int, int]()
    for token, (source, place, _) in enumerate(order.table.tolist()):
        parent = int(parents[token])
        assert source == BEFORE if parent < 0 else held[source] == parent
        held[place] = token
    assert order.places <= len(numbers)
    assert TokenOrder.of(np.arange(-1, 49), {}, CPU).places == 1  # of a chain
