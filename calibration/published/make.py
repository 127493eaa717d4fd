"""Write the published study's figures (batch2go.json) as calibrations and measurements. What it does not state is null.

python calibration/published/make.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from b2gmodel.records import Calibration, CalibrationPoint, Estimate, Measurement, ModelInfo, Run, Session, TensorInfo
from b2gmodel.store import write_record

HERE = Path(__file__).parent
SOURCE = "Batch2go (Hong and Peng, National Chung Hsing University, 2026), published figures"


def model_info(workload: dict[str, Any]) -> ModelInfo:
    """What the study states of a model."""
    return ModelInfo(
        name=workload["model"],
        compute="real",
        compute_table_digest=None,
        platform=None,
        max_batch_size=None,
        instances=None,
        dynamic_batching=None,
        inputs=(TensorInfo(name=None, datatype=None, shape=tuple(workload["input"])),),
    )


def calibration(workload: dict[str, Any]) -> Calibration:
    """Transport share and single-flight throughput; k, S and D in seconds are not stated."""
    share = workload["transport_share"]
    alone = workload.get("X_at_M", {}).get("1")
    point = CalibrationPoint(
        k=None,
        payload_bytes=workload["payload_kib"] * 1024,
        transport_share=None if share is None else Estimate(mean=share),
        throughput_per_s=None if alone is None else float(alone),
    )
    return Calibration(
        name=f"batch2go-{workload['model']}",
        source=SOURCE,
        host=None,
        software=None,
        clock=None,
        server=None,
        model=model_info(workload),
        transport=None,
        session_ids=(),
        points=(point,),
        raw=None,
        notes=("the batch size and the number of instances are not stated",),
    )


def measurement(workload: dict[str, Any]) -> Measurement | None:
    """X(M) and X without batching; None where the study states none."""
    runs = [
        _run("C3" if flights == "1" else "C4", int(flights), throughput_per_s)
        for flights, throughput_per_s in workload.get("X_at_M", {}).items()
    ]
    if not runs:
        return None
    session = Session(
        session_id="published",
        boot_id=None,
        begin_boottime_ns=None,
        server_restarted=False,
        warmup_batches=None,
        runs=(*runs, _run("C1", 1, workload["X_unbatched"])),
    )
    return Measurement(
        name=f"batch2go-{workload['model']}-measured",
        prediction_digest=None,
        preregistered=False,
        source=SOURCE,
        host=None,
        software=None,
        clock=None,
        server=None,
        model=model_info(workload),
        transport=None,
        k=None,
        payload_bytes=workload["payload_kib"] * 1024,
        sessions=(session,),
        raw=None,
    )


def _run(placement: Any, flights: int, throughput_per_s: float) -> Run:
    return Run(placement=placement, flights=flights, throughput_per_s=float(throughput_per_s))


def main(folder: Path) -> None:
    """Write all records into ``folder``; files that hold the same already are left alone."""
    study = json.loads((HERE / "batch2go.json").read_text(encoding="utf-8"))
    for workload in study["workloads"]:
        print(write_record(folder / f"{workload['model']}.json", calibration(workload)))
        measured = measurement(workload)
        if measured is not None:
            print(write_record(folder / f"{workload['model']}-measured.json", measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
