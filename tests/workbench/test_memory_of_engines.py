"""Several engines on one memory: no picture of one shows as free what another one holds."""

from dataclasses import replace

import pytest

from pdlab import Engine, EngineConfig, SamplingParams, Trace
from pdlab.workbench import BlockTableView, MemoryLedger, figures
from pdlab.workbench.memory_data import block_bytes, block_owners, kv_capacity_bytes, ledger
from pdlab.workbench.memory_events import memory_events

from ..helpers import random_model, random_prompt
from .handmade_memory import memory_moves


@pytest.fixture(scope="module")
def sharers() -> list[Trace]:
    """Traces of two engines on one memory that step in turn, with prefixes in common."""
    config = EngineConfig(block_size=4, num_blocks=24, chunk_size=16, max_num_seqs=4)
    memory = Engine.memory_for(random_model(), config)
    base, params = random_prompt(12), SamplingParams(max_tokens=10, ignore_eos=True)
    engines = [Engine(random_model(), config, memory=memory) for _ in range(2)]
    for i, engine in enumerate(engines):
        engine.submit([*base, 3 + i], params)
        engine.step()
        engine.submit(random_prompt(7 + 9 * i, seed=i), replace(params, max_tokens=5 + 9 * i))
    while sum(engine.step() is not None for engine in engines):
        pass
    for engine in engines:
        engine.close()
    return [engine.trace for engine in engines]


def test_ledgers_of_engines_on_one_memory_add_up_to_its_bytes(sharers: list[Trace]) -> None:
    for trace in sharers:
        assert any(record.blocks_of_others for record in trace.steps)
        for record, frame in zip(trace.steps, MemoryLedger(trace).frames, strict=True):
            book = ledger(trace, record)
            assert book.used + book.wasted + book.others + book.cached + book.free == book.pool
            assert book.pool == kv_capacity_bytes(trace)
            assert book.others == len(record.blocks_of_others) * block_bytes(trace)
            # Blocks of sequences that finished in this step are given back after the picture.
            back = [b for b in record.blocks_freed if b in block_owners(trace, record)]
            takeable = record.num_free_blocks - len(back)
            assert book.cached + book.free == takeable * block_bytes(trace)
            assert ("Other engines hold" in frame["note"]) == bool(record.blocks_of_others)


def test_no_block_that_another_engine_holds_is_drawn_free(sharers: list[Trace]) -> None:
    for trace in sharers:
        view = BlockTableView(trace)
        assert view.header["shares_memory"]
        for record, frame in zip(trace.steps, view.frames, strict=True):
            owned = set(block_owners(trace, record))
            assert frame["others"] == record.blocks_of_others
            assert not set(frame["others"]) & (owned | set(frame["cached"]))
            grid = figures.block_grid(trace, record.step).data[0]
            hovers = [text for row in grid.customdata for text in row if text]
            values = [z for row in grid.z for z in row if z is not None]
            assert len(hovers) == len(values) == trace.engine["num_blocks"]
            for block, (hover, z) in enumerate(zip(hovers, values, strict=True)):
                theirs = block in record.blocks_of_others
                assert (hover == f"block {block}: held by another engine") == theirs
                assert (z == -2) == theirs
                assert ("free" in hover) == (z == -1) == (block not in owned and not theirs)


def test_pictures_name_other_engines_only_where_there_are_any(sharers: list[Trace]) -> None:
    alone, trace = memory_moves(), sharers[1]
    step = next(r for r in trace.steps if r.blocks_of_others)
    count = len(step.blocks_of_others)
    assert (
        f"{count} more by other engines" in figures.block_grid(trace, step.step).layout.title.text
    )
    assert f"{count} more by other engines" in BlockTableView(trace, step.step).summary()
    occupancy = figures.kv_occupancy(trace)
    assert "other engines" in occupancy.layout.title.text.replace("<br>", " ")
    [area] = [part for part in occupancy.data if part.name == "other engines"]
    assert [y * 1e6 for y in area.y] == pytest.approx(
        [ledger(trace, r).others for r in trace.steps]
    )
    assert "other engines" not in [part.name for part in figures.kv_occupancy(alone).data]
    assert not MemoryLedger(alone).header["shares_memory"]


def test_a_copy_names_the_engine_that_shares_the_block() -> None:
    config = EngineConfig(block_size=4, num_blocks=16)
    memory = Engine.memory_for(random_model(), config)
    one, other = (Engine(random_model(), config, memory=memory) for _ in range(2))
    for engine in (one, other):
        engine.submit(random_prompt(8), SamplingParams(max_tokens=3, ignore_eos=True))
        engine.step()
    [move] = other.trace.steps[0].moves
    sentence = f"Block {move.source} is also held by another engine; r0 wrote: copied to block"
    assert any(event.startswith(sentence) for event in memory_events(other.trace, 0))
    one.close()
    other.close()
