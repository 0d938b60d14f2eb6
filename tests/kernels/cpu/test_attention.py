"""Paged attention: against torch, over every format, and in the same bits however it is cut."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pdlab_kernels.cpu.attention import attention
from pdlab_kernels.cpu.attention_plan import AttentionPlan, PagedKV
from pdlab_kernels.cpu.target import TARGET

from pdlab.attention import Window
from tests.kernels.cpu.attention_cases import Case, config_of, paged_kv

LENGTHS = [1, 15, 16, 17, 33, 129, 1000]
TOKENWISE = ["fp32", "fp16", "bf16", "fp8", "int8", "int4", "int8:token:16", "int4:token:2"]
BLOCKWISE = ["int8:head", "int8:channel", "int4:head", "int4:channel", "fp8:head", "fp8:channel"]
BLOCKWISE += ["int4:channel/int4", "fp16/int8:channel"]
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


@pytest.mark.parametrize("kv_format", BLOCKWISE)
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_formats_with_scales_of_blocks(kv_format: str, block_size: int) -> None:
    """Sequences that close a block, begin and fill some, go on with an open one."""
    contexts, queries = [133, 50, 18, 48, 64], [1, 50, 2, 1, 30]
    Case(contexts, queries, config_of(4, 2), block_size, kv_format, piece=9).check()


@pytest.mark.parametrize("kv_format", ["fp32", "int4/fp8", "int8:head/fp16"])
def test_heads_may_lie_in_several_stores(kv_format: str) -> None:
    Case([133, 50], [1, 50], config_of(12, 6), 16, kv_format, head_groups=3).check()


@pytest.mark.parametrize(
    "window",
    [
        Window(1),
        Window(16),
        Window(40, sinks=4),
        Window(64, sinks=70),
        Window(100, sinks=3, reach=130),
        Window(2000, sinks=4),
    ],
)
@pytest.mark.parametrize("block_size", [7, 16])
def test_windows(window: Window, block_size: int) -> None:
    contexts, queries = [300, 300, 20, 700, 333], [1, 300, 20, 5, 50]
    case = Case(contexts, queries, config_of(4, 2), block_size)
    case.check(window)
    for i, entries in enumerate(case.unseen(window)):
        case.dropped = [*case.dropped, *((i, entry) for entry in entries)]
    assert case.dropped or window.size > 100
    case.check(window)


@pytest.mark.parametrize("kv_format", ["fp32", "int8:head"])
def test_blocks_that_were_dropped_within_sight_are_not_seen(kv_format: str, pair) -> None:
    dropped = [(0, 0), (0, 5), (0, 6), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4)]
    case = Case([300, 90, 129], [1, 40, 2], config_of(4, 2), 16, kv_format, dropped=dropped)
    case.check()
    case.check(Window(200, sinks=20))
    if TARGET != "torch":
        assert torch.equal(case.by_kernels()[0], case.by_kernels(team=pair)[0])


@needs_numba
@settings(max_examples=25)
@given(st.data())
def test_any_batch_over_any_window(data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=5))
    queries = [data.draw(st.integers(1, n)) for n in contexts]
    size = data.draw(st.integers(1, 150))
    window = data.draw(
        st.none() | st.builds(Window, st.just(size), st.integers(0, 100), st.none())
        | st.builds(Window, st.just(size), st.integers(0, 100), st.integers(size, 250))
    )  # fmt: skip
    block_size = data.draw(st.sampled_from([1, 3, 8, 16, 64]))
    group = data.draw(st.integers(1, 4))
    config, kv_format = (
        config_of(2 * group, 2, 16),
        data.draw(st.sampled_from(["fp32", "int4:head"])),
    )
    Case(contexts, queries, config, block_size, kv_format, piece=30).check(window)


def test_an_empty_batch_and_sequences_without_queries() -> None:
    out, _ = Case([], []).by_kernels()
    assert out.shape == (0, 9 * 64)
    some, _ = Case([20, 5, 9], [0, 5, 0]).by_kernels()
    expected, _ = Case([20, 5, 9], [20, 5, 9]).by_kernels()
    torch.testing.assert_close(some, expected[20:25])


@needs_numba
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "int8"])
def test_what_is_not_finite_is_seen_by_those_that_see_it(
    value: float, part: str, kv_format: str
) -> None:
    at = {"q": 70, "k": 9 * 64 + 70, "v": 12 * 64 + 70}[part]
    case = Case([100, 70, 30], [100, 70, 1], kv_format=kv_format)
    clean, _ = case.by_kernels()
    case.rows[1][40, at] = value
    out, _ = case.by_kernels()
    changed = (out != clean).any(dim=1).nonzero().flatten().tolist()
    if part == "q":
        assert changed == [140]
        assert not out[140].isfinite().all()
    else:
        assert set(changed) <= set(range(140, 170))
        assert 140 in changed
        if value != value:
            assert out[140:170].isnan().any(dim=1).all()
    assert out[:140].isfinite().all()


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x.double(), "qkv: must be float32"),
        (lambda x: x[:, 1:], "qkv: must be float32 .5, 960."),
        (lambda x: x.to("meta"), "on meta"),
        (lambda x: x.T.contiguous().T, "qkv: must be contiguous"),
    ],
)
def test_rows_that_do_not_fit_are_refused(make, message: str) -> None:
    case = Case([5], [5])
    cache = case.cache()
    plan = case.plan(cache, cache.write_plan(case.step_slots))
    with pytest.raises(ValueError, match=message):
        attention(make(case.qkv), plan, 0)
    with pytest.raises(ValueError, match="layer=2, must be from 0 to 1"):
        attention(case.qkv, plan, 2)
    with pytest.raises(ValueError, match="kind=1, must be from 0 to 0"):
        attention(case.qkv, plan, 0, kind=1)


@pytest.mark.parametrize("head_dim", [8, 24, 272])
def test_a_head_dim_that_the_kernels_do_not_have_is_refused(head_dim: int) -> None:
    case = Case([5], [5], config_of(2, 2, head_dim))
    with pytest.raises(ValueError, match=f"head_dim={head_dim}, must be a multiple of 16 from 16"):
        paged_kv(case.cache())


def test_stores_that_do_not_fit_are_refused() -> None:
    case = Case([5], [5], config_of(4, 2), kv_format="int8")
    kv = paged_kv(case.cache())
    codes, scales = kv.k.parts[0]
    for parts, message in [
        ([codes.float(), scales], r"k.parts\[0\]\[0\]: must be torch.int8"),
        ([codes.to("meta"), scales], "on meta"),
        ([codes.transpose(2, 3).contiguous().transpose(2, 3), scales], "must be contiguous"),
        ([codes, scales[:, :1]], r"k.parts\[0\]\[1\]: must be torch.float16"),
        ([codes], "k.parts.0.: 1 tensors of int8"),
    ]:
        with pytest.raises(ValueError, match=message):
            PagedKV(kv.k._replace(parts=[parts]), kv.v, 4)
    with pytest.raises(ValueError, match="num_heads=5, must be a multiple of 2"):
        PagedKV(kv.k, kv.v, 5)
    with pytest.raises(ValueError, match="scales=head needs place_of and open areas"):
        PagedKV(kv.k, kv.v._replace(scales="head"), 4)
    with pytest.raises(ValueError, match="group=5, must divide head_dim=64"):
        PagedKV(kv.k, kv.v._replace(group=5), 4)
    with pytest.raises(ValueError, match="v: format 'int2', must be one of fp32"):
        PagedKV(kv.k, kv.v._replace(name="int2"), 4)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (([0, 1], [5], [[9]], [3]), "block_tables: block 9 of 4"),
        (([0, 1], [5], [[1]], [64]), "slots: 64 to 64 of 64"),
        (([0, 1], [5], [[1]], [-1]), "slots: -1 to -1"),
        (([0, 2], [5], [[1]], [3]), "query_starts: from 0 to 2, rows are 1"),
        (([0, 1], [17], [[1]], [3]), "sequence 0: 1 queries, context_len=17, 1 blocks of 16"),
        (([0, 2], [1], [[1]], [3, 4]), "sequence 0: 2 queries, context_len=1"),
        (([0, 1], [5], [], [3]), "query_starts, block_tables: 2, 0 for 1 sequences"),
    ],
)
def test_batches_that_do_not_fit_are_refused(batch, message: str) -> None:
    kv = paged_kv(Case([5], [5], kv_format="fp32").cache())
    with pytest.raises(ValueError, match=message):
        AttentionPlan(kv, *batch)


def test_formats_of_blocks_need_to_know_where_rows_go() -> None:
    kv = paged_kv(Case([5], [5], kv_format="int8:head").cache())
    with pytest.raises(ValueError, match="blocks=None: scales of the format belong to blocks"):
        AttentionPlan(kv, [0, 1], [5], [[1]], [3])
