"""Runs as tasks of a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import warnings
from concurrent.futures import Future
from functools import partial
from typing import Any

from ...errors import Failed, UsageError
from ...options import Cluster
from .. import worker
from . import PATIENCE, Record

RETRIES = 3  # how often a run is repeated if its worker process or node was lost


def _check_address(address: str | None) -> None:
    """Raise UsageError if nothing listens at an address host:port. Ray itself would try to connect for minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit() or "/" in host:  # "auto", "local" or ray://...
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"`ray_address`: no Ray cluster answers at {address} ({error}); start one with ray start --head, or leave "
            "the address out"
        ) from error


class OnRay:
    """Executor on the Ray cluster at an address, or on a new Ray cluster on this machine."""

    def __init__(self, cluster: Cluster, local: bytes | None, command: str) -> None:
        import ray

        self.ray = ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
        self.connected = not ray.is_initialized()
        address = cluster.ray_address or os.environ.get("RAY_ADDRESS") or None
        if self.connected:
            _check_address(address)
            before = signal.getsignal(signal.SIGTERM)
            try:
                ray.init(cluster.ray_address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError) as error:
                why = str(error).partition("\n")[0]
                raise UsageError(f"`ray_address`: no Ray cluster answers ({why})") from error
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)  # Ray installs its own handler
        for name, wanted in {"CPU": cluster.cpus, "GPU": cluster.gpus}.items():
            there = ray.cluster_resources().get(name, 0)
            if wanted > there:
                text = f"each run needs {wanted:g} {name}s and Ray has {there:g}"
                if self.connected and address is None:  # the cluster was started here, so no node will be added
                    ray.shutdown()
                    raise UsageError(f"{text}; lower `{name.lower()}s`, or name a larger cluster by `ray_address`")
                warnings.warn(f"{text}: runs wait until it has more", stacklevel=2)
        task = ray.remote(num_cpus=cluster.cpus, num_gpus=cluster.gpus, max_retries=RETRIES)(worker.make_elsewhere)
        self.start = partial(task.remote, local, command)
        self.refs: dict[Future[Record], Any] = {}

    def submit(self, *job: Any) -> Future[Record]:
        future: Future[Record] = Future()
        future.set_running_or_notify_cancel()
        self.refs[future] = ref = self.start(*job)
        ref.future().add_done_callback(partial(self._settle, future))
        return future

    def _settle(self, future: Future[Record], done: Future[Any]) -> None:
        del self.refs[future]
        try:
            worker.settle(future, done.result())
        except Exception as error:  # an error of Ray; the run itself returns its errors as a result
            why = str(error).partition("\n")[0]
            future.set_exception(Failed(f"Ray lost a run {RETRIES + 1} times: {why}; the same command resumes"))

    def stop(self) -> None:
        for ref in list(self.refs.values()):
            self.ray.cancel(ref)

    def shutdown(self) -> None:
        if self.refs:
            refs = list(self.refs.values())
            self.ray.wait(refs, num_returns=len(refs), timeout=PATIENCE)
        if self.connected:
            self.ray.shutdown()
