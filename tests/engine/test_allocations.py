"""Activations are counted from the operation that makes them until the last view is gone."""

from __future__ import annotations

import torch

from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.costmodel import score_matrix_bytes
from pdlab.engine.allocations import AllocationMeter
from tests.helpers import TINY, random_model, random_prompt


def test_a_chain_of_products_holds_two_results_at_a_time_and_makes_all():
    weight = torch.randn(100, 100)
    with torch.inference_mode(), AllocationMeter() as meter:
        x = torch.zeros(10, 100)
        for _ in range(5):
            x = x @ weight.t()
    assert meter.total_bytes == 6 * x.nbytes
    assert meter.peak_bytes == 2 * x.nbytes


def test_views_cost_nothing_and_keep_their_memory_alive():
    with AllocationMeter() as meter:
        x = torch.zeros(8, 8)
        view = x.view(64)[3:]
        del x
        other = torch.ones(8, 8)
    assert meter.peak_bytes == meter.total_bytes == other.nbytes + 64 * 4
    assert len(view) == 61


def test_writing_in_place_and_what_was_there_before_cost_nothing():
    before = torch.zeros(1000)
    with AllocationMeter() as meter:
        before.add_(1)
        before[3:7].mul_(2)
    assert (meter.total_bytes, meter.peak_bytes) == (0, 0)


def test_a_step_reuses_its_activations_and_an_unfused_score_matrix_shows():
    """Layers follow each other, so a step holds about one layer's activations at once."""
    model, peaks = random_model(), {}
    for backend in ("torch", "reference"):
        config = EngineConfig(attention_backend=backend, enable_prefix_cache=False)
        with Engine(model, config) as engine:
            prompt, one = random_prompt(100), SamplingParams(max_tokens=1)
            engine.generate(prompt, one)
            with engine.measure_activations():
                engine.generate(prompt, one)
            engine.generate(prompt, one)
        first, measured, last = engine.trace.steps
        assert first.activation_peak_bytes is last.activation_total_bytes is None
        assert (
            measured.activation_total_bytes > TINY.num_layers * measured.activation_peak_bytes / 2
        )
        peaks[backend] = measured.activation_peak_bytes
    scores = score_matrix_bytes(100, 100, num_heads=TINY.num_heads)
    assert peaks["reference"] - peaks["torch"] >= scores
