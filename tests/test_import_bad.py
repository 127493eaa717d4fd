"""Files from strangers: each that carries no answer is one clear line, and nothing is written."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from cli_bench import Out, complained
from foreign_rig import (
    ALONE,
    PLAIN,
    SAMPLES,
    TABLE,
    TIMES,
    TWO,
    cell,
    log,
    log_row,
    plain,
    profile,
    sample,
    table,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from b2gmodel.errors import B2GError
from b2gmodel.foreign import content
from b2gmodel.foreign.answer import answer_of
from b2gmodel.foreign.content import parse_sweep
from b2gmodel.foreign.enough import must_carry, usable
from b2gmodel.foreign.findings import findings_of
from b2gmodel.foreign.join import join


def edited(change: Any) -> str:
    """A profile export after ``change`` of its document."""
    document = json.loads(profile(1, 2))
    change(document)
    return json.dumps(document)


def requests(document: Any) -> Any:
    return document["experiments"][0]["requests"]


def request(document: Any) -> Any:
    return requests(document)[0]


NO_RATE = PLAIN.replace("Inferences/Second", "Requests/Second")
NO_S = PLAIN.replace(",Server Compute Infer", ",Compute")
CLIENT_ONLY = "Concurrency,Inferences/Second,Client Send,Client Recv,p50 latency"
CACHED = PLAIN.replace(",Client Recv", ",Server Cache Hit,Server Cache Miss,Client Recv")
MA = "m,1,{m},m_config_0,1:GPU,8,Yes,{x},12.0,{c},0.5,1.0,4.0,1.0"
MA_ROWS = (MA.format(m=1, x=99, c=10.0), MA.format(m=2, x=160, c=12.5))
ENSEMBLE = log_row(1, 99, 10_000).replace("compute input 1000", "compute 6000 usec)\nComposing models: \n x 1")

# name -> content, exit code, what the line says
BAD: dict[str, tuple[str | bytes, int, str]] = {
    # Not a file of these tools.
    "empty": ("", 2, "the file is empty"),
    "blank": ("\n \n\n", 2, "the file is empty"),
    "html": ("<!DOCTYPE html><html><body>404</body></html>", 2, "HTML or XML"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(50), 2, "a PNG image"),
    "zip": (b"PK\x03\x04" + bytes(50), 2, "a zip archive"),
    "gzip": (b"\x1f\x8b\x08" + bytes(50), 2, "gzip-compressed"),
    "parquet": (b"PAR1" + bytes(50), 2, "a Parquet file"),
    "utf-16": (plain(ALONE).encode("utf-16"), 2, "UTF-16 text"),
    "latin-1": (plain(ALONE).encode() + "Größe".encode("latin-1"), 2, "bytes that are no UTF-8"),
    "NUL bytes": (plain(ALONE).encode() + b"\0\0", 2, "no text: byte 0x00 at offset"),
    "terminal codes": (plain(ALONE).replace("99", "\x1b[31m99"), 2, "no text: byte 0x1b"),
    "underscores": (plain(cell(ALONE, "Server Queue", "5_00")), 2, "not a measured value: saw '5_00'"),
    "prose": ("Dear all, please find the results below.", 2, "this is no file that is read here"),
    "another CSV": ("a,b,c\n1,2,3\n", 2, "this is no file that is read here"),
    "JSON of something else": ('{"a": 1}', 2, "this is no file that is read here"),
    # CSV.
    "header alone": (plain(), 3, "no row was measured"),
    "last line cut off": (plain(ALONE, TWO)[:-30], 2, "another number of cells than the header"),
    "no rate": (plain(ALONE, header=NO_RATE), 2, "this is no file"),
    "one compute column missing": (plain(ALONE, header=NO_S), 2, "no Server Compute Infer"),
    "no concurrency": (plain(ALONE, header=PLAIN.replace("Concurrency", "Threads")), 2, "no Concurrency"),
    "a column twice": (plain(ALONE, header=PLAIN.replace("Client Recv", "Client Send")), 2, "two columns of one name"),
    "quote left open": (plain(ALONE, '"2,160'), 2, "this is no CSV"),
    "request rate": (plain(ALONE, header=PLAIN.replace("Concurrency", "Request Rate")), 3, "so there is no M"),
    "negative time": (plain(cell(ALONE, "Server Queue", -5)), 2, "Server Queue: not a measured value: saw '-5'"),
    "NaN": (plain(cell(ALONE, "Inferences/Second", "nan")), 2, "not a measured value: saw 'nan'"),
    "infinity": (plain(cell(ALONE, "Server Compute Infer", "inf")), 2, "not a measured value: saw 'inf'"),
    "words for numbers": (plain(cell(ALONE, "Client Send", "fast")), 2, "not a measured value: saw 'fast'"),
    "an empty cell": (plain(cell(ALONE, "Client Send", "")), 2, "not a measured value: saw ''"),
    "no throughput": (plain(cell(ALONE, "Inferences/Second", 0)), 3, "nothing was measured"),
    "concurrency 0": (plain(cell(ALONE, "Concurrency", 0)), 2, "at least 1"),
    "concurrency 1.5": (plain(cell(ALONE, "Concurrency", 1.5)), 2, "not a count"),
    "rows that contradict": (plain(ALONE, cell(ALONE, "Inferences/Second", 98)), 3, "contradict each other"),
    "too many rows": (plain(ALONE, *(cell(TWO, "Concurrency", m) for m in range(2, 300))), 2, "too many rows"),
    "no row at 1": (plain(TWO), 3, "no row at concurrency 1"),
    "client columns alone": (plain("1,99,5000,5000,9900", header=CLIENT_ONLY), 3, "no compute times"),
    "server columns 0": (plain("1,99,5000,5000,0,0,0,0,0,1,1,1,1"), 3, "compute times are 0"),
    "network cut off": (plain("1,99,1,0,500,1000,4000,1000,0,1,1,1,1"), 3, "cut off at 0"),
    "cache hits": (plain("1,99,1000,2500,500,1000,4000,1000,300,0,0,1,1,1,1", header=CACHED), 3, "response cache"),
    "milliseconds": (plain("1,99,1,2.5,.5,1,4,1,0,10,11,11,12"), 2, "the batch size is not stated"),
    # Log.
    "log: settings alone": (log(), 3, "no row was measured"),
    "log: row cut off": (log(log_row(1, 99, 10_000))[:150], 2, "the row was cut off"),
    "log: server cut off": (log(log_row(1, 99, 10_000)).partition("compute infer")[0], 2, "times are not there"),
    "log: NaN": (log(log_row(1, 99, 10_000).replace("Throughput: 99", "Throughput: nan")), 2, "saw 'nan'"),
    "log: negative": (log(log_row(1, 99, 10_000).replace("queue 500", "queue -500")), 2, "saw '-500'"),
    "log: not stable": (
        log("Request concurrency: 1\nFailed to obtain stable measurement within 10 measurement windows for concurrency "
            "1. Please try to increase the --measurement-interval.\n", log_row(2, 160, 12_500)),
        3, "concurrency 1 did not stabilise"),
    "log: latency limit": (
        log("Request concurrency: 1\nMeasured latency went over the set limit of 5 msec. \n"), 3, "over 5 ms"),
    "log: request rate": (log("Request Rate: 10 inference requests per second\n"), 3, "so there is no M"),
    "log: decoupled": (
        log(log_row(1, 99, 10_000), settings="  Detected decoupled model, using the first response\n"), 3, "decoupled"),
    "log: service": (log(log_row(1, 99, 10_000), settings="  Service Kind: OPENAI\n"), 3, "Service Kind: OPENAI"),
    "log: ensemble": (log(ENSEMBLE), 3, "an ensemble"),
    "log: failed requests": (log(log_row(1, 99, 10_000), "Thread [0] had error: Socket closed\n"), 3, "failed"),
    "log: batch size": (log(log_row(1, 99, 10_000), settings="  Batch size: 0\n"), 2, "Batch size: not a measured"),
    "log: another batch size": (log(log_row(1, 99, 10_000), settings="  Batch size: 64\n"), 3, "contradicts itself"),
    "log: percentile mode": (
        log(log_row(1, 99, 10_000).replace("Avg latency: 10000 usec (standard deviation 1000 usec)", "")),
        3, "no mean latency"),
    # Profile export.
    "profile: alone": (profile(1, 2), 3, "no compute times"),
    "profile: cut off": (profile(1)[:-40], 2, "no JSON, or cut off"),
    "profile: request rate": (profile(1, mode="request_rate"), 3, "so there is no M"),
    "profile: language model": (profile(1, service_kind="openai", endpoint="v1/chat/completions"), 3, "language model"),
    "profile: streaming": (edited(lambda d: request(d)["response_timestamps"].append(10**18 + 9)), 3, "2 responses"),
    "profile: backwards": (edited(lambda d: request(d).update(response_timestamps=[5])), 2, "before its request"),
    "profile: negative time": (edited(lambda d: request(d).update(timestamp=-1)), 2, "a time in ns"),
    "profile: NaN": (profile(1).replace(f"{10**18}", "NaN", 1), 2, "a number"),
    "profile: no experiments": (profile(), 3, "no row was measured"),
    "profile: nesting": ('{"experiments":' + "[" * 100_000, 2, "no JSON, or cut off"),
    "profile: no answer": (edited(lambda d: [r.update(response_timestamps=[]) for r in requests(d)]),
                           3, "no request was answered"),
    "profile: other shape": (edited(lambda d: d.update(experiments={"a": 1})), 2, "not the form"),
    "GenAI-Perf": ("Metric,avg,min,max,p99\nTime To First Token (ms),10,9,12,12\n", 3, "language models"),
    "GenAI-Perf JSON": ('{"request_throughput": {"avg": 1}, "time_to_first_token": {"avg": 5}}', 3, "language models"),
    # Model Analyzer.
    "table: defaults": (table("m,1,1,m_config_0,1:GPU,8,Yes,99,12.0", header=TABLE), 3, "inference_output_fields"),
    "table: unit": (table(*MA_ROWS, header=f"{TABLE},{TIMES}".replace("Latency (ms)", "Latency (us)")), 2, "(us)"),
    "table: values in us": (table(MA.format(m=1, x=99, c=10000)), 3, "contradicts itself"),
    "table: configurations": (table(*MA_ROWS, MA_ROWS[0].replace("_0", "_1")), 2, "--config m_config_0"),
    "table: batch sizes": (table(*MA_ROWS, MA_ROWS[0].replace("m,1,", "m,8,")), 2, "--batch-size 1"),
    "table: GPU metrics": (table("m,x,1,1,m,1:GPU,Yes,1", header="Model,GPU UUID,Batch,Concurrency,Model Config Path,"
                                 "Instance Group,Satisfies Constraints,GPU Utilization (%)"), 2, "no Throughput"),
    "table: server": (table("triton-server,x,1", header="Model,GPU UUID,GPU Utilization (%)"), 3,
                      "without concurrency"),
    "table: request rate": (table(header=TABLE.replace("Concurrency", "Request Rate")), 3, "Request Rate"),
    "table: several models": (table(MA_ROWS[0].replace("m,1,1", 'm,1,"1,1"')), 3, "several models ran together"),
    "table: None": (table(MA.format(m=1, x="None", c=10.0)), 2, "saw 'None'"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_thirty() -> None:
    assert len(BAD) >= 30


@pytest.mark.parametrize("name", BAD)
def test_one_clear_line_and_nothing_written(name: str, here: Path, capsys: Out) -> None:
    given, code, words = BAD[name]
    Path("sweep.dat").write_bytes(given if isinstance(given, bytes) else given.encode())
    got, line = complained(capsys, "import", "sweep.dat", "--advise")
    assert words in line
    assert "Traceback" not in line
    assert "sweep.dat" in line
    assert len(line) < 500
    assert got == code
    assert os.listdir(here) == ["sweep.dat"]


@pytest.mark.parametrize(
    ("pair", "code", "words"),
    [
        (
            {"a.csv": plain(ALONE, TWO), "b.csv": plain(cell(ALONE, "Inferences/Second", 90))},
            3,
            "contradict each other",
        ),
        ({"a.csv": plain(ALONE), "b.csv": plain(TWO)}, 3, "no concurrency in common"),
        ({"a.csv": plain(ALONE), "b.json": profile(1, latency_ns=12_000_000)}, 3, "contradict each other"),
        ({"a.log": log(log_row(1, 99, 10_000)), "b.csv": table(MA_ROWS[0].replace("m,1,", "m,8,"))}, 2, "batch sizes"),
        ({"a.log": sample("resnet_http.log"), "b.log": sample("yolo_shm.log")}, 3, "contradict each other"),
        ({"a.log": sample("dyn_http.log"), "b.log": sample("yolo_shm.log")}, 2, "different batch sizes"),
    ],
)
def test_files_of_different_runs(pair: dict[str, str], code: int, words: str, here: Path, capsys: Out) -> None:
    for name, text in pair.items():
        Path(name).write_text(text, encoding="utf-8")
    got, line = complained(capsys, "import", *pair)
    assert (got, words in line) == (code, True), line
    assert sorted(os.listdir(here)) == sorted(pair)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-size", "4"], "the file states another batch size"),
        (["--name", "../x"], "--name: this cannot be a name"),
        (["--payload", "12 parsec"], "--payload: not a size"),
        (["--payload", "0KiB"], "--payload: not a size"),
        (["--payload", "9999999999GB"], "--payload: not a size"),
        (["nothing.csv"], "nothing.csv: cannot read the file"),
        (["."], ".: not a regular file"),
        (["resnet.log"] * 8, "FILE: too many files for one run: saw 9"),
    ],
)
def test_wrong_use(options: list[str], words: str, here: Path, capsys: Out) -> None:
    Path("resnet.log").write_text(sample("resnet_http.log"), encoding="utf-8")
    code, line = complained(capsys, "import", "resnet.log", *options)
    assert (code, words in line) == (2, True), line
    assert os.listdir(here) == ["resnet.log"]


def test_a_long_file_is_not_read(here: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("long.csv").open("wb") as stream:
        stream.truncate(content.SIZE_LIMIT_BYTES + 1)
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("it was read"))
    code, line = complained(capsys, "import", "long.csv")
    assert (code, "the file is too long" in line, "<= 268435456 bytes" in line) == (2, True, True)


TEXTS = {path.name: path.read_bytes() for path in sorted(SAMPLES.iterdir()) if path.suffix != ".json"}
TEXTS["short.json"] = profile(1, 2, batches=4).encode()
TEXTS["table.csv"] = table(*MA_ROWS).encode()


def through(raw: bytes) -> None:
    """All that ``b2g import`` does with a text; only errors of ours may leave it."""
    problem = None
    try:
        read = [parse_sweep(raw.decode("utf-8", "replace"), "f")]
        must_carry(read)
        sweep = usable(join(read))
        answer_of(sweep, findings_of(sweep, 1000))
    except B2GError as error:
        problem = error
    assert problem is None or (problem.exit_code in (2, 3) and "\n" not in problem.line())


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(TEXTS)), seed=st.integers(0, 2**32), cuts=st.integers(0, 3), flips=st.integers(0, 6))
def test_a_damaged_sample_is_an_answer_or_one_line(name: str, seed: int, cuts: int, flips: int) -> None:
    chance, raw = random.Random(seed), bytearray(TEXTS[name])
    for _ in range(cuts):
        begin = chance.randrange(len(raw) + 1)
        del raw[begin : begin + chance.choice([1, 10, 1000, 10**6])]
    for _ in range(flips):
        at = chance.randrange(len(raw) + 1)
        raw[at : at + chance.randrange(3)] = chance.choice([b"0", b"-1", b",", b"\n", b"nan", b"1e999", b'"', b"9" * 30,
                                                            b"]", b"{", b":", b"\xff", b" ", b"null"])  # fmt: skip
    through(bytes(raw))


@pytest.mark.parametrize("name", TEXTS)
def test_a_truncated_sample_is_an_answer_or_one_line(name: str) -> None:
    raw = TEXTS[name]
    for end in range(0, len(raw), max(1, len(raw) // 150)):
        through(raw[:end])
