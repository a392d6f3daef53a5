"""The scorer for GPUs, on a CPU: its kernels in Triton's interpreter, its graphs by running a pass again."""

import inspect
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

pytest.importorskip("triton", reason="Triton is not installed")

from support import tiny
from support.triton_products import interpret_products, interpret_quickly
from support.wait_counter import WaitCounter

from benchmarks.gpu.interpreter import RunAgain
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.core.sampling import Salt, Sampler
from forerun.core.tree import ROOT, DraftTree
from forerun.decoding import device_chain
from forerun.decoding.row import Row
from forerun.engine.engine import Engine
from forerun.kernels import gpu
from forerun.kernels.gpu import attend, decoder_ops, linear, token_choice
from forerun.kv.full_cache import FullCache
from forerun.kv.kv_tiers import KVMemory, Tiers, min_device_bytes
from forerun.models.forward import cuda_graphs, gate, gpu_scorer
from forerun.models.forward.gate import admit
from forerun.models.forward.gpu_forward import library_product
from forerun.models.forward.gpu_scorer import GpuScorer
from forerun.models.forward.scorer import Scorer
from forerun.models.text.processors import of_row

pytestmark = pytest.mark.matrix  # Triton's interpreter is slow

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 61, "max_position_embeddings": 24,
}  # fmt: skip
CPU, ROOM = torch.device("cpu"), 1024
TREE = DraftTree(np.arange(6), np.array([ROOT, ROOT, 0, 1, 3, 3]))
TEXT = np.random.default_rng(0).integers(0, 61, 24)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take the way of GPUs on a CPU; the passes that were recorded."""
    recorded, record = list[int](), RunAgain.record
    interpret_products(monkeypatch)
    interpret_quickly(monkeypatch)
    monkeypatch.setattr(RunAgain, "record", lambda self, work: recorded.append(1) or record(self, work))
    monkeypatch.setattr(gpu, "runs_on", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "Recorder", RunAgain)
    monkeypatch.setattr(GpuScorer, "warm_up", lambda *_: None)  # its passes take the interpreter seconds
    return recorded


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}), "qwen2": ("Qwen2", {}), "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3", {"pad_token_id": 0}), "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0}),
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "mla": ("DeepseekV3",
        {"num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 8, "first_k_dense_replace": 1}),
}  # fmt: skip
"""Models whose own code runs; heads of keys and of values differ in ``mla``."""


def model(kind: str = "llama", dtype: torch.dtype = torch.float32, layers: int = 1) -> Any:
    torch.manual_seed(0)
    name, more = (FAMILIES | OTHERS)[kind]
    config = getattr(transformers, f"{name}Config")(**SMALL | more | {"num_hidden_layers": layers})
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()


def read(scorer: Scorer, count: int) -> FullCache:
    cache = FullCache()
    block = Block(TEXT[:count], DraftTree.empty(), 0)
    scorer.score([block], [cache])
    cache.commit(block, [])
    return cache


CELLS = [(kind, torch.float32) for kind in FAMILIES | OTHERS]
CELLS += [(kind, torch.bfloat16) for kind in ("llama", "gpt-neox")]


@pytest.mark.parametrize(("kind", "dtype"), CELLS)
@torch.inference_mode()
def test_logits_are_the_models(on_gpu, kind, dtype):
    own = model(kind, dtype)
    scorer = admit(own)
    assert type(scorer) is GpuScorer
    assert (scorer._program.decoder is not None) == (kind in FAMILIES)
    assert scorer._program.layers is not None
    trees = [TREE, DraftTree.chain(np.arange(3)), DraftTree.empty()]
    counts = [15, 7, 10]
    caches = [read(scorer, count) for count in counts]
    blocks = [Block(TEXT[count : count + 1], tree, count) for count, tree in zip(counts, trees, strict=True)]
    found = scorer.score(blocks, caches)
    plain = Scorer(own)
    for block, count, logits in zip(blocks, counts, found, strict=True):
        cache = FullCache()
        whole = Block(TEXT[: count + 1], block.tree, 0)
        (right,) = plain.score([whole], [cache])
        torch.testing.assert_close(logits.float(), right.float(), atol=2e-5 if dtype == torch.float32 else 2e-2, rtol=0)


@pytest.mark.parametrize("name", ["gemma4", "mimo_v2_flash", "gpt_oss", "phi3, longrope"])
@torch.inference_mode()
def test_layers_that_differ_have_tables(on_gpu, name):
    """Heads of several sizes, several numbers of KV heads, sinks, and angles from a table: right over a draft tree."""
    scorer = GpuScorer(tiny.build(*tiny.FAMILIES[name], seed=1).float())
    tables = scorer._program.layers
    assert tables.uniform == (name not in ("gemma4", "mimo_v2_flash"))
    assert gate._reason_in_numbers(scorer) is None


@torch.inference_mode()
def test_hidden_states(on_gpu):
    own, layers = model(), (0, 1)
    scorer = GpuScorer(own)
    [(_, found, _)] = scorer.score_rows([Block(TEXT[:9], DraftTree.empty(), 0)], [FullCache()], layers)
    right = own(input_ids=torch.tensor(TEXT[None, :9]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(found, torch.cat([right[layer][0] for layer in layers], -1), atol=2e-5, rtol=0)


@torch.inference_mode()
def test_each_kind_of_recordings_keeps_its_spare_memory(on_gpu):
    """Recorded tables hold its address."""
    scorer = GpuScorer(model())
    for _ in range(2):
        scorer.score([Block(TEXT[:3], DraftTree.empty(), 0)], [FullCache()])
        scorer.score_rows([Block(TEXT[:3], DraftTree.empty(), 0)], [FullCache()], (1,))
    plain, with_states = scorer._program.graphs.values()
    assert plain._spare.data_ptr() != with_states._spare.data_ptr()
    for graphs in (plain, with_states):
        for recording in graphs._kept.values():
            spare = recording.places.addresses[:, 1]  # behind the one row of the pass
            assert spare.unique().tolist() == sorted(t.data_ptr() for t in graphs._spare)


def test_weights_that_are_joined_stay_where_they_are(on_gpu):
    """A second scorer of a model moves nothing, so that the first one need not begin anew."""
    own = model()
    before = {name: weight.clone() for name, weight in own.state_dict().items()}
    first = GpuScorer(own)
    version = first.refresh()
    GpuScorer(own)
    assert first.refresh() == version
    assert all(torch.equal(before[name], weight) for name, weight in own.state_dict().items())
    part = own.model.layers[0].self_attn
    assert part.k_proj.weight.data_ptr() == part.q_proj.weight.data_ptr() + part.q_proj.weight.nbytes


def query(own: Any) -> torch.nn.Parameter:
    return own.model.layers[0].self_attn.q_proj.weight


COPIES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "matrices that were joined": ("llama", lambda own: query(own).data.mul_(3)),
    "one of them that moved": ("llama", lambda own: setattr(query(own), "data", query(own).data * 3)),
    "norms' epsilon": ("llama", lambda own: setattr(own.model.norm, "variance_epsilon", 3.0)),
    "angles": ("llama", lambda own: own.model.rotary_emb.inv_freq.data.mul_(3)),
    "the embedding's multiplier": ("granite", lambda own: setattr(own.model, "embedding_multiplier", 0.1)),
}
"""What passes on a GPU have of a model: a model, and a change that torch does not count."""


@pytest.mark.parametrize("copied", COPIES)
@torch.inference_mode()
def test_what_a_recorded_pass_has_of_a_model_follows(on_gpu, copied):
    kind, change = COPIES[copied]
    own = model(kind)
    for weight in own.parameters():
        weight.data.mul_(5)
    scorer = GpuScorer(own)
    scorer.refresh()

    def found() -> torch.Tensor:
        for _ in range(2):
            (logits,) = scorer.score([Block(TEXT[:5], DraftTree.chain(TEXT[5:8]), 0)], [FullCache()])
        return logits.clone()

    before, recorded = found(), scorer.recordings
    assert recorded
    change(own)
    scorer.refresh()
    assert scorer.recordings == (recorded if copied == "matrices that were joined" else 0)
    after = found()
    (right,) = Scorer(own).score([Block(TEXT[:5], DraftTree.chain(TEXT[5:8]), 0)], [FullCache()])
    torch.testing.assert_close(after, right, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(before, after, atol=1e-2)


class Launches:
    """Runs no kernel, and notes what Triton compiles anew for: constants, and which integers and pointers are multiples
    of 16, or 1."""

    def __init__(self, kernel: Any, seen: set[Any]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        parameters = inspect.signature(self.kernel.fn).parameters.items()
        fixed = [name for name, parameter in parameters if "constexpr" in str(parameter.annotation)]
        free = self.kernel.kwargs.get("do_not_specialize") or ()

        def launch(*arguments: Any, **options: Any) -> None:
            given = dict(zip(self.kernel.arg_names, arguments, strict=False))
            kinds = [value if name in fixed else _kind(value) for name, value in given.items() if name not in free]
            self.seen.add((self.kernel.fn.__name__, *kinds))

        return launch


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return (value == 1, value % 16 == 0, value >= 2**31) if isinstance(value, int) else float


@pytest.mark.parametrize("kind", ["llama", "qwen3", "olmo2", "gpt-neox"])
@torch.inference_mode()
def test_no_kernel_is_compiled_in_the_middle(kind, on_gpu, monkeypatch):
    """Passes of all sizes and rows, beyond those that were seen first, need no further variant of a kernel."""
    seen: set[Any] = set()
    for module, names in ((attend, ("_scan", "_combine", "_store")), (linear, ("_sums", "_total", "_mean")),
                          (decoder_ops, ("_add_norm", "_rotate_and_store", "_gate", "_norm_columns")),
                          (token_choice, ("_choose", "_choose_block"))):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, Launches(getattr(module, name), seen))
    monkeypatch.setattr(cuda_graphs, "RECORDED_TOKENS", 0)
    scorer = GpuScorer(model(kind))
    caches = [read(scorer, 8), read(scorer, 5)]

    def score(sizes: tuple[int, ...]) -> None:
        blocks = [
            Block(TEXT[cache.length : cache.length + 1], DraftTree.chain(np.arange(size)), cache.length)
            for size, cache in zip(sizes, caches, strict=False)
        ]
        scorer.score(blocks, caches[: len(sizes)])

    for sizes in ((0,), (10,), (3, 2)):
        score(sizes)
    known = set(seen)
    for sizes in ((1,), (2,), (5,), (7,), (12,), (0, 0), (1, 1), (6, 1), (4, 9)):
        score(sizes)
    assert seen == known


def test_a_prompt_is_read_by_libraries_and_its_bits_do_not_depend_on_drafts(on_gpu, monkeypatch):
    """Whole chunks are read alone; also where chunks of two prompts and a decoding row share a step."""
    monkeypatch.setattr(gpu_scorer, "PROMPT_CHUNK_TOKENS", 4)
    read: list[int] = []
    monkeypatch.setattr(gpu_scorer, "library_product", lambda x, w: (read.append(len(x)), library_product(x, w))[1])
    prompts = [torch.tensor(TEXT[None, :11]), torch.tensor(TEXT[None, [3, 4, 5] * 2])]
    texts = {}
    for drafter in ("none", "trie"):
        engine = Engine(model(), drafter)
        assert engine.target.prompt_chunk == 4
        read.clear()
        alone = [engine.generate(prompt, max_new_tokens=6).generated for prompt in prompts]
        assert set(read) == {4}
        assert len(read) == 4 * 3  # products of a layer, times chunks
        together = engine.generate([prompt[0].tolist() for prompt in prompts], max_new_tokens=6).generated
        texts[drafter] = [alone, [[own] for own in together]]
    assert texts["none"] == texts["trie"]
    assert texts["none"][0] == texts["none"][1]


@torch.inference_mode()
def test_recorded_passes_have_the_same_bits(on_gpu):
    """Sizes are rounded up: what fills them up changes nothing."""
    scorer = GpuScorer(model())
    caches = [read(scorer, 14), read(scorer, 9)]
    blocks = [Block(TEXT[14:15], TREE, 14), Block(TEXT[9:10], DraftTree.chain(np.arange(4)), 9)]
    on_gpu.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "RECORDED_TOKENS", 0)
        first = scorer.score(blocks, caches)
    assert not on_gpu
    again = scorer.score(blocks, caches)
    assert len(on_gpu) == 1
    other = [Block(TEXT[14:15], DraftTree.chain(TEXT[15:20]), 14), Block(TEXT[9:10], TREE, 9)]
    scorer.score(other, caches)
    last = scorer.score(blocks, caches)
    assert len(on_gpu) == 1
    for one, two, three in zip(first, again, last, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.parametrize("kind", ["llama", "gpt-neox"])
@torch.inference_mode()
def test_rows_off_the_device_share_the_program_and_its_bits(on_gpu, kind, monkeypatch):
    """Beside a row that is all on the device; what was accepted of a tree is where it belongs."""
    scorer = GpuScorer(model(kind, layers=3))
    kv = scorer.kv
    monkeypatch.setattr(Scorer, "_pass", lambda *_: pytest.fail("a pass went row by row"))
    with closing(Tiers(KVMemory(min_device_bytes(kv, ROOM)), CPU, kv, torch.float32)) as tiers:
        caches = [tiers.cache(ROOM), FullCache(ROOM)]
        assert caches[0].offloaded
        found = []
        for start, count, tree, path in ((0, 9, DraftTree.empty(), []), (9, 1, TREE, [1, 3, 5]), (13, 2, TREE, [0])):
            blocks = [Block(TEXT[start : start + count], tree, start) for _ in caches]
            found.append(scorer.score(blocks, caches))
            for cache, block in zip(caches, blocks, strict=True):
                cache.commit(block, path)
        assert all(torch.equal(away, here) for away, here in found)
        assert caches[0].lost is None
        for layer in range(3):
            for away, here in zip(*(cache.read(layer, 0, 16) for cache in caches), strict=True):
                assert torch.equal(away, here)


@torch.inference_mode()
def test_an_offloaded_prompt_is_read_by_libraries(on_gpu, monkeypatch):
    monkeypatch.setattr(gpu_scorer, "PROMPT_CHUNK_TOKENS", 4)
    scorer = GpuScorer(model(layers=3))
    with closing(Tiers(KVMemory(min_device_bytes(scorer.kv, ROOM)), CPU, scorer.kv, torch.float32)) as tiers:
        caches, found = [tiers.cache(ROOM), FullCache(ROOM)], []
        assert caches[0].offloaded
        for cache in caches:
            for start in (0, 4):
                block = Block(TEXT[start : start + 4], DraftTree.empty(), start, whole_chunk=True)
                (logits,) = scorer.score([block], [cache])
                cache.commit(block, [])
            found.append(logits)
    assert torch.equal(*found)


def test_drafts_change_no_bit(on_gpu):
    """The probe finds it, and so do texts: greedy and sampled, alone and with other rows."""
    prompts = [torch.tensor(TEXT[None, :12]), torch.tensor(TEXT[None, [3, 4, 5] * 3])]
    engine = Engine(model(), "none")
    assert engine.exactness.level == "bitwise"
    texts: dict[str, list[Any]] = {}
    for drafter in ("none", "trie", "retrieval"):
        engine.set_drafter(drafter, LongContextConfig(cache_budget=6, chunk=2, gamma2=3, paced=False))
        results = [engine.generate(prompt, max_new_tokens=8) for prompt in prompts]
        results += [engine.generate(prompts[0], max_new_tokens=6, do_sample=True, temperature=0.8, seed=3)]
        texts[drafter] = [result.generated for result in results]
        assert any(sum(result.stats[0].accepted) for result in results) == (drafter != "none")
    assert texts["trie"] == texts["retrieval"] == texts["none"]


@pytest.mark.parametrize("method", ["coupled", "rejection"])
@torch.inference_mode()
def test_a_recorded_pass_chooses_sampled_tokens(on_gpu, method):
    """Over temperatures, seeds and a row that cuts its distribution too: a chain has the tokens, and the ``q``, that
    single passes and the host's sampler have."""
    own = model()
    processors = [[], [TemperatureLogitsWarper(0.4)], [TemperatureLogitsWarper(1.7)], [TopKLogitsWarper(5)]]
    samplers = [Sampler(method, 7 * row, of_row(each, own)).inner() for row, each in enumerate(processors)]
    samplers += [Sampler(), replace(samplers[1], seed=1 << 60, salt=Salt.DRAFT)]
    scorer, lengths = GpuScorer(own), [9, 14, 5, 11, 6, 9]
    requests = [Request(TEXT[:n], 8, sampler=each) for n, each in zip(lengths, samplers, strict=True)]
    rows = [Row(request, read(scorer, len(request) - 1)) for request in requests]
    on_gpu.clear()
    pieces = device_chain.draft(scorer, rows, 3, False)
    assert len(on_gpu) == 1
    for request, piece in zip(requests, pieces, strict=True):
        cache, sampler, q = read(scorer, len(request) - 1), request.sampler, []
        for turn in range(3):
            at = len(request) - 1 + turn
            last = np.array(piece.tokens[turn - 1 : turn], np.int64) if turn else request.tokens[-1:]
            block = Block(last, DraftTree.empty(), at)
            [logits] = scorer.score([block], [cache])
            cache.commit(block, [])
            scores = sampler.scores(torch.zeros(0, dtype=torch.int64), logits[0])
            q.append(scores.double().softmax(-1))
            assert piece.tokens[turn] == sampler.choose(scores, at + 1)
        kept = q if sampler.method == "rejection" else []
        assert len(piece.q) == len(kept) and all(map(torch.equal, piece.q, kept))


@pytest.mark.parametrize("drafter", ["none", "trie", "retrieval", "triforce-trie"])
def test_a_step_waits_for_one_transfer(drafter, on_gpu, monkeypatch):
    """Whole texts, whose passes are recorded or not: a step waits once, and so does a drafting pass. Nothing else does,
    neither a pass, nor a choice of chunks."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    settings = LongContextConfig(cache_budget=6, chunk=2, gamma2=3, sparse="retrieval", paced=False)
    engine = Engine(model(), drafter, settings=settings, prune_drafts=False)
    passes, one_pass = [], GpuScorer._pass
    monkeypatch.setattr(GpuScorer, "_pass", lambda *given: (passes.append(1), one_pass(*given))[1])
    requests = engine.requests(torch.tensor(TEXT[None, [3, 4, 5] * 4]), max_new_tokens=8, eos_token_id=None)
    with WaitCounter(CPU) as waits:
        list(engine.run(requests))
    steps, transfers = requests[0].stats.steps, waits.counts["transfers"]
    assert set(waits.reads) == {"cpu"} and set(waits.counts) == {"transfers"}
    assert steps < len(passes) if drafter in ("retrieval", "triforce-trie") else steps == transfers
    assert steps <= transfers <= len(passes)
