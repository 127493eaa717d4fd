"""A timer that an event loop can wait for to the microsecond; the loops' own timers go by whole milliseconds.

Linux only (``timerfd_create(2)``): Python itself offers it from 3.13 on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import Final

from b2gmodel.units import NS_PER_S

_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class MonotonicTimer:
    """A descriptor that is readable once the time for which it was set has come. Close it."""

    def __init__(self) -> None:
        self.fd = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._at_ns: int | None = None

    def set(self, at_ns: int | None) -> None:
        """Wake at this time of ``time.monotonic_ns``, at once where it is past; None for not at all."""
        if at_ns == self._at_ns:
            return
        self._at_ns = at_ns
        seconds, rest_ns = divmod(0 if at_ns is None else max(1, at_ns), NS_PER_S)  # all zero switches it off
        setting = (ctypes.c_long * 4)(0, 0, seconds, rest_ns)  # struct itimerspec: no repetition, then the time
        if _LIBC.timerfd_settime(self.fd, _ABSOLUTE, setting, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def clear(self) -> None:
        """To be called once it was readable: it is not any more, and is set to nothing."""
        self._at_ns = None
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        os.close(self.fd)
