"""What a session of a study states of itself: host, software, clock, and the server as it described itself."""

from __future__ import annotations

import hashlib
import json

from b2gmodel.errors import EvidenceError
from b2gmodel.live.calibrate import model_info
from b2gmodel.live.host import describe_clock, describe_host, describe_software
from b2gmodel.live.kserve import ModelSpec
from b2gmodel.live.study_bench import StudyBench
from b2gmodel.live.study_store import StudyStore
from b2gmodel.live.target import Endpoint
from b2gmodel.records import ServerInfo
from b2gmodel.study_records import Noise, PlannedRun, ServedModel, StudySession


async def begun(
    store: StudyStore,
    run: PlannedRun,
    endpoint: Endpoint,
    bench: StudyBench,
    *,
    begin_ns: int,
    noise: Noise,
    restarted: bool,
    prediction_digest: str | None,
) -> StudySession:
    """A session at its begin.

    Args:
        run: any of the block's.
        begin_ns: on CLOCK_BOOTTIME.
        restarted: whether the server was started for it.
        prediction_digest: of what was frozen before, or None.
    """
    about = await bench.control.server_metadata()
    models = {model.name: model for model in bench.models.values()}
    return StudySession(
        study_digest=store.digest,
        session_id=store.next_session_id(run.block),
        block=run.block,
        session=run.session,
        workload=run.workload,
        transport=run.transport,
        host=describe_host(),
        software=describe_software(),
        clock=describe_clock(),
        server=ServerInfo(
            name=str(about.get("name", "")),
            version=str(about.get("version", "")),
            address=None if restarted else endpoint.address,
            embedded=endpoint.embedded,
        ),
        server_restarted=restarted,
        models=tuple([await _served(bench, model, endpoint) for model in models.values()]),
        warmup_batches=bench.warmup_batches,
        begin_boottime_ns=str(begin_ns),
        noise_before=noise,
        prediction_digest=prediction_digest,
    )


def check_same_server(store: StudyStore, session: StudySession) -> None:
    """Raises ``EvidenceError`` where the server's version or a model's configuration is not as in earlier sessions."""
    for earlier in store.sessions():
        # Not its name: each start of the embedded one has its own.
        if earlier.server.version != session.server.version:
            raise EvidenceError(
                "the server's version is not that of earlier sessions",
                observed=session.server.version,
                allowed=f"{earlier.server.version}, as in {earlier.session_id}",
                where=str(store.folder),
                hint="two servers are never mixed in one study: plan a new study",
            )
        before = {model.info.name: model.digest for model in earlier.models}
        for model in session.models:
            if before.get(model.info.name, model.digest) != model.digest:
                raise EvidenceError(
                    "the model's configuration on the server is not that of earlier sessions",
                    observed=model.digest[:12],
                    allowed=f"{before[model.info.name][:12]}, as in {earlier.session_id}",
                    where=model.info.name,
                    hint="two configurations are never mixed in one study: restore the first, or plan a new study",
                )


async def _served(bench: StudyBench, model: ModelSpec, endpoint: Endpoint) -> ServedModel:
    metadata, config = await bench.control.describe(model.name)
    text = json.dumps({"metadata": metadata, "config": config}, sort_keys=True)
    return ServedModel(
        info=model_info(model, endpoint), digest=hashlib.sha256(text.encode()).hexdigest(), configuration=text
    )
