import pytest

from pdlab.costmodel import Hardware


@pytest.fixture
def round_machine() -> Hardware:
    """A machine of round numbers: 100 FLOP/s, 10 bytes/s, ridge point 10 FLOP/byte."""
    return Hardware(
        name="round",
        kind="cpu",
        peak_flops={"fp32": 100.0},
        bandwidth_bytes_s=10.0,
        memory_bytes=1000,
        source="made up for a test",
        launch_s=0.25,
    )
