"""What all tests share: few threads, repeatable hypothesis runs, the real model loaded once."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

import pdlab
from pdlab.models import Model

settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("explore", parent=settings.get_profile("repeatable"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_configure() -> None:
    """More threads than cores make small matrix products slower, not faster."""
    asked = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    torch.set_num_threads(max(1, min(2, asked) // num_processes))


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The default model, SmolLM2-135M-Instruct in float32."""
    return pdlab.load("smollm2-135m", dtype="fp32", progress=False)


@pytest.fixture(scope="session")
def smollm2_hf():
    """The same weights in transformers: the oracle."""
    from transformers import LlamaForCausalLM

    from pdlab.models import default_model_directory

    directory = default_model_directory(progress=False)
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """`torch.randn` in a test draws the same numbers each time."""
    torch.manual_seed(0)
