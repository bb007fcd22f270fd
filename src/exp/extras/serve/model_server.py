"""Serve an ONNX file over HTTP: JSON in and out, micro-batches, limits, metrics, and a page to try it.

    POST /predict   {"inputs": {NAME: [SAMPLE, ...]}} to {"outputs": {...}, "classes": {...}, "predictions": [...]}
    GET  /model     inputs, outputs and classes    GET /health    GET /metrics (Prometheus)    GET / a page to try it

starlette answers, uvicorn listens, prometheus-client counts. Nothing that a request holds is unpickled or run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from exp.errors import ExpError, MissingExtraError, RunError
from exp.extras.export.onnx_file import OnnxModel
from exp.extras.export.served_tables import ServedTable
from exp.extras.serve.json_samples import BadRequest, answer_of, described, read_rows, read_samples
from exp.extras.serve.micro_batches import Closed, MicroBatches, QueueFull
from exp.extras.serve.try_page import PAGE, SCRIPT, STYLE

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
EXTRA = "serve"
FIRST_PORT, PORTS = 8000, 100
# For a body to arrive, and for requests under way when the server ends.
BODY_SECONDS, GRACE_SECONDS = 30.0, 20
JSON = "application/json"
# A page may load what this server has, and nothing else.
HEADERS = {"content-security-policy": "default-src 'self'", "x-content-type-options": "nosniff"}
MODEL_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server takes.

    batch: samples of one call of the model. wait_ms: for which a request waits for others. queue: samples that wait.
    samples: of one request. body: bytes of one request.
    """

    batch: int = 64
    wait_ms: float = 2.0
    queue: int = 1024
    samples: int = 256
    body: int = 2**20


class ModelServer:
    """A server of one model, in threads of this process.

    model: of an ONNX file. host, port: None is the first free port from 8000 on, 0 any free one.
    address: an attribute, http://127.0.0.1:8000.
    Raises: MissingExtraError; RunError where the address cannot be had.
    """

    def __init__(
        self, model: OnnxModel, *, host: str = LOOPBACK, port: int | None = None, limits: Limits | None = None
    ) -> None:
        uvicorn = _required("uvicorn")
        self.limits = limits or Limits()
        self._listener = _listen(host, port)
        name = f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{self._listener.getsockname()[1]}"
        _allow_connections()
        app = application(model, limits=self.limits, hosts=LOOPBACK_NAMES if host in LOOPBACK_NAMES else ("*",))
        settings = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            ws="none",
            loop="asyncio",
        )
        self._server = uvicorn.Server(settings)
        # In a thread uvicorn leaves the signals alone: they are the command's.
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, name="server")

    def __enter__(self) -> ModelServer:
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)
        if not self._server.started:
            raise RunError(f"the server at {self.address} did not start")
        return self

    def __exit__(self, *exception: object) -> None:
        """Take no new connection, answer the requests that have come, and end."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


def application(model: OnnxModel, *, limits: Limits, hosts: tuple[str, ...]) -> Any:
    """The ASGI application of a model, by starlette. hosts: names by which it may be called.

    Other names are refused, for a page in a browser may have a name of its own that means this machine.
    """
    applications, routing = _required("starlette.applications"), _required("starlette.routing")
    middleware = _required("starlette.middleware")
    trusted = _required("starlette.middleware.trustedhost").TrustedHostMiddleware
    service = Service(model, limits=limits)

    def route(path: str, method: str, answer: Callable[[Any], Awaitable[tuple[int, Any, str]]]) -> Any:
        return routing.Route(path, service.endpoint(answer), methods=[method])

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        await service.batches.close()

    async def failed(request: Any, error: Any) -> Any:
        return service.respond(error.status_code, {"error": f"{request.method} {request.url.path}: {error.detail}"})

    return applications.Starlette(
        routes=[
            route("/predict", "POST", service.predict),
            route("/model", "GET", service.model_spec),
            route("/health", "GET", service.health),
            route("/metrics", "GET", service.metrics),
            route("/", "GET", service.page),
            route("/page.js", "GET", service.script),
            route("/page.css", "GET", service.style),
        ],
        middleware=[middleware.Middleware(trusted, allowed_hosts=list(hosts), www_redirect=False)],
        exception_handlers={_required("starlette.exceptions").HTTPException: failed},
        lifespan=lifespan,
    )


class Service:
    """What the paths answer: a status, a content and its type."""

    def __init__(self, model: OnnxModel, *, limits: Limits) -> None:
        self.model, self.limits = model, limits
        form = model.description.table
        self.table = None if form is None else ServedTable.of(form)
        self._responses = _required("starlette.responses")
        self.counters = Counters()
        joins = all(port.has_free_batch for port in model.inputs)
        self.batches = MicroBatches(
            self._call,
            most=limits.batch,
            wait_ms=limits.wait_ms,
            limit=limits.queue,
            joins=joins,
            observe=self.counters.called,
        )
        self.counters.waiting.set_function(lambda: self.batches.counts.waiting)

    def _call(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return self.model(inputs)

    def endpoint(self, answer: Callable[[Any], Awaitable[tuple[int, Any, str]]]) -> Any:
        """The same as starlette calls it."""

        async def respond(request: Any) -> Any:
            status, content, kind = await answer(request)
            return self.respond(status, content, kind)

        return respond

    def respond(self, status: int, content: Any, kind: str = JSON) -> Any:
        """A response, with the content as JSON where it is none yet."""
        body = content if isinstance(content, bytes) else json.dumps(content, allow_nan=False).encode()
        headers = {**HEADERS, **({"retry-after": "1"} if status == 503 else {})}
        return self._responses.Response(body, status, headers=headers, media_type=kind)

    async def predict(self, request: Any) -> tuple[int, Any, str]:
        """An answer, or the reason why there is none."""
        start = time.perf_counter()
        status, content = await self._predict(request)
        self.counters.answered(status, time.perf_counter() - start)
        return status, content, JSON

    async def _predict(self, request: Any) -> tuple[int, Any]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON:
            return 415, _reason(f"content-type is {kind or 'missing'}; expected {JSON}")
        try:
            body = await asyncio.wait_for(self._body(request), BODY_SECONDS)
            if body is None:
                return 413, _reason(f"the body is larger than {self.limits.body:,} bytes; send fewer samples at once")
            unknown: Mapping[str, Any] = {}
            if self.table is None:
                samples = read_samples(body, self.model, most=self.limits.samples)
            else:
                samples, unknown = read_rows(body, self.table, self.model, most=self.limits.samples)
            outputs = await self.batches.submit(samples)
        except TimeoutError:
            return 408, _reason(f"the body did not arrive within {BODY_SECONDS:g} s")
        except BadRequest as error:
            return 400, _reason(str(error))
        except RunError as error:
            return 422, _reason(str(error))
        except (QueueFull, Closed) as error:
            return 503, _reason(f"{error}; ask again in a second")
        answer = answer_of(outputs, self.model.description)
        return 200, {**answer, "unknown": unknown} if unknown else answer

    async def _body(self, request: Any) -> bytes | None:
        """None where it is larger than the limit, of which no more than that is read."""
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.limits.body:
            return None
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.limits.body:
                return None
        return bytes(body)

    async def model_spec(self, request: Any) -> tuple[int, Any, str]:
        told = self.model.description
        found = {
            "run": told.run,
            "inputs": self.table.described() if self.table else [described(port, told) for port in self.model.inputs],
            "outputs": [described(port, told) for port in self.model.outputs],
            "classes": list(told.classes),
            "target_scale": told.target_scale,
            "quantization": told.quantization,
        }
        return 200, found, JSON

    async def health(self, request: Any) -> tuple[int, Any, str]:
        return 200, {"status": "ok", "waiting_samples": self.batches.counts.waiting}, JSON

    async def metrics(self, request: Any) -> tuple[int, Any, str]:
        content, kind = self.counters.text()
        return 200, content, kind

    async def page(self, request: Any) -> tuple[int, Any, str]:
        return 200, PAGE.encode(), "text/html; charset=utf-8"

    async def script(self, request: Any) -> tuple[int, Any, str]:
        return 200, SCRIPT.encode(), "text/javascript; charset=utf-8"

    async def style(self, request: Any) -> tuple[int, Any, str]:
        return 200, STYLE.encode(), "text/css; charset=utf-8"


class Counters:
    """What Prometheus reads: requests by status, seconds, samples of a call, what waits."""

    def __init__(self) -> None:
        client = self._client = _required("prometheus_client", package="prometheus-client")
        self._registry = client.CollectorRegistry()
        given = {"registry": self._registry}
        self._requests = client.Counter("exp_requests", "Requests to /predict", ["status"], **given)
        self._seconds = client.Histogram("exp_request_seconds", "Of a request to /predict", **given)
        self._batches = client.Histogram("exp_batch_samples", "Of one call", buckets=BATCH_SIZES, **given)
        self._model = client.Histogram("exp_model_seconds", "Of one call", buckets=MODEL_SECONDS, **given)
        self.waiting = client.Gauge("exp_waiting_samples", "Samples in the queue or under way", **given)

    def answered(self, status: int, seconds: float) -> None:
        self._requests.labels(status=str(status)).inc()
        self._seconds.observe(seconds)

    def called(self, samples: int, seconds: float) -> None:
        self._batches.observe(samples)
        self._model.observe(seconds)

    def text(self) -> tuple[bytes, str]:
        """The numbers in Prometheus' text format, and its content type."""
        content: bytes = self._client.generate_latest(self._registry)
        return content, str(self._client.CONTENT_TYPE_LATEST)


class AddressError(ExpError):
    """The server cannot listen where it was told to."""

    exit_status = 2


def _listen(host: str, port: int | None) -> socket.socket:
    """A bound socket. Raises: AddressError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = range(FIRST_PORT, FIRST_PORT + PORTS) if port is None else [port]
    for wanted in ports:
        try:
            return socket.create_server((host, wanted), family=family, backlog=2048)
        except OSError as error:
            reason = error.strerror or str(error)
        except OverflowError:
            reason = "a port is a number from 0 to 65535"
    what = f"ports {ports[0]} to {ports[-1]}" if port is None else f"port {port}"
    raise AddressError(
        f"{what} of {host}: {reason}; expected a free one. Choose another port=, or host=, or leave it out"
    )


def _allow_connections() -> None:
    """Let the process have as many files open as it may: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _reason(text: str) -> dict[str, str]:
    return {"error": text}


def require_packages() -> None:
    """Raises: MissingExtraError where one of them is not installed."""
    for module in ("starlette", "uvicorn"):
        _required(module)
    _required("prometheus_client", package="prometheus-client")


def _required(module: str, *, package: str | None = None) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module.partition(".")[0]
        raise MissingExtraError(feature="exp.serve", package=name, extra=EXTRA) from error
