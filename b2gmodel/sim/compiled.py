"""The one place where functions are handed to the compiler: floats stay IEEE, and the result is kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:

    def compiled(function: F) -> F:
        """``function``, compiled on its first call."""
        return function

else:
    import numba

    compiled = numba.njit(cache=True, error_model="numpy")
