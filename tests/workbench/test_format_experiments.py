"""What the lesson on KV formats measures, against the cache itself."""

import pytest
import torch

import pdlab
from pdlab import EngineConfig
from pdlab.kvcache import PagedKVCache
from pdlab.workbench import figures
from pdlab.workbench.format_experiments import (
    as_stored,
    bytes_per_token,
    decode_by_format,
    outlier_ratios,
    relative_error,
    same_bytes,
    step_s,
    stored_bytes,
    watch_a_block_fill,
)
from tests.helpers import TINY, random_model, random_prompt

FORMATS = ["fp32", "bf16", "fp8", "int8", "int8:head", "int4:channel", "int4:token:4"]


def test_bytes_of_a_token_without_scales_are_counted() -> None:
    sizes = bytes_per_token(TINY, ["fp32", "bf16", "int8"])
    assert sizes["fp32"] == TINY.kv_bytes_per_token(4) == 2 * sizes["bf16"]
    assert sizes["int8"] == TINY.kv_bytes_per_token(1) * (1 + 2 / TINY.head_dim)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_stored_values_are_those_a_cache_gives_back(kv_format: str) -> None:
    k = torch.randn(TINY.num_layers, 16, TINY.num_kv_heads, TINY.head_dim)
    cache = PagedKVCache(TINY, num_blocks=2, block_size=8, kv_format=kv_format)
    plan = cache.write_plan(list(range(16)))
    for layer in range(TINY.num_layers):
        cache.write(layer, plan, k[layer], k[layer])
    cache.commit(plan)
    assert torch.equal(as_stored(k, kv_format, 8), cache.read([0, 1], 16)[0].float())


def test_error_of_rounding() -> None:
    x = torch.randn(3, 20, 2, 8)
    assert relative_error(x, "fp32", 8) == 0
    assert 0 < relative_error(x, "int8", 8) < 0.01 < relative_error(x, "int4", 8) < 0.2
    assert as_stored(x, "int8", 8).shape == (3, 16, 2, 8)
    with pytest.raises(ValueError, match="block_size=32"):
        as_stored(x, "int8", 32)


def test_a_loud_channel_is_an_outlier_and_wants_a_scale_of_its_own() -> None:
    x = torch.randn(1, 32, 1, 16)
    quiet = outlier_ratios(x)
    x[..., 3] *= 50
    assert outlier_ratios(x).item() > 20 > 3 > quiet.item()
    rest = [i for i in range(16) if i != 3]
    errors = {
        f: (as_stored(x, f) - x)[..., rest].norm().item() for f in ("int4:token:16", "int4:channel")
    }
    assert errors["int4:token:16"] > 5 * errors["int4:channel"]


def test_a_block_is_rounded_when_it_is_full() -> None:
    points = watch_a_block_fill(
        random_model(), "int4:channel", num_prompt=5, num_steps=6, block_size=8
    )
    assert [p.num_tokens for p in points] == [5, 6, 7, 8, 9, 10]
    assert [p.k_error > 0 for p in points] == [False] * 3 + [True] * 3


def test_decode_steps_by_format_read_fewer_bytes() -> None:
    model = pdlab.load("random:tiny-llama", progress=False)
    steps = decode_by_format(model, ["fp32", "int8"], context_len=24, num_steps=4)
    assert [len(of_it) for of_it in steps.values()] == [4, 4]
    assert all(s.phase == "decode" for of_it in steps.values() for s in of_it)
    wide, narrow = (of_it[-1].bytes_moved["kv_read"] for of_it in steps.values())
    assert narrow < wide
    assert step_s(steps["int8"]) > 0


def test_token_wise_codes_do_not_depend_on_company_chunks_and_blocks() -> None:
    prompts = [random_prompt(n, seed=n) for n in (9, 5, 7)]
    alone = EngineConfig(exact=True, kv_format="int8", num_blocks=32)
    crowded = EngineConfig(exact=True, kv_format="int8", num_blocks=32, chunk_size=2, block_size=4)
    first = stored_bytes(random_model(), prompts[:1], alone)
    assert first[0].dtype == torch.int8
    assert first[0].shape[1] == 9 + 3, "the prompt and the tokens fed in since"
    assert same_bytes(first, stored_bytes(random_model(), prompts, crowded))
    assert not same_bytes(first, stored_bytes(random_model(), prompts[1:], alone))
    assert not same_bytes([], [])


def test_picture_of_the_numbers_says_how_far_the_largest_channel_stands_out() -> None:
    kv = torch.ones(2, 3, 20, 2, 8)
    kv[0, 1, :, 1, 5] = 7
    figure = figures.kv_magnitudes(kv, layer=1, head=1)
    assert "7.0 times the median in K, 1.0 times in V" in figure.layout.title.text.replace(
        "<br>", " "
    )
    k, v = figure.data
    assert k.z.shape == v.z.shape == (20, 8)
    with pytest.raises(ValueError, match="layer=3, head=0"):
        figures.kv_magnitudes(kv, layer=3, head=0)
