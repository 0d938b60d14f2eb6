"""Memory by its address: how one compiled kernel reaches arrays that tables name.

A kernel that took every weight and every part of the KV cache as an argument would be compiled anew
for each number and type of them. Instead a table of int64 holds their addresses, and a word of this
module makes an array of one. It begins there and has no length: nothing is checked, copied or
owned. Whoever fills the table keeps the memory alive until the step is over.
"""

from typing import Any

from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array


def _array_at(dtype: types.Type) -> Any:
    array_type = types.Array(dtype, 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = make_array(array_type)(context, builder)
        data_type = context.get_data_type(dtype)
        item_bytes = context.get_constant(types.intp, context.get_abi_sizeof(data_type))
        populate_array(
            array,
            data=builder.inttoptr(args[0], data_type.as_pointer()),
            shape=[context.get_constant(types.intp, 1)],
            strides=[item_bytes],
            itemsize=item_bytes,
            meminfo=None,
        )
        return array._getvalue()

    return intrinsic(lambda typing, address: (array_type(types.int64), codegen))


bytes_at = _array_at(types.uint8)
codes_at = _array_at(types.int8)
shorts_at = _array_at(types.int16)
longs_at = _array_at(types.int64)
floats_at = _array_at(types.float32)


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as C functions take it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen
