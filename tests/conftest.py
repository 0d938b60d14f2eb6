"""What all tests share: few threads, repeatable hypothesis runs, the real model loaded once.

And in which order several processes take them.
"""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import pdlab
from pdlab.models import Model, load_outline
from tests.helpers import TINY, random_model

settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("explore", parent=settings.get_profile("repeatable"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

BROWSER = "tests/browser"
LONGEST = (
    BROWSER,
    "notebooks/08_disaggregation.ipynb",
    "notebooks/07_scheduling.ipynb",
    "notebooks/09_kernels_and_speed.ipynb",
    "notebooks/10_speculation_and_overlap.ipynb",
    "notebooks/11_parallelism.ipynb",
    "notebooks/03_paged_kv.ipynb",
    "notebooks/04_kv_formats.ipynb",
    "notebooks/05_windows_and_eviction.ipynb",
    "tests/workbench/test_live_cluster.py",
    "tests/kernels/triton/test_interpreter.py",
    "tests/engine/test_fuzz.py",
    "notebooks/02_decode.ipynb",
    "notebooks/06_sampling_and_output.ipynb",
    "notebooks/01_prefill.ipynb",
    "tests/engine/test_exact.py",
    "tests/engine/test_overlap.py",
    "tests/engine/test_speculation.py",
    "tests/engine/test_compiled.py",
    "tests/disagg/test_ray.py",
    "tests/parallel/test_ray_ranks.py",
    "tests/test_project.py",
    "tests/workbench/test_pd_lab.py",
    "tests/kernels/cpu/test_attention.py",
    "tests/kernels/cpu/test_linear.py",
    "tests/disagg/test_ranks.py",
    "tests/parallel/test_rank_processes.py",
    "tests/kernels/triton/test_compile.py",
    "tests/disagg/test_processes.py",
)
"""Files, or a folder, that take half a minute or more, about in this order."""


def pytest_configure() -> None:
    """More threads than cores make small matrix products slower, not faster."""
    asked = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    torch.set_num_threads(max(1, min(2, asked) // num_processes))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `--dist loadfile`: the longest first. It would begin with those that have most tests, and
    leave a process alone with the last long one.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            """The browser's tests share a JupyterLab: they go to one process, one after another."""
            return BROWSER if nodeid.startswith(f"{BROWSER}/") else super()._split_scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            longest = next((each for each in LONGEST if each in self.workqueue), None)
            if longest:
                self.workqueue.move_to_end(longest, last=False)
            super()._assign_work_unit(node)

    return LongestFirst(config, log)


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The default model, SmolLM2-135M-Instruct in float32."""
    return pdlab.load("smollm2-135m", dtype="fp32", progress=False)


@pytest.fixture(scope="session")
def speaker() -> Model:
    """The default model's tokenizer on a tiny one of random weights, which says anything.

    For what holds whatever a model says: in a hundredth of the time.
    """
    outline = load_outline("smollm2-135m")
    ends = outline.config.eos_token_ids
    shape = replace(
        TINY, vocab_size=outline.config.vocab_size, eos_token_ids=ends, max_model_len=512
    )
    return replace(random_model(shape), tokenizer=outline.tokenizer)


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
