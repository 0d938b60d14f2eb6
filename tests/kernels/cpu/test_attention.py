"""Paged attention: against torch, over every format, and in the same bits however it is cut."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pdlab_kernels.cpu.target import TARGET

from tests.kernels.cpu.attention_cases import Case, config_of

LENGTHS = [1, 15, 16, 17, 33, 129, 1000]
TOKENWISE = ["fp32", "fp16", "bf16", "fp8", "int8", "int4", "int8:token:16", "int4:token:2"]
MIXED = ["fp16/int4", "int8:token:32/fp32", "int4:token:12/fp8:token:48"]
needs_numba = pytest.mark.skipif(TARGET == "torch", reason="no compiled kernels here")


@pytest.fixture(scope="module")
def pair() -> Iterator[object]:
    from pdlab_kernels.cpu.team import Team

    with Team(2) as team:
        yield team


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_and_the_token_after_it(length: int) -> None:
    Case([length], [length]).check()
    Case([length], [1]).check()


@pytest.mark.parametrize("block_size", [1, 7, 8, 16])
def test_a_ragged_batch_of_prompts_chunks_and_single_tokens(block_size: int) -> None:
    contexts, queries = [1, 33, 129, 70, 16, 300, 17], [1, 33, 1, 20, 1, 77, 2]
    Case(contexts, queries, block_size=block_size).check()


@pytest.mark.parametrize("group", range(1, 9))
def test_any_number_of_heads_may_share_a_kv_head(group: int) -> None:
    Case([130, 40, 66], [1, 40, 5], config_of(2 * group, 2)).check()


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
@pytest.mark.parametrize("kv_format", ["fp32", "int4", "fp8"])
def test_any_head_dim_that_is_a_multiple_of_16(head_dim: int, kv_format: str) -> None:
    Case([130, 40], [1, 40], config_of(4, 2, head_dim), kv_format=kv_format).check()


@pytest.mark.parametrize("kv_format", TOKENWISE + MIXED)
@pytest.mark.parametrize("block_size", [1, 16])
def test_formats_with_scales_of_tokens(kv_format: str, block_size: int) -> None:
    config = config_of(4, 2, 48 if "12" in kv_format else 64)
    case = Case([133, 50, 18], [1, 50, 2], config, block_size, kv_format)
    case.check()


@needs_numba
@settings(max_examples=20)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=4), st.sampled_from(["fp32", "int8"]))
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(cuts: list[int], kv_format: str) -> None:
    total = sum(cuts)
    whole, _ = Case([total], [total], kv_format=kv_format).by_kernels()
    end, parts = 0, []
    for cut in cuts:
        end += cut
        case = Case([total], [cut], kv_format=kv_format)
        rows = case.rows[0]
        case.contexts, case.rows = [end], [rows[:end]]
        parts.append(case.by_kernels()[0])
    assert torch.equal(torch.cat(parts), whole)
    last = Case([total], [1], kv_format=kv_format).by_kernels()[0]
    assert torch.equal(last[0], whole[-1])


@needs_numba
def test_a_row_has_the_same_bits_alone_among_others_and_on_two_threads(pair) -> None:
    contexts, queries = [700, 40, 129, 300], [1, 40, 1, 3]
    batch = Case(contexts, queries)
    together, _ = batch.by_kernels()
    assert torch.equal(batch.by_kernels(team=pair)[0], together)
    start = 0
    for i, n in enumerate(queries):
        case = Case(contexts, queries)
        case.contexts, case.queries = [contexts[i]], [n]
        case.tables, case.rows = [batch.tables[i]], [batch.rows[i]]
        for team in (None, pair):
            alone, _ = case.by_kernels(team=team)
            assert torch.equal(alone, together[start : start + n])
        start += n
