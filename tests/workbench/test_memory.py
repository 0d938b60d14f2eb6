"""Memory in words, tables and bytes: what the pictures of KV memory say is what the records say."""

import json
from dataclasses import replace

import pytest

from pdlab import Engine, EngineConfig, SamplingParams, Trace
from pdlab.trace.records import DROPPED
from pdlab.workbench import BlockTableView, MemoryLedger, Stepper, figures, memory_ledger
from pdlab.workbench.block_frames import block_frames
from pdlab.workbench.memory_data import (
    block_bytes,
    block_owners,
    cached_free_blocks,
    kv_capacity_bytes,
    ledger,
)
from pdlab.workbench.memory_events import NOTHING, memory_events, name_blocks
from pdlab.workbench.sequences import sequence_ids

from ..helpers import random_model, random_prompt
from .handmade import KV_BYTES, two_requests
from .handmade_memory import memory_moves

POOL, HOST, SIZE = 12, 6, 4


@pytest.fixture(scope="module")
def moves() -> Trace:
    return memory_moves()


# --- bytes ---------------------------------------------------------------------------------------


def test_ledger_adds_up_to_both_pools(moves: Trace, recorded: Trace) -> None:
    for trace in (moves, recorded, two_requests()):
        for record in trace.steps:
            book = ledger(trace, record)
            assert book.pool == kv_capacity_bytes(trace)
            assert min(book.used, book.wasted, book.cached, book.free, book.host_free) >= 0
            held = len(block_owners(trace, record))
            assert book.used + book.wasted == held * block_bytes(trace)
            assert book.host == trace.engine.get("num_swap_blocks", 0) * block_bytes(trace)


def test_ledger_of_a_step_counts_what_its_tables_say(moves: Trace) -> None:
    """Step 4: r0.1 holds 18 tokens in 5 blocks, r2 8 in 2; 2 blocks cached, 4 swapped, 3 free."""
    book = ledger(moves, moves.steps[4])
    slot, block = KV_BYTES, SIZE * KV_BYTES
    assert (book.used, book.wasted) == (26 * slot, 2 * slot)
    assert (book.cached, book.free) == (2 * block, 3 * block)
    assert (book.swapped, book.host_free) == (4 * block, 2 * block)
    assert (book.shared, book.open) == (0, 0)
    assert ledger(moves, moves.steps[1]).shared == (3 + 2) * block  # r0.1 shares 3, r1 shares 2


def test_blocks_that_a_finished_sequence_keeps_cached_count_once(moves: Trace) -> None:
    record = moves.steps[3]
    assert record.cached_blocks == [4]
    assert cached_free_blocks(record) == []  # r0 still holds it while the step runs


def test_memory_ledger_sends_the_ledger_of_every_step(moves: Trace) -> None:
    widget = MemoryLedger(moves, step=4)
    for record, frame in zip(moves.steps, widget.frames, strict=True):
        assert {k: frame[k] for k in ledger(moves, record)._fields} == ledger(
            moves, record
        )._asdict()
        parts = ("used", "wasted", "others", "cached", "free")
        assert sum(frame[k] for k in parts) == widget.header["pool"] == POOL * SIZE * KV_BYTES
        assert frame["swapped"] + frame["host_free"] == widget.header["host"]
        assert frame["activations_total"] == record.activation_total_bytes
    assert widget.frame["title"] == (
        "2 sequences hold 58% of the KV pool; 7% of that is empty slots"
    )
    assert "67% of host memory holds swapped blocks." in widget.frame["note"]
    assert json.loads(json.dumps(widget.frames)) == widget.frames


def test_memory_ledger_says_what_was_not_measured(recorded: Trace) -> None:
    steps = [replace(r, activation_peak_bytes=None) for r in recorded.steps]
    frames = MemoryLedger(replace(recorded, steps=steps)).frames
    assert {frame["activations"] for frame in frames} == {None}
    assert MemoryLedger(recorded).header["weights"] == recorded.model["weight_bytes"]


def test_long_ledgers_are_cut_and_say_so(moves: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_ledger, "MAX_FRAMES", 5)
    widget = MemoryLedger(moves, step=99)
    assert (len(widget.frames), widget.header["cut"], widget.step) == (5, 7, 4)


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (0, "r0.1 forks from r0 and shares its 4 blocks: nothing copied."),
        (1, "r1 found 2 blocks (8 tokens) in the prefix cache, shared with r0 and r0.1."),
        (1, "Block 3 was shared by r0 and r0.1; r0 wrote: copied to block 4."),
        (2, NOTHING),
        (3, "r0 finished (2 blocks given back; 1 of them still holds a cached prefix)."),
        (4, "r1 was swapped out: its K and V went to host blocks 0–3."),
        (4, "r2 took blocks 9–10."),
        (6, "r2 gave blocks 9–10 back: no query will see them again."),
        (7, "r1 came back from host memory into blocks 8, 4–5 and 3."),
        (7, "Blocks 4–5 and 3 had to be evicted: their cached prefixes are gone."),
        (8, "r2 was preempted: it gave 3 blocks back, and will compute them again."),
        (9, "r2 found 4 blocks (16 tokens) in the prefix cache."),
        (9, "Block 2 had to be evicted: its cached prefix is gone."),
    ],
)
def test_captions_say_what_a_step_did_to_memory(moves: Trace, step: int, sentence: str) -> None:
    assert sentence in memory_events(moves, step)


def test_what_was_found_is_not_called_evicted(moves: Trace) -> None:
    """Step 9 finds blocks 9, 10, 11 and 7 in the cache, and evicts block 2 alone."""
    evictions = [e for e in memory_events(moves, 9) if "evicted" in e]
    assert evictions == ["Block 2 had to be evicted: its cached prefix is gone."]


def test_runs_of_blocks_are_named_short() -> None:
    assert name_blocks([7]) == "block 7"
    assert name_blocks([3, 4, 5, 9]) == "blocks 3–5 and 9"
    assert name_blocks([1, 3, 5], "host block") == "host blocks 1, 3 and 5"


# --- tables --------------------------------------------------------------------------------------


def test_block_frames_repeat_the_tables(moves: Trace, recorded: Trace) -> None:
    for trace in (moves, recorded):
        for record, frame in zip(trace.steps, block_frames(trace), strict=True):
            assert {t["id"]: (t["blocks"], t["computed"]) for t in frame["tables"]} == {
                r.sequence_id: (r.block_table, r.num_computed_tokens) for r in record.residents
            }
            assert {t["id"]: t["blocks"] for t in frame["host"]} == record.swapped
            assert frame["num_free"] == record.num_free_blocks
            assert frame["moves"] == [list(move) for move in record.moves]


def test_swapped_sequences_keep_their_tokens_and_their_hits(moves: Trace) -> None:
    frames = block_frames(moves)
    (host,) = frames[5]["host"]
    assert (host["id"], host["computed"]) == ("r1", 15)
    back = next(t for t in frames[7]["tables"] if t["id"] == "r1")
    assert back["hits"] == [0, 2]
    assert frames[5]["waiting"] == []


def test_recomputing_forgets_old_hits_and_marks_new_ones(moves: Trace) -> None:
    tables = [{t["id"]: t for t in frame["tables"]} for frame in block_frames(moves)]
    assert tables[7]["r2"]["hits"] == [0, 0]
    assert "r2" not in tables[8]
    assert tables[9]["r2"]["hits"] == [0, 4]


def test_dropped_blocks_stay_in_their_place(moves: Trace) -> None:
    table = next(t for t in block_frames(moves)[6]["tables"] if t["id"] == "r2")
    assert table["blocks"][:2] == [DROPPED, DROPPED]
    assert "-1" not in BlockTableView(moves, 6).summary()


def test_next_blocks_are_those_the_next_step_takes(moves: Trace) -> None:
    frames = block_frames(moves)
    assert frames[0]["next_taken"] == frames[1]["new"] == [4, 5, 6]
    assert frames[5]["evict_first"] == [4]
    assert frames[-1]["next_taken"] == []


def test_block_table_view_is_moved_from_python(moves: Trace) -> None:
    widget = BlockTableView(moves, step=1, selected=("r1", 1))
    assert widget.selected == ["r1", 1]
    assert widget.frame["step"] == 1
    assert widget.summary().startswith("Block tables, engine step 1: 7 of 12 blocks are held.")
    widget.step = 10_000
    assert widget.step == len(moves.steps) - 1
    widget.step = -4
    assert widget.step == 0


def test_views_of_an_empty_trace_say_so() -> None:
    for view in (BlockTableView, MemoryLedger):
        with pytest.raises(ValueError, match="holds no step"):
            view(Trace())


# --- the Stepper ---------------------------------------------------------------------------------


def test_stepper_of_a_fork_begins_where_its_parent_was(moves: Trace) -> None:
    widget = Stepper(moves, "r0.1")
    assert [f["kind"] for f in widget.frames[:3]] == ["tokenize", "fork", "decode"]
    fork = widget.frames[1]
    assert fork["title"] == "Forks from r0 and draws its own first token"
    assert (fork["computed"], fork["cached"], fork["start"], fork["end"]) == (14, 14, 14, 14)
    assert (fork["sampled"], fork["known"]) == (14, 15)
    assert widget.tokens[14][0] == moves.output_ids("r0.1")[0]
    assert [s["id"] for s in widget.header["sequences"]] == ["r0", "r0.1", "r1", "r2"]


def test_stepper_of_a_swapped_sequence_keeps_what_was_computed(moves: Trace) -> None:
    frames = {f["step"]: f for f in Stepper(moves, "r1").frames[1:]}
    assert [frames[i]["kind"] for i in (3, 4, 5, 6, 7)] == [
        "decode",
        "swapped",
        "swapped",
        "swapped",
        "decode",
    ]
    assert {frames[i]["computed"] for i in (3, 4, 5, 6)} == {15}
    assert frames[1]["cached"] == frames[7]["cached"] == 8
    assert "8 tokens before them came from the prefix cache" in frames[1]["note"]


def test_stepper_of_a_preempted_sequence_forgets_its_cached_tokens(moves: Trace) -> None:
    frames = {f["step"]: f for f in Stepper(moves, "r2").frames[1:]}
    assert (frames[8]["kind"], frames[8]["computed"], frames[8]["cached"]) == ("preempted", 0, 0)
    assert frames[9]["cached"] == 16


# --- real engines --------------------------------------------------------------------------------

CONFIGS = {
    "roomy": {"num_blocks": 40},
    "swap": {"num_swap_blocks": 16, "preemption": "swap"},
    "recompute": {"preemption": "recompute"},
    "no cache": {"enable_prefix_cache": False},
    "window": {"window": 8, "sink_tokens": 4},
    "heavy": {"window": 8, "heavy_tokens": 8, "enable_prefix_cache": False},
    "int8": {"kv_format": "int8"},
    "KIVI": {"kv_format": "int4:channel/int4:token:8"},
}


@pytest.fixture(scope="module", params=CONFIGS)
def run(request: pytest.FixtureRequest) -> tuple[str, Trace, int]:
    """What was asked for, the trace, and the bytes of the KV tensors."""
    config = EngineConfig(
        **{"block_size": 4, "num_blocks": 16, "chunk_size": 16, "max_num_seqs": 6}
        | CONFIGS[request.param]
    )
    base, params = random_prompt(24), SamplingParams(max_tokens=16, ignore_eos=True)
    samples = 1 if request.param == "heavy" else 2
    forked = replace(params, n=samples, temperature=0.8, seed=1)
    with Engine(random_model(), config) as engine:
        engine.submit(base[:14], forked)
        engine.step()
        engine.step()
        prompts = [[*base, 3, 4], random_prompt(19, seed=5), base[:8]]
        engine.generate(prompts, params)
        assert engine.kv_cache is not None
        return request.param, engine.trace, engine.kv_cache.nbytes


def test_ledger_of_a_real_run_is_the_tensors_bytes(run: tuple[str, Trace, int]) -> None:
    _, trace, num_bytes = run
    for record in trace.steps:
        book = ledger(trace, record)
        assert book.pool + book.open == num_bytes
        assert min(book.used, book.wasted, book.cached, book.free, book.host_free) >= 0
        assert book.used + book.wasted == len(block_owners(trace, record)) * block_bytes(trace)
    assert book.weights == random_model().weight_bytes


def test_every_picture_of_memory_can_be_drawn_of_a_real_run(run: tuple[str, Trace, int]) -> None:
    _, trace, _ = run
    for sequence_id in sequence_ids(trace):
        frames = Stepper(trace, sequence_id).frames
        assert frames[-1]["finish_reason"] == "length"
        assert frames[-1]["computed"] == frames[-1]["known"] - 1
    assert json.dumps(BlockTableView(trace).frames)
    assert json.dumps(MemoryLedger(trace).frames)
    figures.kv_occupancy(trace)
    figures.block_grid(trace, len(trace.steps) // 2)


def test_captions_of_a_real_run_name_what_was_asked_for(run: tuple[str, Trace, int]) -> None:
    name, trace, _ = run
    text = " ".join(e for i in range(len(trace.steps)) for e in memory_events(trace, i))
    assert ("in the prefix cache" in text) == (name not in ("no cache", "heavy"))
    assert ("r0.1 forks from r0 and shares its 4 blocks" in text) == (name != "heavy")
    assert ("Block 3 was shared by r0 and r0.1; r0 wrote" in text) == (name != "heavy")
    assert ("swapped out" in text) == ("came back from host memory" in text) == (name == "swap")
    assert ("no query will see" in text) == (name in ("window", "heavy"))
