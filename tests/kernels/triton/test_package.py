"""The package names each kernel; each has a reference that takes the same."""

import inspect
import subprocess
import sys
from importlib.util import find_spec

import pdlab_kernels.triton
import pytest
from pdlab_kernels.triton import reference


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton here")
@pytest.mark.parametrize("name", pdlab_kernels.triton.__all__)
def test_a_kernel_and_its_reference_take_the_same(name: str) -> None:
    kernel = inspect.signature(getattr(pdlab_kernels.triton, name))
    beside = inspect.signature(getattr(reference, name))
    assert list(kernel.parameters) == list(beside.parameters)
    for parameter, other in zip(
        kernel.parameters.values(), beside.parameters.values(), strict=True
    ):
        assert (parameter.kind, parameter.default) == (other.kind, other.default)


def test_references_need_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\nfrom pdlab_kernels.triton import reference, work"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'softmax'"):
        pdlab_kernels.triton.softmax  # noqa: B018
