"""`tokendrop submit`: checks a job before anything is uploaded, hands it to a cluster, follows it."""

import asyncio
import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from tokendrop.config.load import load_job
from tokendrop.errors import UserError
from tokendrop.launch.preflight import (
    DRIVER,
    LEFT_OUT,
    MIB,
    Upload,
    absolute_paths,
    check_job_files,
    check_read,
    check_secrets,
    check_size,
    list_upload,
    warn_about_paths,
)
from tokendrop.output import log, results
from tokendrop.secrets import redact

DEFAULT_ADDRESS = "http://127.0.0.1:8265"

_ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_CONNECT_TIMEOUT_S, _STOP_TIMEOUT_S, _POLL_S = 5.0, 30, 0.2
_LOG_TAIL = 2**16  # characters of the log in which --json looks for the job's result


def submit(
    job: str,
    overrides: Sequence[str],
    *,
    address: str | None,
    working_dir: str,
    wait: bool = True,
    as_json: bool = False,
) -> dict[str, Any]:
    """Run `jobs/run.py train` on the cluster whose dashboard answers at `address`.

    Args:
        as_json: the job prints JSON, which is returned as `result`; its log goes to standard error.
    Returns:
        job (Ray's id), address, status, exit_code (0, 1, 2, 130; None without `wait`) and result.
    Raises:
        UserError: something is wrong that shows before anything is uploaded.
    """
    config = load_job(job, overrides)
    check_secrets(overrides)
    upload = list_upload(working_dir)
    job_inside = check_job_files(job, config, upload)
    check_size(upload)
    client, address = connect_dashboard(address)
    if runs_on_this_machine(client):
        python, overrides = sys.executable, [*overrides, *absolute_paths(config, upload.folder)]
    else:
        python = "python"
        check_read(config, upload)
        warn_about_paths(config)

    check_secrets(overrides)
    command = [python, str(DRIVER), "train", job_inside.as_posix(), *overrides, *(["--json"] if as_json else [])]
    log(f"upload   {upload.size_bytes / MIB:.1f} MiB of {upload.folder}")
    try:
        job_id = hand_over(client, config.name, shlex.join(command), upload)
    except (RuntimeError, requests.RequestException) as error:
        log(f"tokendrop: {address} did not take the job: {_last_line(error)}")
        return {"job": None, "address": address, "status": "REFUSED", "exit_code": 1, "result": None}
    log(f"job      {job_id} on {address}")
    if wait:
        return {"job": job_id, "address": address, **follow(client, job_id, address, as_json=as_json)}
    log(f"follow   ray job logs --follow {job_id} --address {address}")
    return {"job": job_id, "address": address, "status": "SUBMITTED", "exit_code": None, "result": None}


def hand_over(client: JobSubmissionClient, name: str, entrypoint: str, upload: Upload) -> str:
    """Upload the working folder and start the job; Ray's id of it."""
    for handler in logging.getLogger("ray").handlers:  # it would tell of each .gitignore, and of the upload
        handler.setLevel(logging.ERROR)
    # Ray's SIGTERM after 3 s of grace would leave MLflow's run open
    stopping = {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_TIMEOUT_S)}
    return client.submit_job(
        entrypoint=entrypoint,
        runtime_env={"working_dir": str(upload.folder), "excludes": LEFT_OUT, "env_vars": stopping},
        metadata={"job_name": name},
    )


def connect_dashboard(address: str | None) -> tuple[JobSubmissionClient, str]:
    """A client of the dashboard at `address` or RAY_API_SERVER_ADDRESS, and the address it has.

    Raises:
        UserError: nothing answers there, or something that is no Ray dashboard.
    """
    # Ray's client would take either variable over the address that it is given.
    variables = [os.environ.pop(name, "") for name in _ADDRESS_VARIABLES]
    from_variables = next((value for value in variables if value.startswith("http")), DEFAULT_ADDRESS)
    address = address or from_variables
    address = address if "://" in address else f"http://{address}"
    fix = "start one with 'ray start --head', or give the address of its dashboard, http://HOST:8265"
    try:
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise UserError(f"--address {address}: want the address of a Ray dashboard, http://HOST:8265")
        port = url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((url.hostname, port), timeout=_CONNECT_TIMEOUT_S).close()
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"--address {address}: {error}; want http://HOST:8265") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"--address {address}: no Ray cluster answers there ({reason}); {fix}") from None
    try:
        return JobSubmissionClient(address), address.rstrip("/")
    except AuthenticationError:
        raise UserError(
            f"--address {address}: it wants a token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        ) from None
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise UserError(f"--address {address}: what answers is no Ray dashboard ({_last_line(error)}); {fix}") from None


def runs_on_this_machine(client: JobSubmissionClient) -> bool:
    """By the head's session folder, which is here or not; 127.0.0.1 may be a forwarded port."""
    nodes: list[dict[str, Any]] = []
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while not nodes and time.monotonic() < deadline:  # a dashboard answers before it knows of its node
        answer = client._do_request("GET", "/nodes?view=summary")
        nodes = answer.json().get("data", {}).get("summary", []) if answer.ok else []
        time.sleep(0 if nodes else _POLL_S)
    return any(
        node["raylet"].get("isHeadNode") and Path(node["raylet"].get("sessionDir") or "/nowhere").is_dir()
        for node in nodes
    )


def follow(client: JobSubmissionClient, job_id: str, address: str, *, as_json: bool) -> dict[str, Any]:
    """Show the job's log until it ends; Ctrl-C stops the job.

    Returns:
        status, exit_code (of the driver; 1 where it has none, 130 after Ctrl-C) and result.
    """
    stream, tail = sys.stderr if as_json else results(), ""

    def show(lines: str) -> None:
        nonlocal tail
        tail = (tail + lines)[-_LOG_TAIL:]
        stream.write(lines)
        stream.flush()

    try:
        try:
            asyncio.run(_tail_log(client, job_id, show))
            info = _ended(client, job_id)
        except KeyboardInterrupt:
            log(f"\nstopping {job_id}: the cluster was asked to stop the job")
            client.stop_job(job_id)
            return {"status": _ended(client, job_id).status.value, "exit_code": 130, "result": None}
    except (aiohttp.ClientError, requests.RequestException, RuntimeError, OSError) as error:
        log(f"lost {address} ({_last_line(error)}); if the cluster lives, so does the job")
        log(f"follow   ray job logs --follow {job_id} --address {address}")
        return {"status": "UNKNOWN", "exit_code": 1, "result": None}
    code = info.driver_exit_code
    if code is None:  # it never ran, or somebody stopped it
        log(f"tokendrop: the job ended without an exit code: {info.status.value}, {info.message}")
    exit_code = code if code in (0, 1, 2) else 1
    return {"status": info.status.value, "exit_code": exit_code, "result": _result(tail) if as_json else None}


async def _tail_log(client: JobSubmissionClient, job_id: str, show: Callable[[str], None]) -> None:
    async for lines in client.tail_job_logs(job_id):
        show(lines)


def _ended(client: JobSubmissionClient, job_id: str) -> Any:
    """What the cluster knows of the job once it has ended; the log ends a little earlier."""
    while not (info := client.get_job_info(job_id)).status.is_terminal():
        time.sleep(_POLL_S)
    return info


def _result(log: str) -> dict[str, Any] | None:
    """The last JSON object of a log, where standard output and standard error are one."""
    try:
        return json.loads(log[log.rfind("\n{\n") : log.rfind("\n}\n") + 3])
    except ValueError:
        return None


def _last_line(error: Exception) -> str:
    return (redact(str(error)).strip().splitlines() or [type(error).__name__])[-1].rstrip(".")[:200]
