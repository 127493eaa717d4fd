"""The table of workloads: what the built-in one says, what a user's may not say, and the fingerprint."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from b2gmodel.errors import UsageError
from b2gmodel.live.repository import TensorSpec, embedded_repository, export_null_model
from b2gmodel.live.workloads import BUILT_IN_TABLE, Role, fingerprint, load_workloads

ENTRY = {
    "input_shape": "[3, 4]",
    "datatype": '"FP32"',
    "output_shape": "[8]",
    "s0_ms": "1.5",
    "s1_ms": "2",
    "max_batch": "4",
    "instances": "1",
}


def written(folder: Path, section: str = "tiny", **changes: str | None) -> Path:
    fields = {key: value for key, value in {**ENTRY, **changes}.items() if value is not None}
    path = folder / "table.toml"
    path.write_text(f"[{section}]\n" + "".join(f"{key} = {value}\n" for key, value in fields.items()))
    return path


def test_built_in_table_has_the_published_payloads() -> None:
    table = load_workloads()
    kib = {workload.name: workload.payload_bytes / 1024 for workload in table.workloads}
    assert kib == {"resnet50": 588, "mobilenetv2": 588, "yolov5s": 2028, "yolov8n": 4800}


@pytest.mark.parametrize(
    ("name", "unbatched_per_s", "x_per_s", "share"),
    [("resnet50", 251, 448, 0.32), ("yolov8n", 123.7, 90, 0.69)],
)
def test_service_times_reproduce_the_published_figures(
    name: str, unbatched_per_s: float, x_per_s: float, share: float
) -> None:
    workload = load_workloads()[name]
    assert 1 / workload.service_time_s(1) == pytest.approx(unbatched_per_s, rel=0.002)
    assert workload.service_time_s(8) == pytest.approx(8 / x_per_s * (1 - share), rel=0.003)


def test_service_time_refuses_a_batch_that_the_model_would() -> None:
    workload = load_workloads()["resnet50"]
    for k in (0, -1, 33):
        with pytest.raises(ValueError, match=r"k must be 1\.\.32"):
            workload.service_time_s(k)


def test_digest_depends_on_content_only(tmp_path: Path) -> None:
    plain = load_workloads(written(tmp_path)).digest
    path = written(tmp_path, s1_ms="2.0")
    path.write_text("# a comment\n" + path.read_text())
    assert load_workloads(path).digest == plain
    assert load_workloads(written(tmp_path, s1_ms="2.001")).digest != plain


def test_users_table_has_the_built_in_form(tmp_path: Path) -> None:
    path = tmp_path / "copy.toml"
    path.write_bytes(BUILT_IN_TABLE.read_bytes())
    assert load_workloads(path) == load_workloads()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"s0_ms": "-1"}, "[tiny] s0_ms: not usable: saw -1; allowed: a number of milliseconds, 0 to 600000"),
        ({"s1_ms": "nan"}, "[tiny] s1_ms: not usable: saw nan"),
        ({"s1_ms": "inf"}, "[tiny] s1_ms: not usable: saw inf"),
        ({"s0_ms": '"2ms"'}, "[tiny] s0_ms: not usable: saw '2ms'"),
        ({"s0_ms": "true"}, "[tiny] s0_ms: not usable: saw True"),
        ({"max_batch": "0"}, "[tiny] max_batch: not usable: saw 0; allowed: a whole number, 1 to 1024"),
        ({"max_batch": "2.0"}, "[tiny] max_batch: not usable: saw 2.0"),
        ({"instances": "65"}, "[tiny] instances: not usable: saw 65"),
        ({"datatype": '"FP31"'}, "[tiny] datatype: not usable: saw 'FP31'; allowed: UINT8"),
        ({"input_shape": "[]"}, "[tiny] input_shape: not usable: saw []"),
        ({"input_shape": "[3, 0]"}, "[tiny] input_shape: not usable: saw [3, 0]"),
        ({"input_shape": "3"}, "[tiny] input_shape: not usable: saw 3"),
        ({"input_shape": "[1073741824]"}, "[tiny] input_shape: a request too large to emulate"),
        ({"output_shape": "[3]"}, "[tiny] output_shape: too few elements to carry a fingerprint"),
        ({"s2_ms": "1"}, "[tiny]: no such field: saw 's2_ms'; allowed: datatype, input_shape, instances"),
        ({"s1_ms": None}, "[tiny]: a field is missing: saw 's1_ms'; add s1_ms = ..."),
    ],
)
def test_bad_entry_is_one_clear_line(tmp_path: Path, changes: dict[str, str | None], says: str) -> None:
    path = written(tmp_path, "tiny", **changes)
    with pytest.raises(UsageError) as caught:
        load_workloads(path)
    assert caught.value.line().startswith(f"{path}: {says}")


@pytest.mark.parametrize("name", ["'a b'", "'../x'", "resnet_null", "resnet_dynamic", "''"])
def test_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not a workload name"):
        load_workloads(written(tmp_path, name))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[tiny", "not a TOML file"),
        (b"\xff\xfe", "not a TOML file"),
        (b"", "the table has no workload"),
        (b"tiny = 3", "not a workload: saw 3"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "table.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=says):
        load_workloads(path)


def test_missing_file_and_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the table of workloads"):
        load_workloads(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="allowed: resnet50, mobilenetv2, yolov5s, yolov8n"):
        load_workloads()["resnet51"]


def test_fingerprint_by_hand() -> None:
    assert struct.unpack("<4f", fingerprint(bytes.fromhex("01000200 10000000 0f"))) == (1, 2, 0x1E, 2)
    with pytest.raises(ValueError, match="empty"):
        fingerprint(b"")


@given(st.binary(min_size=1, max_size=70))
def test_fingerprint_is_its_definition(payload: bytes) -> None:
    words = [int.from_bytes(payload[i : i + 4], "little") for i in range(0, len(payload), 4)]
    mixed = 0
    for word in words:
        mixed ^= word
    parts = (words[0] & 0xFFFF, words[0] >> 16, mixed & 0xFFFF, mixed >> 16)
    assert struct.unpack("<4f", fingerprint(payload)) == parts


@given(st.binary(min_size=1, max_size=70), st.data())
def test_fingerprint_shows_any_flipped_bit(payload: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, len(payload) * 8 - 1))
    flipped = bytearray(payload)
    flipped[bit // 8] ^= 1 << bit % 8
    assert fingerprint(flipped) != fingerprint(payload)


def test_every_model_says_that_it_is_emulated() -> None:
    table = load_workloads()
    files = embedded_repository(table, ["yolov8n"], Path("/somewhere"))
    configs = {path.split("/")[0]: text for path, text in files.items() if path.endswith(".pbtxt")}
    assert set(configs) == {table["yolov8n"].model_name(role) for role in Role}
    for name, text in configs.items():
        assert 'key: "b2g_compute" value { string_value: "emulated" }' in text
        assert f'key: "b2g_table_digest" value {{ string_value: "{table.digest}" }}' in text
        assert 'output { name: "emulated_output" data_type: TYPE_FP32 dims: [300, 6] }' in text
        assert ("dynamic_batching" in text) is name.endswith("_dynamic")
    assert 'key: "b2g_s1_ns" value { string_value: "2790000" }' in configs["yolov8n"]
    assert 'key: "b2g_s1_ns" value { string_value: "0" }' in configs["yolov8n_null"]
    for path, text in files.items():
        if path.endswith(".py"):
            compile(text, path, "exec")
            assert json.dumps("/somewhere").replace('"', "'") in text


def test_offering_nothing_or_the_unknown_is_refused() -> None:
    table = load_workloads()
    with pytest.raises(UsageError, match="no workload to offer"):
        embedded_repository(table, [], Path("/somewhere"))
    with pytest.raises(UsageError, match="no such workload: saw 'vgg'"):
        embedded_repository(table, ["vgg"], Path("/somewhere"))


def test_export_of_a_null_model(tmp_path: Path) -> None:
    inputs, outputs = [TensorSpec("images", "FP16", (3, -1, -1))], [TensorSpec("label", "BYTES", (5,))]
    target = export_null_model(tmp_path / "repository", "mine", inputs, outputs, 16)
    assert target == tmp_path / "repository" / "mine_null"
    text = (target / "config.pbtxt").read_text()
    assert "max_batch_size: 16\n" in text
    assert 'input { name: "images" data_type: TYPE_FP16 dims: [3, -1, -1] }' in text
    assert 'output { name: "label" data_type: TYPE_STRING dims: [5] }' in text
    with pytest.raises(UsageError, match="the null model is there already"):
        export_null_model(tmp_path / "repository", "mine", inputs, outputs, 16)


@pytest.mark.parametrize(
    ("spec", "max_batch", "says"),
    [
        (TensorSpec("x", "FP31", (3,)), 1, "x: not a datatype"),
        (TensorSpec("x", "FP32", (0,)), 1, "x: not a shape"),
        (TensorSpec("x", "FP32", (3,)), -1, "not a batch size"),
    ],
)
def test_export_refuses(tmp_path: Path, spec: TensorSpec, max_batch: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        export_null_model(tmp_path / "r", "mine", [spec], [spec], max_batch)
    assert not (tmp_path / "r").exists()
