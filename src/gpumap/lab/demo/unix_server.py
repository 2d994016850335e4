"""A gRPC server on a Unix socket that answers in bytes: the base of the fakes of kubelets and of their neighbours."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

GRACE_SECONDS = 0.1
"""For calls under way. Without it gRPC reports an error to its clients, and they write it to stderr."""

Context = grpc.aio.ServicerContext[bytes, bytes]


class UnixServer:
    """Answers every method with `answer`. May be started again after it was stopped, and then has a new inode."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.calls: Counter[str] = Counter()
        self._server: grpc.aio.Server | None = None

    @property
    def running(self) -> bool:
        return self._server is not None

    async def answer(self, method: str, request: bytes, context: Context) -> bytes:
        """One call, as bytes: a fake may answer bytes that are no protobuf."""
        raise NotImplementedError

    def handler(self) -> grpc.GenericRpcHandler:
        return _EveryMethod(self)

    async def start(self) -> None:
        """Listen as CreateListener does (k/k pkg/kubelet/util/util_unix.go): under a temporary name, then rename."""
        if self._server is not None:
            raise RuntimeError("the server is running already")
        self.socket_path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        temporary = self.socket_path.with_name(f".{secrets.token_hex(4)}.sock")
        if len(os.fsencode(temporary)) > 107:
            raise OSError(f"{temporary}: longer than a Unix socket's path may be (107 bytes)")
        server = grpc.aio.server(options=[("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers([self.handler()])
        server.add_insecure_port(f"unix:{temporary}")
        await server.start()
        self.socket_path.unlink(missing_ok=True)
        temporary.rename(self.socket_path)
        self._server = server

    async def stop(self, leave_socket: bool = False) -> None:
        """Stop listening, and soon cut off calls. A killed kubelet leaves its socket, which then refuses."""
        server, self._server = self._server, None
        if server is None:
            return
        await server.stop(GRACE_SECONDS)
        if not leave_socket:
            self.socket_path.unlink(missing_ok=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


class _EveryMethod(grpc.GenericRpcHandler):
    """Every method there is: grpc's own answer to an unknown one has other words than a kubelet's."""

    def __init__(self, server: UnixServer) -> None:
        self._server = server

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        method = handler_call_details.method

        async def answer(request: bytes, context: Context) -> bytes:
            return await self._server.answer(method, request, context)

        return grpc.unary_unary_rpc_method_handler(answer)
