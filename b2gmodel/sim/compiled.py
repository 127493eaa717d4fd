"""The one place where functions are handed to the compiler: floats stay IEEE, and the result is kept on disk.

A ``Vector`` is ``WIDTH`` floats that go through every operation side by side, in as few instructions as the machine
has for them; it exists in compiled code alone. Each of its floats comes out as it would on its own.

What is kept on disk is looked up by the file of the function alone: after a change here those that use it have to be
compiled anew (remove ``__pycache__``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from numpy import float64
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])

WIDTH: Final = 8
"""As many doubles as the widest registers in common use hold."""

if TYPE_CHECKING:

    class Vector:
        """``WIDTH`` floats."""

    def compiled(function: F) -> F:
        """``function``, compiled on its first call."""
        return function

    def load(array: NDArray[float64], place: int) -> Vector:
        """The ``WIDTH`` floats of a flat array that begin at ``place``."""
        return Vector()

    def gather(array: NDArray[float64], place: int, stride: int) -> Vector:
        """``WIDTH`` floats of a flat array, the first at ``place``, each next one ``stride`` further on."""
        return Vector()

    def store(array: NDArray[float64], place: int, vector: Vector) -> None:
        """Into a flat array, from ``place`` on."""

    def plus(left: Vector, right: Vector) -> Vector:
        """The sum of each two."""
        return Vector()

    def choose(low: Vector, high: Vector, yes: Vector, no: Vector) -> Vector:
        """``yes`` wherever ``low <= high``, else ``no``."""
        return Vector()

else:
    import numba
    from llvmlite import ir
    from numba.core import types
    from numba.core.errors import TypingError
    from numba.extending import intrinsic, models, register_model

    compiled = numba.njit(cache=True, error_model="numpy")

    _FLOATS = ir.VectorType(ir.DoubleType(), WIDTH)

    class _VectorType(types.Type):
        def __init__(self):
            super().__init__("Vector")

    _VECTOR = _VectorType()

    @register_model(_VectorType)
    class _VectorModel(models.PrimitiveModel):
        def __init__(self, manager, kind):
            super().__init__(manager, kind, _FLOATS)

    def _check(array):
        if array.dtype != types.float64 or array.ndim != 1 or array.layout != "C":
            raise TypingError(f"a Vector is read from and written to flat arrays of floats, not {array}")

    def _data(context, builder, signature, arguments):
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    def _address(context, builder, signature, arguments):
        first = builder.gep(_data(context, builder, signature, arguments), [arguments[1]])
        return builder.bitcast(first, _FLOATS.as_pointer())

    # Arrays are aligned as a single float is.
    @intrinsic
    def load(typing, array, place):
        _check(array)

        def generate(context, builder, signature, arguments):
            return builder.load(_address(context, builder, signature, arguments), align=8)

        return _VECTOR(array, types.intp), generate

    @intrinsic
    def gather(typing, array, place, stride):
        _check(array)

        def generate(context, builder, signature, arguments):
            data, (place, stride) = _data(context, builder, signature, arguments), arguments[1:]
            vector = ir.Constant(_FLOATS, ir.Undefined)
            for lane in range(WIDTH):
                vector = builder.insert_element(vector, builder.load(builder.gep(data, [place])), ir.IntType(32)(lane))
                place = builder.add(place, stride)
            return vector

        return _VECTOR(array, types.intp, types.intp), generate

    @intrinsic
    def store(typing, array, place, vector):
        _check(array)

        def generate(context, builder, signature, arguments):
            builder.store(arguments[2], _address(context, builder, signature, arguments), align=8)
            return context.get_dummy_value()

        return types.void(array, types.intp, _VECTOR), generate

    @intrinsic
    def plus(typing, left, right):
        def generate(context, builder, signature, arguments):
            return builder.fadd(*arguments)

        return _VECTOR(_VECTOR, _VECTOR), generate

    @intrinsic
    def choose(typing, low, high, yes, no):
        def generate(context, builder, signature, arguments):
            return builder.select(builder.fcmp_ordered("<=", *arguments[:2]), *arguments[2:])

        return _VECTOR(_VECTOR, _VECTOR, _VECTOR, _VECTOR), generate
