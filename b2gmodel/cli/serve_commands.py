"""The command that serves: b2g serve."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from b2gmodel.cli.adding import add_command
from b2gmodel.cli.live_view import ended, live_view
from b2gmodel.cli.options import GrpcUrl, Json, Quiet, TlsCert, TlsKey, one_of, parse_shapes
from b2gmodel.cli.output import complain, say_json

if TYPE_CHECKING:
    from b2gmodel.batcher import Placement, Policy
    from b2gmodel.live.exporters import Export
    from b2gmodel.live.observer import Snapshot
    from b2gmodel.live.proxy import Proxy
    from b2gmodel.live.tls import ServerTls


def register(app: typer.Typer) -> None:
    add_command(
        app,
        serve,
        example="b2g serve --url http://localhost:8000 --model resnet50 -k 8 -M 4",
        exits={0: "drained", 3: "not drained in time"},
    )


def serve(
    url: Annotated[str, typer.Option("--url", help="The server's HTTP endpoint, http://HOST:PORT.")],
    model: Annotated[str, typer.Option("--model", help="Model entry on the server.")],
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT to listen on; port 0 takes a free one.")] = (
        "127.0.0.1:0"
    ),
    k: Annotated[int, typer.Option("-k", help="Requests to a full batch.")] = 8,
    flights: Annotated[int, typer.Option("-M", "--flights", help="Most batches in flight at once.")] = 1,
    placement: Annotated[
        str | None,
        typer.Option(
            help="C1 or C2: requests one by one, up to M in flight; C3: M = 1; C4. Default: C3 or C4, by M.",
            autocompletion=one_of("C1", "C2", "C3", "C4"),
        ),
    ] = None,
    formation_deadline: Annotated[
        str,
        typer.Option(
            "--formation-deadline", metavar="TIME", help="A partial batch goes after this time; 'none' waits for k."
        ),
    ] = "5ms",
    queue: Annotated[int, typer.Option("--queue", help="Most requests waiting at once.")] = 256,
    transport: Annotated[
        str,
        typer.Option(
            "--transport", help="To the server: http, grpc or shm.", autocompletion=one_of("http", "grpc", "shm")
        ),
    ] = "http",
    grpc_url: GrpcUrl = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", help="NAME:3,224,224 for an input of dynamic shape, without the batch dimension."),
    ] = None,
    connections: Annotated[int, typer.Option("--connections", help="Most clients at a time.")] = 1024,
    client_requests: Annotated[
        int | None,
        typer.Option(
            "--client-requests",
            help="Requests that one client may have here before it is no longer read. Default: 2 k M, 16 at least.",
        ),
    ] = None,
    frame_timeout: Annotated[
        str,
        typer.Option(
            "--frame-timeout", metavar="TIME", help="Longest time for a frame to come in, or for answers to be read."
        ),
    ] = "30s",
    idle_timeout: Annotated[
        str,
        typer.Option(
            "--idle-timeout", metavar="TIME", help="Longest silence of a client with nothing open; 'none' for any."
        ),
    ] = "10min",
    server_timeout: Annotated[
        str,
        typer.Option(
            "--server-timeout", metavar="TIME", help="Longest time for the server to answer a batch; 'none' for any."
        ),
    ] = "60s",
    drain_timeout: Annotated[
        str,
        typer.Option(
            "--drain-timeout", metavar="TIME", help="Longest time to finish what waits and flies after SIGTERM."
        ),
    ] = "30s",
    allow_public: Annotated[
        bool, typer.Option("--allow-public", help="Listen where others can connect even without TLS: no login.")
    ] = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: Annotated[
        str | None,
        typer.Option(
            "--tls-client-ca", metavar="FILE", help="Only clients with a certificate of this authority come in, PEM."
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            min=0,
            max=65535,
            help="Offer metrics to Prometheus here, on loopback unless --allow-public; 0: a free one.",
        ),
    ] = None,
    otlp: Annotated[
        str | None,
        typer.Option("--otlp", metavar="ENDPOINT", help="Send metrics to this OTLP collector, http://HOST:PORT."),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Run the batching proxy.

    At SIGTERM or SIGINT it finishes what waits and flies, and stops.
    """
    from b2gmodel.live.proxy import ProxyLimits
    from b2gmodel.live.run_loop import run_loop
    from b2gmodel.live.serve import Service
    from b2gmodel.live.serve import serve as run_service
    from b2gmodel.live.target import Endpoint, parse_url
    from b2gmodel.units import parse_duration_s

    server = parse_url(url, grpc_url=grpc_url)
    host, port = _parse_listen(listen)
    limits = ProxyLimits(
        connections=connections,
        client_requests=client_requests,
        frame_timeout_s=parse_duration_s(frame_timeout, where="--frame-timeout"),
        idle_timeout_s=_optional_s(idle_timeout, "--idle-timeout"),
        flight_timeout_s=_optional_s(server_timeout, "--server-timeout"),
    )
    chosen = _placement(placement, flights)
    service = Service(
        endpoint=Endpoint(server.host, server.port, False, None, server.grpc_port),
        model=model,
        shapes=parse_shapes(shape or []),
        transport=transport,
        placement=chosen,
        policy=_policy(chosen, k, flights, queue, formation_deadline),
        limits=limits,
        host=host,
        port=port,
        allow_public=allow_public,
        drain_s=parse_duration_s(drain_timeout, where="--drain-timeout"),
        tls=_tls(tls_cert, tls_key, tls_client_ca),
        export=_export(host if allow_public else "127.0.0.1", metrics_port, otlp),
    )

    def listening(proxy: Proxy, address: tuple[str, int], scrape_url: str | None) -> None:
        _say_listening(proxy, address, transport, scrape_url, json)

    with nullcontext(None) if quiet or json else live_view() as watch:
        end = run_loop(run_service(replace(service, watch=watch), listening))
    _say_ended(end.snapshot, end.finished, json)
    return 0 if end.finished else 3


def _say_listening(proxy: Proxy, address: tuple[str, int], transport: str, scrape_url: str | None, json: bool) -> None:
    """The address first, at once: a caller waits for this line."""
    import sys

    bound, policy = proxy.memory_bound, proxy.policy
    place = "{}:{}".format(*address) if ":" not in address[0] else "[{}]:{}".format(*address)
    if json:
        say_json(
            {
                "listening": place,
                "model": proxy.model.name,
                "transport": transport,
                "k": policy.batch_size,
                "flights": policy.flights,
                "queue": policy.queue_limit,
                "formation_deadline_ns": policy.formation_deadline_ns,
                "memory_bound_bytes": bound.total,
                "payload_bytes": bound.payloads,
                "metrics": scrape_url,
            }
        )
    else:
        patience_ns = policy.formation_deadline_ns
        waits = "waits for k" if patience_ns is None else f"a partial batch goes after {patience_ns / 1e6:g} ms"
        typer.echo(f"listening: {place}")
        typer.echo(f"  model    {proxy.model.name}, {proxy.contract.payload_bytes / 1024:g} KiB a request, {transport}")
        typer.echo(f"  policy   k = {policy.batch_size}, M = {policy.flights}, queue {policy.queue_limit}; {waits}")
        typer.echo(
            f"  memory   at most {bound.total / 2**20:.0f} MiB beside the program: payloads "
            f"{bound.payloads / 2**20:.0f} (taken now), frames {bound.frames / 2**20:.0f}, "
            f"answers not yet read {bound.answers / 2**20:.0f}"
        )
        if scrape_url is not None:
            typer.echo(f"  metrics  {scrape_url}")
    sys.stdout.flush()


def _say_ended(snapshot: Snapshot, finished: bool, json: bool) -> None:
    """One line of counts that balance: requests received are the sum of what became of them."""
    if json:
        counts: dict[str, Any] = {
            "received": snapshot.received,
            "outcomes": {str(outcome): count for outcome, count in snapshot.outcomes.items()},
            "open": snapshot.open,
            "flights": snapshot.flights,
            "flights_failed": snapshot.flights_failed,
            "protocol_errors": snapshot.protocol_errors,
            "shed_connections": snapshot.shed_connections,
            "bytes_in": snapshot.bytes_in,
            "bytes_out": snapshot.bytes_out,
            "finished": finished,
        }
        say_json(counts)
    else:
        typer.echo(
            f"served: {snapshot.received} requests = {ended(snapshot.outcomes.items(), ' + ')}; "
            f"{snapshot.flights} flights, {snapshot.flights_failed} failed; "
            f"{snapshot.protocol_errors} protocol errors, {snapshot.shed_connections} slow readers cut off"
        )
    if not finished:
        complain("not all was finished in time: what was left was broken off, and its clients were told")


def _tls(certificate: str | None, key: str | None, client_ca: str | None) -> ServerTls | None:
    from b2gmodel.errors import UsageError
    from b2gmodel.live.tls import ServerTls

    if certificate is not None and key is not None:
        return ServerTls(certificate, key, client_ca)
    if certificate is None and key is None and client_ca is None:
        return None
    raise UsageError(
        "TLS needs a certificate and its key", where="--tls-cert, --tls-key", hint="give both; --tls-client-ca beside"
    )


def _placement(placement: str | None, flights: int) -> Placement:
    from b2gmodel.batcher import Placement
    from b2gmodel.errors import UsageError

    known = [each.value for each in Placement]
    if placement is not None and placement not in known:
        raise UsageError("not a placement", observed=placement, allowed=", ".join(known), where="--placement")
    chosen = Placement(placement) if placement else (Placement.C3 if flights == 1 else Placement.C4)
    if chosen is Placement.C3 and flights != 1:
        raise UsageError(
            "C3 is single-flight", observed=flights, allowed="1", where="-M", hint="more flights are placement C4"
        )
    return chosen


def _policy(placement: Placement, k: int, flights: int, queue: int, formation_deadline: str) -> Policy:
    from b2gmodel.batcher import Policy
    from b2gmodel.units import ns_from_s

    patience_s = _optional_s(formation_deadline, "--formation-deadline", allow_zero=True)
    return Policy.for_placement(
        placement,
        batch_size=k,
        flights=flights,
        concurrency=flights,
        queue_limit=queue,
        formation_deadline_ns=None if patience_s is None else ns_from_s(patience_s),
    )


def _export(host: str, metrics_port: int | None, otlp: str | None) -> Export | None:
    if metrics_port is None and otlp is None:
        return None
    from b2gmodel.live.exporters import Export, parse_otlp_url

    return Export(host, metrics_port, None if otlp is None else parse_otlp_url(otlp))


def _optional_s(text: str, where: str, *, allow_zero: bool = False) -> float | None:
    from b2gmodel.units import parse_duration_s

    return None if text == "none" else parse_duration_s(text, where=where, allow_zero=allow_zero)


def _parse_listen(text: str) -> tuple[str, int]:
    from b2gmodel.errors import UsageError

    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            "not an address to listen on",
            observed=text,
            allowed="HOST:PORT, with a port from 0 to 65535",
            where="--listen",
            hint="write, for example, --listen 127.0.0.1:8100",
        )
    return host, int(port)
