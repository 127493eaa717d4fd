"""The command that puts load on a proxy: b2g load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from b2gmodel.cli.adding import add_command
from b2gmodel.cli.options import Json, Quiet, TlsCert, TlsKey, one_of, parse_shapes
from b2gmodel.cli.output import progress_lines, say, say_json

if TYPE_CHECKING:
    from b2gmodel.live.load import ClosedLoop, LoadResult, OpenLoop
    from b2gmodel.live.tensors import TensorSpec
    from b2gmodel.live.tls import ClientTls

_BUSY_GENERATOR = 0.9


def register(app: typer.Typer) -> None:
    add_command(
        app,
        load,
        example="b2g load --to 127.0.0.1:8100 --model resnet50 --shape input:3,224,224 --clients 16 --verify",
        exits={3: "nothing was answered, or an answer was wrong"},
    )


def load(
    to: Annotated[str, typer.Option("--to", help="The proxy, HOST:PORT.")],
    model: Annotated[str, typer.Option("--model", help="Model that the proxy serves.")],
    shape: Annotated[
        list[str],
        typer.Option("--shape", help="NAME:3,224,224 for each input of a request, without the batch dimension."),
    ],
    datatype: Annotated[
        list[str] | None,
        typer.Option("--datatype", help="Of the inputs; NAME:DATATYPE for one of them.", show_default="FP32"),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option("--clients", help="Closed loop: clients, each with one request open.", show_default="16"),
    ] = None,
    think: Annotated[
        str, typer.Option("--think", metavar="TIME", help="Closed loop: a client's pause after each answer.")
    ] = "0s",
    rate: Annotated[
        float | None, typer.Option("--rate", help="Open loop: requests a second, whether answers come or not.")
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            "--arrivals", help="Open loop: poisson or constant.", autocompletion=one_of("poisson", "constant")
        ),
    ] = "poisson",
    connections: Annotated[
        int,
        typer.Option(
            "--connections", help="Open loop: requests open at once, more than the proxy's queue and flights hold."
        ),
    ] = 512,
    duration: Annotated[str, typer.Option("--duration", metavar="TIME", help="How long requests are sent.")] = "10s",
    warmup: Annotated[
        str, typer.Option("--warmup", metavar="TIME", help="Begin of the duration that figures leave out.")
    ] = "1s",
    deadline: Annotated[
        str, typer.Option("--deadline", metavar="TIME", help="Given to each request; 'none' for none.")
    ] = "none",
    patience: Annotated[
        str, typer.Option("--patience", metavar="TIME", help="Longest wait for the last answers.")
    ] = "10s",
    seed: Annotated[int, typer.Option("--seed", help="Of payloads and arrivals.")] = 0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare answers with the reference workloads' fingerprints.")
    ] = False,
    hdr: Annotated[
        Path | None, typer.Option("--hdr", help="Write the latencies to a new file, as an HdrHistogram log.")
    ] = None,
    tls_ca: Annotated[
        str | None,
        typer.Option("--tls-ca", metavar="FILE", help="Speak TLS; who may sign the proxy's certificate, PEM."),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Put load on a proxy, closed loop or open."""
    from b2gmodel.live.load import LoadSpec, run_load
    from b2gmodel.live.target import parse_url
    from b2gmodel.units import parse_duration_s

    proxy = parse_url(to, where="--to")
    spec = LoadSpec(
        host=proxy.host,
        port=proxy.port,
        model=model,
        inputs=_inputs(shape, datatype or []),
        loop=_loop(clients, think, rate, arrivals, connections),
        duration_s=parse_duration_s(duration, where="--duration"),
        warmup_s=parse_duration_s(warmup, where="--warmup", allow_zero=True),
        deadline_s=None if deadline == "none" else parse_duration_s(deadline, where="--deadline"),
        patience_s=parse_duration_s(patience, where="--patience"),
        seed=seed,
        verify=verify,
        tls=_tls(tls_ca, tls_cert, tls_key),
    )
    with progress_lines(quiet or json) as progress:
        result = run_load(spec, progress)
    if hdr is not None:
        result.write_hdr_log(hdr)
    if json:
        say_json({**result.to_dict(), "throughput_per_s": result.throughput_per_s})
    else:
        say("\n".join(_lines(result)))
    return 3 if result.wrong_answers or not result.window_answers else 0


def _inputs(shapes: list[str], datatypes: list[str]) -> tuple[TensorSpec, ...]:
    from b2gmodel.errors import UsageError
    from b2gmodel.live.tensors import TensorSpec

    dims = parse_shapes(shapes)
    default, own = "FP32", {}
    for text in datatypes:
        name, colon, kind = text.rpartition(":")
        if not colon:
            default = kind
        elif name in dims:
            own[name] = kind
        else:
            raise UsageError("no such input", observed=name, allowed=", ".join(dims), where="--datatype")
    return tuple(TensorSpec(name, own.get(name, default), shape) for name, shape in dims.items())


def _tls(ca: str | None, certificate: str | None, key: str | None) -> ClientTls | None:
    from b2gmodel.errors import UsageError
    from b2gmodel.live.tls import ClientTls

    if ca is not None:
        return ClientTls(ca, certificate, key)
    if certificate is None and key is None:
        return None
    raise UsageError("TLS needs to know whom to trust", where="--tls-cert, --tls-key", hint="give --tls-ca FILE, too")


def _loop(clients: int | None, think: str, rate: float | None, arrivals: str, most: int) -> ClosedLoop | OpenLoop:
    from b2gmodel.errors import UsageError
    from b2gmodel.live.load import ClosedLoop, OpenLoop
    from b2gmodel.live.load_plan import Arrivals
    from b2gmodel.units import parse_duration_s

    if rate is None:
        return ClosedLoop(16 if clients is None else clients, parse_duration_s(think, where="--think", allow_zero=True))
    if clients is not None:
        raise UsageError(
            "a load is either a closed loop or an open one",
            observed="--clients and --rate",
            allowed="one of them",
            where="--rate",
        )
    known = [each.value for each in Arrivals]
    if arrivals not in known:
        raise UsageError("no such arrivals", observed=arrivals, allowed=", ".join(known), where="--arrivals")
    return OpenLoop(rate, Arrivals(arrivals), most)


def _lines(result: LoadResult) -> list[str]:
    """The answer, a line a fact, what next."""
    from b2gmodel.live.load_tally import LATE_NS, LoadOutcome

    counts = {outcome: count for outcome, count in result.outcomes.items() if count}
    times, answered = result.latency, result.outcomes[LoadOutcome.ANSWERED]
    short = f"p50 {_ms(times.p50_ns)}, p99 {_ms(times.p99_ns)}" if times else "no latency"
    became = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none"
    lines = [f"load: {result.throughput_per_s:.1f} request/s, {short}; {result.sent} requests: {became}"]
    lines.append(f"  loop       {_loop_words(result)}")
    if times:
        named = {"p50": times.p50_ns, "p90": times.p90_ns, "p95": times.p95_ns, "p99": times.p99_ns}
        named |= {"p99.9": times.p999_ns, "max": times.max_ns}
        words = ", ".join(f"{name} {_ms(time_ns)}" for name, time_ns in named.items())
        lines.append(f"  latency    {words}; of {times.count} requests")
    lines += [f"  {outcome:<10} {count} ({count / result.sent:.2%})" for outcome, count in counts.items()]
    lines += [f"  connection {count} ended: {reason}" for reason, count in result.lost_reasons.items()]
    if result.wrong_answers is not None:
        lines.append(f"  verified   {answered - result.wrong_answers} right answers, {result.wrong_answers} wrong")
    if result.lateness is not None:
        lines.append(
            f"  schedule   {result.late} sent over {_ms(LATE_NS)} late (p99 {_ms(result.lateness.p99_ns)}), "
            f"{result.starved} had no free connection, {result.unsent} never sent"
        )
    lines.append(f"  generator  {result.cpu_share:.0%} of a core, {result.distinct_payloads} payloads in memory")
    lines.append(f"next: {_next(result)}")
    return lines


def _loop_words(result: LoadResult) -> str:
    from b2gmodel.live.load import ClosedLoop

    loop, spec = result.spec.loop, result.spec
    if isinstance(loop, ClosedLoop):
        words = f"closed, {loop.clients} clients" + (f" that think {loop.think_s:g} s" if loop.think_s else "")
    else:
        words = f"open, {loop.arrivals} at {loop.rate_per_s:g} request/s over {loop.connections} connections"
    return f"{words}; {spec.duration_s:g} s, the first {spec.warmup_s:g} s left out"


def _next(result: LoadResult) -> str:
    from b2gmodel.live.load_tally import LoadOutcome

    if result.wrong_answers:
        return "answers are wrong: nothing measured here counts until they are right"
    if not result.window_answers:
        return "nothing was answered in the steady window: see the outcomes, or load for longer"
    if result.unsent or result.starved:
        return "raise --connections, or lower --rate: while none was free, the proxy saw less load than was meant"
    if result.cpu_share > _BUSY_GENERATOR:
        return "the generator itself was busy: share the load between two of them"
    if result.outcomes[LoadOutcome.BUSY]:
        return "the proxy turned requests away: lower the load, or raise its --queue or -M"
    return f"compare with the proxy's own count, which it says at its end: {result.sent} requests"


def _ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:.3g} ms"
