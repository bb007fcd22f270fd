"""HTTP server of an ONNX model. Requests and responses are JSON. The size of a request is limited.

    POST /predict   request {"inputs": {NAME: [SAMPLE, ...]}}, response {"outputs": {...}, "predictions": [...]}
    GET  /health    response {"status": "ok"}

The content of requests is parsed only as JSON. It is not unpickled or executed.
"""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Mapping

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from exp.errors import ExpError, RunError
from exp.extras.export.onnx_file import OnnxModel
from exp.extras.export.served_tables import ServedTable
from exp.extras.serve.json_samples import BadRequest, answer_of, read_rows, read_samples

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = ("127.0.0.1", "localhost")
# Maximum size of a request in bytes.
MOST_BYTES = 2**20
# Maximum number of connections and open requests. The response to further requests has the status 503.
MOST_CONNECTIONS = 1024
# Time in seconds that open requests have to complete when the server stops.
GRACE_SECONDS = 20


class AddressError(ExpError):
    """Error that reports an address on which the server cannot listen."""

    exit_status = 2


class ModelServer:
    """Context manager that runs the HTTP server of a model in a thread of this process.

    Args:
        model: The model.
        host: Address to listen on. Default: 127.0.0.1.
        port: Port to listen on. Default: 0, which chooses a free port.

    Attributes:
        address: URL of the server.

    Raises:
        AddressError: The port is in use, or the address is not available.
    """

    def __init__(self, model: OnnxModel, *, host: str = LOOPBACK, port: int = 0) -> None:
        try:
            self._listener = socket.create_server((host, port), backlog=2048)
        except OSError as error:
            reason = f"port {port} of {host}: {error.strerror or error}"
            raise AddressError(f"{reason}; expected a free port. Choose another port= or host=") from error
        self.address = f"http://{host}:{self._listener.getsockname()[1]}"
        # The limit of open files is raised, because each connection is an open file.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        settings = uvicorn.Config(
            Service(model).application(host),
            log_level="error", access_log=False, server_header=False, ws="none", loop="asyncio",
            timeout_graceful_shutdown=GRACE_SECONDS, limit_concurrency=MOST_CONNECTIONS,
        )  # fmt: skip
        self._server = uvicorn.Server(settings)
        # uvicorn cannot handle signals in a thread. The command exp.serve handles them.
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, name="server")

    def __enter__(self) -> ModelServer:
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)
        if not self._server.started:
            raise RunError(f"the server at {self.address} did not start")
        return self

    def __exit__(self, *exception: object) -> None:
        """Reject new connections, complete open requests, and stop the server."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


class Service:
    """Handlers of the HTTP requests for a model.

    Args:
        model: The model.
    """

    def __init__(self, model: OnnxModel) -> None:
        self._model = model
        form = model.description.served_table
        self._table = None if form is None else ServedTable.of(form)

    def application(self, host: str) -> Starlette:
        """Return the ASGI application.

        If the server listens on a loopback address, requests to other host names are rejected, because a malicious
        website can resolve its host name to this machine.

        Args:
            host: Address on which the server listens.
        """
        hosts = list(LOOPBACK_NAMES) if host in LOOPBACK_NAMES else ["*"]
        return Starlette(
            routes=[
                Route("/predict", self._predict, methods=["POST"]),
                Route("/health", self._health),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
            exception_handlers={HTTPException: self._answer_error},
        )

    async def _predict(self, request: Request) -> JSONResponse:
        """Return the response to a request for predictions.

        Raises:
            HTTPException: The request is invalid.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # HTML forms of other websites cannot send requests with this type.
            raise HTTPException(415, f"content-type is {kind or 'missing'}; expected application/json")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise HTTPException(413, f"the body is larger than {MOST_BYTES:,} bytes; send fewer samples at once")
        unknown: Mapping[str, object] = {}
        try:
            if self._table is None:
                samples = read_samples(bytes(body), self._model)
            else:
                samples, unknown = read_rows(bytes(body), self._table, self._model)
            outputs = await run_in_threadpool(self._model, samples)
        except BadRequest as error:
            raise HTTPException(400, str(error)) from error
        except RunError as error:
            raise HTTPException(422, str(error)) from error
        answer = answer_of(outputs, self._model.description)
        return JSONResponse({**answer, "unknown": unknown} if unknown else answer)

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def _answer_error(self, request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)
