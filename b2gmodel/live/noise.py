"""What else goes on on this host, as a session begins and ends: it cannot be taken out of figures, but it is stated."""

from __future__ import annotations

import os
import time
from typing import Final

import numpy as np

from b2gmodel.study_records import Noise
from b2gmodel.units import s_from_ns

_SLEEPS: Final = 200
_SLEEP_S: Final = 0.001


def measure_noise() -> Noise:
    """How late 200 sleeps of a millisecond end, and the load average. Takes a quarter of a second."""
    late_ns = []
    for _ in range(_SLEEPS):
        due_ns = time.monotonic_ns() + round(_SLEEP_S * 1e9)
        time.sleep(_SLEEP_S)
        late_ns.append(time.monotonic_ns() - due_ns)
    p50_ns, p99_ns = np.quantile(late_ns, (0.5, 0.99))
    return Noise(
        overshoot_p50_s=s_from_ns(float(p50_ns)), overshoot_p99_s=s_from_ns(float(p99_ns)), load_1min=os.getloadavg()[0]
    )
