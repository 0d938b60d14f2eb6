"""What a weight format is called."""

import pytest

from pdlab.quantize import parse_format


@pytest.mark.parametrize(
    ("name", "layers", "head", "shortest"),
    [
        ("fp32", "fp32", "fp32", "fp32"),
        ("int8", "int8", "int8", "int8"),
        ("q8_0", "q8_0", "q8_0", "q8_0"),
        ("int8/q8_0", "int8", "q8_0", "int8/q8_0"),
        ("int4", "int4", "q8_0", "int4"),
        ("int4/q8_0", "int4", "q8_0", "int4"),
        ("int4:gptq/int4", "int4", "int4", "int4:gptq/int4"),
    ],
)
def test_a_name_says_how_layers_and_head_are_kept(name, layers, head, shortest) -> None:
    found = parse_format(name)
    assert (found.layers, found.head, found.name) == (layers, head, shortest)
    assert parse_format(found.name) == found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int5", r"weights='int5': LAYERS\[:METHOD\]\[/HEAD\] is needed"),
        ("int4/", "weights='int4/'"),
        ("int4:", "weights='int4:'"),
        ("int4:best", "nearest"),
        ("", "weights=''"),
        ("int8:gptq", "methods are for int4"),
        (4, "weights=4 must be"),
    ],
)
def test_other_names_are_refused(name, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_format(name)
