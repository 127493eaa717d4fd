"""The server that a study's block runs on: the embedded Triton, the fake server, or one that runs already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

from b2gmodel.live.fake import Delays, FakeModel, FakeScript, FakeServer, FakeTensor
from b2gmodel.live.target import EmbeddedTarget, Endpoint, RemoteTarget, Target, parse_url
from b2gmodel.live.workloads import Role, Workload, WorkloadTable, load_workloads
from b2gmodel.study_records import EmulatedCompute, PlacementName, Study, StudyServer, StudyWorkload
from b2gmodel.units import ns_from_s

_INPUT: Final = "input"


def reference_workloads() -> Mapping[str, EmulatedCompute]:
    """The built-in table, as a study's manifest holds it."""
    return {
        each.name: EmulatedCompute(
            input_shape=each.input_shape,
            datatype=each.datatype,
            output_shape=each.output_shape,
            s0_s=each.s0_s,
            s1_s=each.s1_s,
            max_batch=each.max_batch,
            instances=each.instances,
        )
        for each in load_workloads().workloads
    }


@dataclass(frozen=True, slots=True)
class FakeTarget:
    """Our own fake server, started afresh for each session."""

    models: tuple[FakeModel, ...]
    restarts: bool = True

    def session(self, models: Sequence[str]) -> AbstractContextManager[Endpoint]:
        return self._session()

    @contextmanager
    def _session(self) -> Iterator[Endpoint]:
        with FakeServer.start(FakeScript(self.models)) as server:
            address = parse_url(server.address)
            yield Endpoint(address.host, address.port, False, None)


def target_of(study: Study) -> Target:
    """The study's server, with all its workloads."""
    match study.server.kind:
        case "embedded":
            return EmbeddedTarget(WorkloadTable(tuple(_emulated(each) for each in study.workloads)))
        case "fake":
            return FakeTarget(tuple(model for each in study.workloads for model in _fakes(each)))
        case "url":
            return _remote(study.server)


def model_of(workload: StudyWorkload, placement: PlacementName) -> str:
    """The server's model entry that a placement addresses."""
    if placement != "C2":
        return workload.model
    assert workload.dynamic_model is not None, "the plan refuses C2 without it"
    return workload.dynamic_model


def _remote(server: StudyServer) -> RemoteTarget:
    assert server.url is not None, "the plan refuses kind = url without it"
    return parse_url(server.url, where="server.url", grpc_url=server.grpc_url)


def _emulated(workload: StudyWorkload) -> Workload:
    compute = _compute(workload)
    return Workload(
        name=workload.name,
        input_shape=compute.input_shape,
        datatype=compute.datatype,
        output_shape=compute.output_shape,
        s0_s=compute.s0_s,
        s1_s=compute.s1_s,
        max_batch=compute.max_batch,
        instances=compute.instances,
    )


def _fakes(workload: StudyWorkload) -> Iterator[FakeModel]:
    """The three entries as the fake shows them; it never merges, so that its C2 is a C1."""
    compute = _compute(workload)
    delays = Delays(compute_infer_base_ns=ns_from_s(compute.s0_s), compute_infer_per_row_ns=ns_from_s(compute.s1_s))
    for role in Role:
        yield FakeModel(
            name=workload.model if role is Role.UNBATCHED else f"{workload.model}_{role.value}",
            inputs=(FakeTensor(_INPUT, compute.datatype, compute.input_shape),),
            max_batch=compute.max_batch,
            instances=compute.instances,
            dynamic_batching=role is Role.DYNAMIC,
            delays=Delays() if role is Role.NULL else delays,
        )


def _compute(workload: StudyWorkload) -> EmulatedCompute:
    assert workload.emulated is not None, "the plan gives each workload of ours its compute"
    return workload.emulated
