"""The decoder computes what transformers computes, and refuses weights that do not fit."""

from dataclasses import replace

import pytest
import torch

from pdlab import NaiveGenerator
from pdlab.attention import ReferenceAttention
from pdlab.models.decoder import Decoder, in_row_tiles
from tests.helpers import TINY, random_model, random_prompt, relative_error
from tests.models.hf_twins import FAMILIES, SIZES, hf_logits, twins

PROMPT = random_prompt(40, SIZES["vocab_size"])
RELATIVE = 1e-4


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family, exact):
    theirs, ours = twins(family)
    logits = NaiveGenerator(ours, exact=exact).logits(PROMPT)
    assert logits.dtype == torch.float32
    assert relative_error(logits, hf_logits(theirs, PROMPT)) < RELATIVE


def test_twins_differ_where_their_families_differ():
    """Else the oracle would not notice a feature that is left out."""
    configs = {family: twins(family)[1].config for family in FAMILIES}
    assert configs["mistral-windowed"].layer_windows == (7, 7)
    assert configs["qwen2-some-layers-windowed"].layer_windows == (None, 6)
    assert configs["qwen2"].qkv_bias
    assert not configs["qwen2"].output_bias
    assert configs["llama-biased-tied"].mlp_bias
    assert configs["llama-biased-tied"].tie_word_embeddings
    assert configs["qwen3"].qk_norm
    assert configs["qwen3"].head_dim * configs["qwen3"].num_heads != SIZES["hidden_size"]


@pytest.mark.parametrize("num_chunks", [2, 3, 40])
def test_a_prompt_in_chunks_gives_the_same_hidden_states(num_chunks):
    """The decoder is told positions, so it must not count rows from 0."""
    model = random_model()
    ids, positions = torch.tensor(random_prompt(40)), torch.arange(40)
    whole = model.decoder(ids, positions, _remembering())
    attend = _remembering()
    chunks = zip(ids.chunk(num_chunks), positions.chunk(num_chunks), strict=True)
    parts = [model.decoder(*chunk, attend) for chunk in chunks]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)


def _remembering():
    """Attention that keeps K and V of all it has seen: a cache of the simplest kind."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(layer, q, k, v):
        if layer in kept:
            k, v = (torch.cat(pair) for pair in zip(kept[layer], (k, v), strict=True))
        kept[layer] = (k, v)
        return ReferenceAttention().dense(q, k, v)

    return attend


def test_tied_embeddings_are_one_tensor_and_count_once():
    tied, untied = (Decoder(replace(TINY, tie_word_embeddings=tie)) for tie in (True, False))
    assert tied.head is tied.embedding
    assert untied.weight_bytes - tied.weight_bytes == TINY.vocab_size * TINY.hidden_size * 4


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_are_those_of_the_parameters_the_shape_counts(tied):
    config = replace(TINY, tie_word_embeddings=tied, qkv_bias=True, qk_norm=True)
    assert Decoder(config).weight_bytes == config.num_parameters * 4
    assert Decoder(config, torch.bfloat16).weight_bytes == config.num_parameters * 2


def test_weights_that_do_not_fit_are_refused_by_name():
    decoder = Decoder(TINY)
    weights = twins("llama")[0].state_dict()
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight.*\(67, 48\).*\(61, 32\)"):
        decoder.load_weights(weights.items())
    with pytest.raises(ValueError, match=r"'model\.layers\.9\.nothing' has no place in a llama"):
        decoder.load_weights([("model.layers.9.nothing", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"weights are missing, first: 'lm_head\.weight'"):
        decoder.load_weights([])


def test_a_bias_that_the_configuration_denies_is_refused():
    theirs, _ = twins("qwen2")
    config = replace(twins("qwen2")[1].config, qkv_bias=False)
    with pytest.raises(ValueError, match=r"q_proj\.bias' has no place"):
        Decoder(config).load_weights(theirs.state_dict().items())


@pytest.mark.parametrize("num_rows", [1, 3, 4, 9])
def test_row_tiles_give_a_function_the_same_number_of_rows_always(num_rows):
    seen = []

    def double(x, y):
        seen.append(len(x))
        return 2 * x, y + 1

    x, y = torch.randn(num_rows, 5), torch.randn(num_rows, 2, 3)
    doubled, raised = in_row_tiles(double, 4, x, y)
    assert set(seen) == {4}
    assert torch.equal(doubled, 2 * x)
    assert torch.equal(raised, y + 1)


def test_one_row_has_the_same_bits_alone_and_in_any_tile():
    """What row tiles are for: without them some of these rows differ in their last bits."""
    model = random_model(replace(TINY, hidden_size=192, intermediate_size=512))
    layer = model.decoder.layers[0]
    x, attended = torch.randn(50, 192), torch.randn(50, TINY.num_heads, TINY.head_dim)
    together = in_row_tiles(layer.add_attended, 16, x, attended)
    for row in range(50):
        one = slice(row, row + 1)
        alone = in_row_tiles(layer.add_attended, 16, x[one], attended[one])
        assert torch.equal(alone, together[one])
