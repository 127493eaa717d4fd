"""b2gmodel: where to batch, and how many batches to keep in flight, from one single-flight calibration.

>>> from b2gmodel import mstar
>>> mstar(service_s=0.0276, transport_s=0.0613).m_star
4

Names are loaded when they are first asked for, so that the closed form stays quick to reach.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from b2gmodel.closed_form import ClosedForm, Station, mstar
    from b2gmodel.network import ClosedNetwork, FlowEquivalent
    from b2gmodel.prediction import predict
    from b2gmodel.records import Calibration, Measurement, Plan, Prediction, Verdict
    from b2gmodel.sim.simulation import Simulation
    from b2gmodel.store import read_record

__version__ = "0.1.0"
__all__ = [
    "Calibration",
    "ClosedForm",
    "ClosedNetwork",
    "FlowEquivalent",
    "Measurement",
    "Plan",
    "Prediction",
    "Simulation",
    "Station",
    "Verdict",
    "mstar",
    "predict",
    "read_record",
]

_HOME = {
    "ClosedForm": "closed_form",
    "Station": "closed_form",
    "mstar": "closed_form",
    "ClosedNetwork": "network",
    "FlowEquivalent": "network",
    "Calibration": "records",
    "Measurement": "records",
    "Plan": "records",
    "Prediction": "records",
    "Verdict": "records",
    "predict": "prediction",
    "Simulation": "sim.simulation",
    "read_record": "store",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'b2gmodel' has no attribute {name!r}")
    return getattr(import_module(f"b2gmodel.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
