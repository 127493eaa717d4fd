"""Plans of studies: what a TOML file becomes, in which order, and what is refused before anything is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import b2gmodel
from b2gmodel.errors import UsageError
from b2gmodel.records import canonical_bytes
from b2gmodel.study_estimate import planned_s, remaining_s, run_s
from b2gmodel.study_plan import plan_study
from b2gmodel.study_records import Cell, EmulatedCompute, Study

SHIPPED = Path(b2gmodel.__file__).parent / "studies"
KNOWN = {
    name: EmulatedCompute(
        input_shape=shape, datatype="FP32", output_shape=(4,), s0_s=0.002, s1_s=0.001, max_batch=32, instances=1
    )
    for name, shape in {
        "resnet50": (3, 224, 224),
        "mobilenetv2": (3, 224, 224),
        "yolov5s": (3, 416, 416),
        "yolov8n": (3, 640, 640),
    }.items()
}
PLAN = """
name = "plan"
placements = ["C1", "C3"]
k = [4]
concurrency = [2, 8]
[[workload]]
name = "resnet50"
"""


def planned(text: str = PLAN, **changes: object) -> Study:
    return plan_study(text, KNOWN, lambda placement, _clients: ("ab" if placement == "C1" else "cd") * 32,
                      where="plan.toml", changes=changes)  # fmt: skip


def cells(study: Study) -> list[tuple[str, int, int, int]]:
    found = dict.fromkeys(run.cell for run in study.runs)
    return sorted((cell.placement, cell.k, cell.flights, cell.concurrency) for cell in found)


class TestShipped:
    @pytest.mark.parametrize("name", [path.stem for path in SHIPPED.glob("*.toml")])
    def test_each_is_named_as_its_file_and_runs_nothing_twice(self, name: str) -> None:
        study = planned((SHIPPED / f"{name}.toml").read_text())
        assert study.name == name
        assert len({run.run_id for run in study.runs}) == len(study.runs)

    def test_the_published_shape(self) -> None:
        study = planned((SHIPPED / "published.toml").read_text())
        per_cell = Counter((run.workload, run.cell) for run in study.runs)
        assert (len(study.runs), len(study.blocks), len(study.workloads)) == (3960, 40, 4)
        assert set(per_cell.values()) == {30}
        assert len(per_cell) == 4 * 3 * 11
        assert {cell.placement for _, cell in per_cell} == {"C1", "C2", "C3"}
        assert study.notes == ("C3 with fewer clients than k gathers as many as there are: k = c at c = 1, 2, 4",)

    def test_the_crossover_ladder_differs_in_bytes_alone(self) -> None:
        study = planned((SHIPPED / "crossover.toml").read_text())
        sizes = [workload.payload_bytes or 0 for workload in study.workloads]
        assert sizes == sorted(sizes) != []
        assert (sizes[0], sizes[-1]) == (588 * 1024, 4800 * 1024)
        assert len({workload.emulated.model_copy(update={"input_shape": (1,)}).model_dump_json()
                    for workload in study.workloads if workload.emulated is not None}) == 1  # fmt: skip


class TestCells:
    def test_each_placement_has_its_own(self) -> None:
        text = PLAN.replace('["C1", "C3"]', '["D0", "C1", "C2", "C3", "C4"]') + ""
        assert cells(planned(text, flights=[2])) == [
            ("C1", 1, 2, 2), ("C1", 1, 8, 8), ("C2", 1, 2, 2), ("C2", 1, 8, 8), ("C3", 2, 1, 2), ("C3", 4, 1, 8),
            ("C4", 4, 2, 8), ("D0", 1, 2, 2), ("D0", 1, 8, 8),
        ]  # fmt: skip

    def test_what_is_left_out_is_said(self) -> None:
        study = planned(PLAN.replace('"C1", "C3"', '"C4"'), flights=[2])
        assert cells(study) == [("C4", 4, 2, 8)]
        assert study.notes == ("C4 is left out where k M > c: at c = 2 some or all of its cells",)

    def test_batches_narrowed_to_the_same_are_one_cell(self) -> None:
        assert cells(planned(k=[4, 8], placements=["C3"], concurrency=[2, 8])) == [
            ("C3", 2, 1, 2),
            ("C3", 4, 1, 8),
            ("C3", 8, 1, 8),
        ]

    def test_ids_are_readable_and_in_blocks(self) -> None:
        study = planned(sessions=1, concurrency=[8], placements=["C3"])
        (run,) = study.runs
        assert (run.run_id, run.block) == ("s0-resnet50-http-C3-k4-M1-c8-r0", "s0-resnet50-http")


class TestOrder:
    def test_it_is_fixed_by_the_seed(self) -> None:
        assert canonical_bytes(planned(seed=5)) == canonical_bytes(planned(seed=5))
        orders = {tuple(run.run_id for run in planned(seed=seed, concurrency=[2, 4, 6, 8]).runs) for seed in range(5)}
        assert len(orders) == 5

    def test_each_repetition_runs_all_cells_before_the_next(self) -> None:
        study = planned(repetitions=3, sessions=2, transports=["http", "shm"])
        assert len(study.blocks) == 4
        for runs in study.blocks.values():
            assert [run.repetition for run in runs] == [0] * 4 + [1] * 4 + [2] * 4
            for repetition in range(3):
                of_it = [run.cell for run in runs if run.repetition == repetition]
                assert len(set(of_it)) == len(of_it) == 4
        assert [run.session for run in study.runs] == sorted(run.session for run in study.runs)

    def test_orders_differ_between_repetitions(self) -> None:
        study = planned(repetitions=8, sessions=1, concurrency=[1, 2, 3, 4])
        orders = [tuple(run.cell for run in study.runs if run.repetition == each) for each in range(8)]
        assert len(set(orders)) > 1


class TestWorkloads:
    def test_a_reference_workload_is_as_the_table_has_it(self) -> None:
        (workload,) = planned().workloads
        assert workload.emulated == KNOWN["resnet50"]
        assert workload.payload_bytes == 588 * 1024
        assert (workload.model, workload.dynamic_model, workload.null_model) == (
            "resnet50", "resnet50_dynamic", "resnet50_null",
        )  # fmt: skip

    def test_the_fake_stands_in_and_says_so(self) -> None:
        study = planned(server={"kind": "fake"})
        assert study.workloads[0].payload_bytes == 1024
        assert study.notes[0].startswith("the fake server stands in for resnet50: requests of 1 KiB")

    def test_a_server_of_ones_own(self) -> None:
        study = planned(
            server={"kind": "url", "url": "http://host:8000"},
            placements=["C2"],
            workload=[{"name": "w", "model": "m", "dynamic_model": "m_d", "shapes": {"x": [3, 4]}}],
        )
        (workload,) = study.workloads
        assert (workload.model, workload.dynamic_model, workload.payload_bytes) == ("m", "m_d", None)
        assert workload.shapes == {"x": (3, 4)}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t + "x = 1", "plan.toml: no such key: saw 'workload.0.x'; allowed: name, model"),
        (lambda t: "colour = 1\n" + t, "plan.toml: no such key: saw 'colour'; allowed: name, seed, server"),
        (lambda t: t + "[server]\nport = 1", "plan.toml: no such key: saw 'server.port'; allowed: kind, url, grpc_url"),
        (lambda t: t.replace('name = "plan"', ""), "plan.toml: a key is missing: saw 'name'; add name = ..."),
        (lambda t: t + "[", "plan.toml: not a TOML file"),
        (lambda t: "seed = -1\n" + t, "plan.toml: seed: not usable: saw '-1'"),
        (lambda t: 'seed = "1"\n' + t, "plan.toml: seed: not usable"),
        (lambda t: "seconds_per_run = nan\n" + t, "plan.toml: seconds_per_run: not usable"),
        (lambda t: "seconds_per_run = 0\n" + t, "plan.toml: seconds_per_run: not usable"),
        (lambda t: t.replace("[2, 8]", "[]"), "plan.toml: concurrency: not usable"),
        (lambda t: t.replace("[2, 8]", "[2, 2]"), "plan.toml: concurrency: a value is named twice"),
        (lambda t: t.replace("[2, 8]", "[0]"), "plan.toml: concurrency.0: not usable"),
        (lambda t: t.replace('"C3"', '"C9"'), "plan.toml: placements.1: not usable"),
        (lambda t: t.replace("k = [4]", ""), "plan.toml: C3 needs k"),
        (lambda t: "flights = [2]\n" + t, "plan.toml: flights: flights are for C4 alone"),
        (lambda t: "flights = [1]\n" + t.replace('"C3"', '"C4"'), "plan.toml: flights: one flight is placement C3"),
        (lambda t: "flights = [3]\n" + t.replace('"C3"', '"C4"'), "plan.toml: C4 with fewer clients than its flights"),
        (lambda t: 'clients = "process"\n' + t.replace('"C1"', '"D0"'), "plan.toml: D0 has no proxy"),
        (lambda t: t.replace("resnet50", "resnet51"), "plan.toml: workload resnet51: no such reference workload"),
        (lambda t: t + "payload_kib = 3", "plan.toml: workload resnet50: a reference workload is as the table has it"),
        (lambda t: t + "s0_ms = 3", "plan.toml: workload resnet50: s0_ms and s1_ms go together"),
        (lambda t: t + "s0_ms = 3\ns1_ms = 1", "plan.toml: workload resnet50: a workload with times of its own needs"),
        (lambda t: t + 'model = "m"', "plan.toml: workload resnet50: model is for a server of your own"),
        (lambda t: t + '[[workload]]\nname = "resnet50"', "plan.toml: a workload is named twice"),
        (lambda t: t.replace('"resnet50"', '"a_null"'), "plan.toml: workload a_null: not a workload's name"),
        (lambda t: t + '[server]\nkind = "url"', "plan.toml: server: a server's address goes with kind = url"),
        (lambda t: 'transports = ["shm"]\n' + t + '[server]\nkind = "fake"', "plan.toml: transports: the fake server"),
        (lambda t: 'transports = ["grpc"]\n' + t + '[server]\nkind = "url"\nurl = "h:1"', "plan.toml: server: the"),
        (
            lambda t: t.replace("C3", "C2") + '[server]\nkind = "url"\nurl = "h:1"',
            "plan.toml: workload resnet50: C2 needs the model's entry with dynamic batching",
        ),
    ],
)  # fmt: skip
def test_refused(change: Callable[[str], str], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned(change(PLAN))
    assert caught.value.line().startswith(line)
    assert "\n" not in caught.value.line()


class TestEstimate:
    def test_short_runs_last_as_long_as_their_rounds(self) -> None:
        study = planned(seconds_per_run=0.001)
        by_cell = {run.cell: run_s(study, run) for run in study.runs}
        slow = Cell(placement="C1", k=1, flights=8, concurrency=8)
        # Five rounds of eight requests of 3 ms each.
        assert by_cell[slow] == pytest.approx(5 * 8 * 0.003 + 0.1)

    def test_all_is_the_sum_of_its_parts(self) -> None:
        study = planned()
        per_run = sum(run_s(study, run) for run in study.runs)
        assert planned_s(study) == pytest.approx(per_run + len(study.blocks) * 8.0)

    def test_what_is_left_follows_what_was_seen(self) -> None:
        study = planned(sessions=2, placements=["C1"], concurrency=[2, 8])
        seen = {run.run_id: 2 * run_s(study, run) for run in study.runs if run.session == 0}
        missing = [run for run in study.runs if run.session == 1]
        expected = sum(2 * run_s(study, run) for run in missing) + 3.0
        assert remaining_s(study, missing, seen, beside_s=3.0) == pytest.approx(expected)
        # A kind of run that was never seen is as far off its plan as the others were.
        some = {key: value for key, value in seen.items() if "-c2-" in key}
        assert remaining_s(study, missing, some, beside_s=3.0) == pytest.approx(expected)
        assert remaining_s(study, [], seen, beside_s=3.0) == 0.0
