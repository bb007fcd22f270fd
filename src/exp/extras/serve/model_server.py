"""Serves an ONNX file over HTTP: JSON in and out, micro-batches, limits, metrics, and a page to try it.

    POST /predict   {"inputs": {NAME: [SAMPLE, ...]}} to {"outputs": {...}, "classes": {...}, "predictions": [...]}
    GET  /model     inputs, outputs and classes    GET /health    GET /metrics (Prometheus)    GET / a page to try it

Nothing in a request is unpickled or run.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import prometheus_client
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from exp.errors import ExpError, RunError
from exp.extras.export.onnx_file import OnnxModel
from exp.extras.export.served_tables import ServedTable
from exp.extras.serve.json_samples import BadRequest, answer_of, described, read_rows, read_samples
from exp.extras.serve.micro_batches import MicroBatches, UnavailableError
from exp.extras.serve.try_page import PAGE, SCRIPT

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
PORTS = range(8000, 8100)
# The time for a body to arrive, and for open requests when the server ends.
BODY_SECONDS, GRACE_SECONDS = 30.0, 20
# The page may load only what this server has.
HEADERS = {"content-security-policy": "default-src 'self'", "x-content-type-options": "nosniff"}
MODEL_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class AddressError(ExpError):
    """The server cannot listen on its address."""

    exit_status = 2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server takes.

    Args:
        batch: The samples of one call of the model.
        wait_ms: The time for which a request waits for others.
        queue: The samples that may wait.
        samples: The samples of one request.
        body: The bytes of one request.
    """

    batch: int = 64
    wait_ms: float = 2.0
    queue: int = 1024
    samples: int = 256
    body: int = 2**20


class ModelServer:
    """A server of one model in a thread of this process. `address` is its URL.

    Args:
        model: The model.
        host: The address to listen on.
        port: None takes the first free port from 8000 on, 0 any free port.
        limits: What the server takes.

    Raises:
        AddressError: The address is not free.
    """

    def __init__(
        self, model: OnnxModel, *, host: str = LOOPBACK, port: int | None = None, limits: Limits | None = None
    ) -> None:
        self._listener = _listen(host, port)
        name = f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{self._listener.getsockname()[1]}"
        # Each connection is an open file.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        settings = uvicorn.Config(
            Service(model, limits=limits or Limits()).application(host),
            log_level="error", access_log=False, server_header=False, ws="none", loop="asyncio",
            timeout_graceful_shutdown=GRACE_SECONDS,
        )  # fmt: skip
        self._server = uvicorn.Server(settings)
        # In a thread uvicorn does not handle signals, which the command does.
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, name="server")

    def __enter__(self) -> ModelServer:
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)
        if not self._server.started:
            raise RunError(f"the server at {self.address} did not start")
        return self

    def __exit__(self, *exception: object) -> None:
        """Accept no new connection, answer the open requests, and end."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


class Service:
    """Answers the requests for a model."""

    def __init__(self, model: OnnxModel, *, limits: Limits) -> None:
        self._model, self._limits = model, limits
        form = model.description.table
        self._table = None if form is None else ServedTable.of(form)
        registry = self._registry = prometheus_client.CollectorRegistry()
        Counter, Histogram = prometheus_client.Counter, prometheus_client.Histogram
        self._requests = Counter("exp_requests", "Requests to /predict", ["status"], registry=registry)
        self._seconds = Histogram("exp_request_seconds", "Of a request to /predict", registry=registry)
        self._samples = Histogram("exp_batch_samples", "Of one call", buckets=BATCH_SIZES, registry=registry)
        self._calls = Histogram("exp_model_seconds", "Of one call", buckets=MODEL_SECONDS, registry=registry)
        waiting = prometheus_client.Gauge("exp_waiting_samples", "Queued or in a call", registry=registry)
        self._batches = MicroBatches(
            model,
            most=limits.batch, wait_ms=limits.wait_ms, limit=limits.queue, observe=self._observe,
            joins=all(port.has_free_batch for port in model.inputs),
        )  # fmt: skip
        waiting.set_function(lambda: self._batches.waiting)

    def application(self, host: str) -> Starlette:
        """Return the ASGI application.

        On a loopback address it refuses other host names: a page of another site may use its own name for this machine.
        """
        hosts = list(LOOPBACK_NAMES) if host in LOOPBACK_NAMES else ["*"]

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await self._batches.close()

        return Starlette(
            routes=[
                Route("/predict", self._predict, methods=["POST"]),
                Route("/model", self._describe),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/", lambda request: Response(PAGE, headers=HEADERS, media_type="text/html")),
                Route("/page.js", lambda request: Response(SCRIPT, headers=HEADERS, media_type="text/javascript")),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
            exception_handlers={HTTPException: self._failed},
            lifespan=lifespan,
        )

    async def _predict(self, request: Request) -> Response:
        start = time.perf_counter()
        status, content = await self._answer(request)
        self._requests.labels(status=str(status)).inc()
        self._seconds.observe(time.perf_counter() - start)
        headers = {**HEADERS, "retry-after": "1"} if status == 503 else HEADERS
        return JSONResponse(content, status, headers=headers)

    async def _answer(self, request: Request) -> tuple[int, dict[str, Any]]:
        """Return the status, and the answer or the reason for which there is none."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return 415, {"error": f"content-type is {kind or 'missing'}; expected application/json"}
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._body(request)
            if body is None:
                return 413, {
                    "error": f"the body is larger than {self._limits.body:,} bytes; send fewer samples at once"
                }
            unknown: Mapping[str, Any] = {}
            if self._table is None:
                samples = read_samples(body, self._model, most=self._limits.samples)
            else:
                samples, unknown = read_rows(body, self._table, self._model, most=self._limits.samples)
            outputs = await self._batches.submit(samples)
        except TimeoutError:
            return 408, {"error": f"the body did not arrive within {BODY_SECONDS:g} s"}
        except BadRequest as error:
            return 400, {"error": str(error)}
        except RunError as error:
            return 422, {"error": str(error)}
        except UnavailableError as error:
            return 503, {"error": f"{error}; ask again in a second"}
        answer = answer_of(outputs, self._model.description)
        return 200, {**answer, "unknown": unknown} if unknown else answer

    async def _body(self, request: Request) -> bytes | None:
        """Return the body; None if it is larger than the limit, beyond which nothing is read."""
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._limits.body:
            return None
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._limits.body:
                return None
        return bytes(body)

    def _observe(self, samples: int, seconds: float) -> None:
        self._samples.observe(samples)
        self._calls.observe(seconds)

    async def _describe(self, request: Request) -> Response:
        about = self._model.description
        inputs = [described(port, about) for port in self._model.inputs]
        found = {
            "run": about.run,
            "inputs": self._table.described() if self._table else inputs,
            "outputs": [described(port, about) for port in self._model.outputs],
            "classes": list(about.classes),
            "target_scale": about.target_scale,
            "quantization": about.quantization,
        }
        return JSONResponse(found, headers=HEADERS)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "waiting_samples": self._batches.waiting}, headers=HEADERS)

    async def _metrics(self, request: Request) -> Response:
        content = prometheus_client.generate_latest(self._registry)
        return Response(content, headers=HEADERS, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def _failed(self, request: Request, error: HTTPException) -> Response:
        content = {"error": f"{request.method} {request.url.path}: {error.detail}"}
        return JSONResponse(content, error.status_code, headers=HEADERS)


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a bound socket.

    Raises:
        AddressError: No port is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = ""
    for wanted in PORTS if port is None else [port]:
        try:
            return socket.create_server((host, wanted), family=family, backlog=2048)
        except OSError as error:
            reason = error.strerror or str(error)
    what = f"ports {PORTS[0]} to {PORTS[-1]}" if port is None else f"port {port}"
    raise AddressError(f"{what} of {host}: {reason}; expected a free one. Choose another port= or host=")
