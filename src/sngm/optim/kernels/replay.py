"""The launches of a step as one CUDA graph: for the host one launch in place of two or three.

The graphs are made by CUDA's driver itself. torch.cuda.CUDAGraph tells the allocator and the random number generator
that a capture is under way, at which other threads that draw random numbers fail, and its stream may be in use.
Nothing here allocates or draws, so neither needs to know, and the stream is of our own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

import torch

ENABLED = True  # a switch for measurements and tests, read when a plan is made
MOST = 4  # graphs of one plan: addresses of a loss scale or of mean norms take turns; more than that are launched
STALE = 100  # steps without a graph after which another may take its place: more than MOST in turns make none anew
NON_BLOCKING, RELAXED = 1, 2
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, c_void_p),
    "cuGraphGetNodes": (c_void_p, c_void_p, c_void_p),
    "cuGraphInstantiateWithFlags": (c_void_p, c_void_p, c_ulonglong),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphDestroy": (c_void_p,),
}


@functools.cache
def driver() -> Any:
    """CUDA's driver, or None where there is none that we would use."""
    version = torch.version.cuda  # None on AMD's devices
    # before 12.6 a second profile of a process that has graphs may crash it, see torch/profiler/profiler.py
    if version is None or tuple(map(int, version.split(".")[:2])) < (12, 6):
        return None
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in FUNCTIONS.items():
            getattr(library, name).argtypes = arguments
    except (OSError, AttributeError):
        return None
    return library


def serves(device: torch.device) -> bool:
    """Whether steps on this device may be replayed."""
    return ENABLED and device.type == "cuda" and driver() is not None


def check(error: int) -> None:
    """Raise what the driver returned."""
    if error:
        raise RuntimeError(f"CUDA driver error {error}")


@contextlib.contextmanager
def relaxed(cuda: Any) -> Iterator[None]:
    """Let this thread make and destroy graphs even while another one captures."""
    mode = c_int(RELAXED)
    check(cuda.cuThreadExchangeStreamCaptureMode(byref(mode)))
    try:
        yield
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(byref(mode))


class Graph:
    """Launches that have been compiled, in their order; what they read and write stays where it is."""

    working = True  # until making one fails: then never again

    def __init__(self, launches: Sequence[Any], pool: dict[str, Any]) -> None:
        if any(launch.compiled is None for launch in launches):
            raise RuntimeError("a launch that has still to be compiled would run, and not be captured")
        cuda = driver()
        self.kept = launches  # which hold the code
        handle, stream, graph, nodes = c_void_p(), c_void_p(), c_void_p(), c_size_t()
        with relaxed(cuda):
            try:
                check(cuda.cuStreamCreate(byref(stream), NON_BLOCKING))
                check(cuda.cuStreamBeginCapture_v2(stream, RELAXED))
                try:
                    for launch in launches:
                        launch(pool, stream.value)
                finally:
                    ended = cuda.cuStreamEndCapture(stream, byref(graph))
                check(ended)
                check(cuda.cuGraphGetNodes(graph, None, byref(nodes)))
                if nodes.value != len(launches):
                    raise RuntimeError(f"{len(launches)} launches became {nodes.value} nodes of a graph")
                check(cuda.cuGraphInstantiateWithFlags(byref(handle), graph, 0))
            finally:
                if graph:
                    cuda.cuGraphDestroy(graph)
                if stream:
                    cuda.cuStreamDestroy_v2(stream)
        self.handle, self.launch = handle, cuda.cuGraphLaunch
        weakref.finalize(self, destroy, handle, os.getpid()).atexit = False  # everything goes then

    def __call__(self, stream: int | None) -> bool:
        """Go through the launches on a stream; False where the driver refused, and nothing was launched."""
        return bool(self.launch(self.handle, stream) == 0)


def destroy(handle: c_void_p, process: int) -> None:
    """Give a graph back, which may still be running; a fork of the process that made it has none."""
    if os.getpid() == process:
        with contextlib.suppress(RuntimeError), relaxed(cuda := driver()):
            cuda.cuGraphExecDestroy(handle)


class Replays:
    """The graphs of one plan, by the addresses of what may be another tensor at each step."""

    def __init__(self) -> None:
        self.graphs: dict[tuple[int, ...], Graph] = {}
        self.recent: deque[tuple[int, ...]] = deque(maxlen=MOST)
        self.steps = 0
        self.used: dict[tuple[int, ...], int] = {}  # at which step a graph was last of use

    def run(self, addresses: tuple[int, ...], stream: int | None) -> bool:
        """Replay the step with these addresses, if there is a graph of it."""
        self.steps += 1
        graph = self.graphs.get(addresses)
        if graph is None or not graph(stream):
            return False
        self.used[addresses] = self.steps
        return True

    def learn(self, addresses: tuple[int, ...], launches: Sequence[Any], pool: dict[str, Any]) -> None:
        """Make a graph of launches just made, if a step shortly before had the same addresses."""
        if addresses not in self.recent:
            self.recent.append(addresses)
        elif launches and addresses not in self.graphs and Graph.working and self._room():
            try:
                self.graphs[addresses] = Graph(launches, pool)
                self.used[addresses] = self.steps
            except Exception:  # the step itself has been launched, and so will be those to come
                Graph.working = False

    def _room(self) -> bool:
        """Whether there is room for one more graph, which one that is long out of use makes."""
        if len(self.graphs) < MOST:
            return True
        oldest = min(self.graphs, key=self.used.__getitem__)
        if self.steps - self.used[oldest] < STALE:
            return False
        del self.graphs[oldest], self.used[oldest]
        return True
