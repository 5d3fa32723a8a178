"""Whether a Ray head answers at an address."""

import os
import socket

import grpc

_CONNECT_S, _ANSWER_S = 10.0, 20.0


def check_answers(address: str) -> None:
    """See whether a gRPC server, such as a Ray head, answers at `[ray://]HOST:PORT`; Ray itself would wait long.

    Raises:
        OSError: none does; a TimeoutError where it takes connections and no more.
    """
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return  # Ray has the certificates
    # Ray does not go by a proxy either
    with grpc.insecure_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_ANSWER_S)
        except grpc.FutureTimeoutError:
            raise TimeoutError(f"it takes connections and does not answer within {_ANSWER_S:g} s") from None
