"""Run where TRITON_INTERPRET=1 was set before Triton was imported: see ../test_interpreter.py.

By hand:
    TRITON_INTERPRET=1 pytest -p no:nbval --confcutdir=tests/kernels/triton/interpreted \\
        --override-ini addopts=--import-mode=importlib tests/kernels/triton/interpreted/check_*.py
"""

import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
