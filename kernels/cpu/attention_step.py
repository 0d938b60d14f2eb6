"""Paged attention as a step of a team: write, attend, combine."""

from .attention_chunks import attend_chunk, combine_chunk, write_chunk
from .chunks import NONE, next_chunk
from .compiled import kernel


@kernel
def attention_step(counters, step, kv, plan, layer, kind, qkv, out, writes, attends, combines):
    """Attention of one layer, in so many chunks of each phase."""
    finished = False
    while True:
        chunk = next_chunk(counters, step, 0, writes, finished)
        if chunk == NONE:
            break
        write_chunk(kv, plan, layer, qkv, chunk)
        finished = True
    finished = False
    while True:
        chunk = next_chunk(counters, step, writes, attends, finished)
        if chunk == NONE:
            break
        attend_chunk(kv, plan, layer, kind, qkv, out, chunk)
        finished = True
    finished = False
    while True:
        chunk = next_chunk(counters, step, writes + attends, combines, finished)
        if chunk == NONE:
            break
        combine_chunk(kv, plan, kind, out, chunk)
        finished = True
