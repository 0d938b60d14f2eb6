"""FLOPs and bytes of a step, against counts that do not use the formulas."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from pdlab.costmodel import Chunk, StepCost, causal_pairs, dense_step_cost, step_cost
from pdlab.costmodel.cost import BYTE_PARTS, FLOP_PARTS, visible_positions
from pdlab.models.config import ModelConfig

from .shapes import LLAMA_3_1_8B, TINY, TINY_TIED, TINY_WINDOWED

FP32 = {"weight_element_bytes": 4, "kv_element_bytes": 4}


class PlainLlama:
    """A Llama in plain torch products, which counts its own FLOPs by part with torch's counter.

    Norms, rotary positions and softmax are left out: the counter counts products only.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.flops = dict.fromkeys(FLOP_PARTS, 0)
        hidden, ffn = config.hidden_size, config.intermediate_size
        self.qkv = torch.randn(hidden, config.q_size + 2 * config.kv_size)
        self.output = torch.randn(config.q_size, hidden)
        self.gate, self.up = torch.randn(hidden, ffn), torch.randn(hidden, ffn)
        self.down = torch.randn(ffn, hidden)
        self.head = torch.randn(hidden, config.vocab_size)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        with FlopCounterMode(display=False) as counter:
            yield
        self.flops[name] += counter.get_total_flops()

    def run(self, chunk: Chunk, num_sampled: int, *, dense: bool) -> dict[str, int]:
        """One step of one sequence; the keys before the chunk stand in for its cache."""
        config = self.config
        x = torch.randn(chunk.num_tokens, config.hidden_size)
        for layer in range(config.num_layers):
            with self.part("qkv"):
                q, _, _ = (x @ self.qkv).split(
                    [config.q_size, config.kv_size, config.kv_size], dim=-1
                )
            heads = q.view(-1, config.num_heads, config.head_dim).transpose(0, 1)
            keys = torch.randn(
                config.num_heads, chunk.start + chunk.num_tokens, config.head_dim
            )  # one for each query head: sharing KV heads saves bytes, not FLOPs
            with self.part("attention"):
                attended = (
                    (heads @ keys.transpose(1, 2)) @ keys
                    if dense
                    else self.causal(heads, keys, chunk.start, config.window(layer))
                )
            with self.part("output"):
                x = attended.transpose(0, 1).reshape(-1, config.q_size) @ self.output
            with self.part("mlp"):
                x = ((x @ self.gate) * (x @ self.up)) @ self.down
        with self.part("logits"):
            if num_sampled:
                x[-num_sampled:] @ self.head
        return self.flops

    @staticmethod
    def causal(
        queries: torch.Tensor, keys: torch.Tensor, start: int, window: int | None
    ) -> torch.Tensor:
        """Each query against the keys it sees and no others."""
        rows = []
        for i in range(queries.shape[1]):
            end = start + i + 1
            seen = keys[:, max(0, end - window) if window else 0 : end]
            rows.append((queries[:, i : i + 1] @ seen.transpose(1, 2)) @ seen)
        return torch.cat(rows, dim=1)


@pytest.mark.parametrize("config", [TINY, TINY_TIED, TINY_WINDOWED], ids=["full", "tied", "window"])
@pytest.mark.parametrize(
    ("chunk", "num_sampled"),
    [(Chunk(0, 11), 1), (Chunk(0, 5), 0), (Chunk(5, 6), 1), (Chunk(11, 1), 1), (Chunk(3, 4), 4)],
    ids=["prompt", "first-chunk", "last-chunk", "decode", "verify"],
)
def test_flops_equal_torchs_own_count(config: ModelConfig, chunk: Chunk, num_sampled: int) -> None:
    counted = PlainLlama(config).run(chunk, num_sampled, dense=False)
    assert step_cost(config, [chunk], num_sampled=num_sampled, **FP32).flops == counted


@pytest.mark.parametrize("config", [TINY, TINY_WINDOWED], ids=["full", "window"])
def test_dense_flops_equal_torchs_own_count(config: ModelConfig) -> None:
    counted = PlainLlama(config).run(Chunk(0, 9), 1, dense=True)
    assert dense_step_cost(config, 9, weight_element_bytes=4).flops == counted


def test_dense_causal_count_is_the_cached_count_of_a_whole_prompt() -> None:
    dense = dense_step_cost(TINY_WINDOWED, 9, weight_element_bytes=4, causal=True)
    cached = step_cost(TINY_WINDOWED, [Chunk(0, 9)], num_sampled=1, **FP32)
    assert dense.flops == cached.flops
    assert dense.bytes == {**cached.bytes, "kv_read": 0, "kv_write": 0}


@given(
    start=st.integers(0, 40), num_tokens=st.integers(1, 40), window=st.none() | st.integers(1, 50)
)
def test_pairs_and_positions_equal_a_count_one_by_one(
    start: int, num_tokens: int, window: int | None
) -> None:
    seen = [
        range(max(0, p + 1 - window) if window else 0, p + 1)
        for p in range(start, start + num_tokens)
    ]
    assert causal_pairs(start, num_tokens, window) == sum(map(len, seen))
    assert visible_positions(start, num_tokens, window) == len(set().union(*seen))


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    config=st.sampled_from([TINY, TINY_TIED, TINY_WINDOWED]),
)
def test_chunked_prefill_has_the_flops_of_whole_prefill(
    sizes: list[int], config: ModelConfig
) -> None:
    whole = step_cost(config, [Chunk(0, sum(sizes))], num_sampled=1, **FP32)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    chunked = sum(
        (
            step_cost(config, [Chunk(start, size)], num_sampled=start + size == sum(sizes), **FP32)
            for start, size in zip(starts, sizes, strict=True)
        ),
        StepCost.zero(),
    )
    assert chunked.flops == whole.flops
    assert chunked.bytes["kv_write"] == whole.bytes["kv_write"]
    assert chunked.bytes["kv_read"] >= whole.bytes["kv_read"]
    assert chunked.bytes["weights"] >= whole.bytes["weights"]


@given(
    contexts=st.lists(st.integers(0, 200), min_size=1, max_size=8),
    config=st.sampled_from([TINY, TINY_TIED, TINY_WINDOWED]),
)
def test_a_batch_shares_weights_and_nothing_else(contexts: list[int], config: ModelConfig) -> None:
    chunks = [Chunk(context, 1) for context in contexts]
    batch = step_cost(config, chunks, num_sampled=len(chunks), **FP32)
    alone = [step_cost(config, [chunk], num_sampled=1, **FP32) for chunk in chunks]
    total = sum(alone, StepCost.zero())
    assert batch.flops == total.flops
    assert batch.bytes["kv_read"] == total.bytes["kv_read"]
    assert batch.bytes["kv_write"] == total.bytes["kv_write"]
    rows = 0 if config.tie_word_embeddings else (len(chunks) - 1) * config.hidden_size * 4
    assert batch.bytes["weights"] == alone[0].bytes["weights"] + rows


def test_a_sampling_step_of_a_tied_model_reads_every_weight_once() -> None:
    cost = step_cost(TINY_TIED, [Chunk(0, 50)], num_sampled=1, **FP32)
    assert cost.bytes["weights"] == 4 * TINY_TIED.num_parameters


def test_an_untied_model_reads_only_the_embedding_rows_it_looks_up() -> None:
    unread = TINY.vocab_size - 50
    cost = step_cost(TINY, [Chunk(0, 50)], num_sampled=1, **FP32)
    assert cost.bytes["weights"] == 4 * (TINY.num_parameters - unread * TINY.hidden_size)


@pytest.mark.parametrize("config", [TINY, TINY_TIED], ids=["untied", "tied"])
def test_a_chunk_that_samples_nothing_reads_no_head(config: ModelConfig) -> None:
    cost = step_cost(config, [Chunk(0, 1)], num_sampled=0, **FP32)
    matrices = 1 if config.tie_word_embeddings else 2
    layers = config.num_parameters - matrices * config.vocab_size * config.hidden_size
    assert cost.bytes["weights"] == 4 * (layers + config.hidden_size)
    assert cost.flops["logits"] == 0


def test_head_in_another_format_is_counted_apart() -> None:
    quantized = step_cost(
        TINY_TIED,
        [Chunk(7, 1)],
        num_sampled=1,
        weight_element_bytes=0.5,
        kv_element_bytes=4,
        head_element_bytes=2,
    )
    head = TINY_TIED.vocab_size * TINY_TIED.hidden_size
    assert quantized.bytes["weights"] == (TINY_TIED.num_parameters - head) / 2 + 2 * head


def test_decode_of_llama_8b_costs_two_flops_a_parameter_and_one_byte_a_flop() -> None:
    """Kaplan et al. 2020: 2N FLOPs a token; at batch 1 in bf16 that is 1 FLOP a byte."""
    cost = step_cost(
        LLAMA_3_1_8B, [Chunk(0, 1)], num_sampled=1, weight_element_bytes=2, kv_element_bytes=2
    )
    looked_up = LLAMA_3_1_8B.num_parameters - LLAMA_3_1_8B.vocab_size * LLAMA_3_1_8B.hidden_size
    assert cost.total_flops == pytest.approx(2 * looked_up, rel=1e-3)
    assert cost.arithmetic_intensity == pytest.approx(1, rel=1e-3)


def test_an_empty_step_costs_nothing() -> None:
    cost = step_cost(TINY, [], num_sampled=0, **FP32)
    assert cost == StepCost.zero()
    assert cost.arithmetic_intensity == 0


def test_parts_are_those_of_a_step_record() -> None:
    cost = step_cost(TINY, [Chunk(0, 3)], num_sampled=1, **FP32)
    assert (tuple(cost.flops), tuple(cost.bytes)) == (FLOP_PARTS, BYTE_PARTS)
    assert all(isinstance(n, int) for n in (*cost.flops.values(), *cost.bytes.values()))
    assert cost.total_flops == math.fsum(cost.flops.values())


def test_a_window_longer_than_the_context_changes_nothing() -> None:
    wide = replace(TINY, layer_windows=(64,) * TINY.num_layers)
    chunks = [Chunk(10, 20), Chunk(63, 1)]
    assert step_cost(wide, chunks, num_sampled=2, **FP32) == step_cost(
        TINY, chunks, num_sampled=2, **FP32
    )


@pytest.mark.parametrize(
    ("chunks", "values", "message"),
    [
        ([Chunk(-1, 2)], {}, "start=-1 of a chunk is below the limit 0"),
        ([Chunk(0, 0)], {}, "num_tokens=0 of a chunk is below the limit 1"),
        ([Chunk(0, 2)], {"num_sampled": 3}, "num_sampled=3 is not within 0 to 2"),
        ([Chunk(0, 2)], {"kv_element_bytes": 0}, "kv_element_bytes=0 is not above the limit 0"),
        ([Chunk(0, 2)], {"weight_element_bytes": -1}, "weight_element_bytes=-1 is not above"),
    ],
)
def test_bad_values_are_named(chunks: list[Chunk], values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_cost(TINY, chunks, **{"num_sampled": 1, **FP32, **values})
