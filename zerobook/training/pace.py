"""Training speed, measured from log point to log point."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import torch

from zerobook.health import position
from zerobook.strategy import Strategy
from zerobook.training.utilization import ModelFlops, model_flops, peak_flops


class Pace:
    """Measures tokens per second, the share of the time that the run waits for data, and the use of the devices.

    Evaluations and saves do not count: see `paused`.

    Attributes:
        flops: floating-point operations of the model per token; None if they are not known.
        peak: peak operations per second of all devices together; None if it is not known.
        devices: number of devices, one for each rank.
        tokens_per_second: supervised tokens, over all ranks.
        all_tokens_per_second: tokens of the rows without padding, over all ranks.
        data_wait: share of the time spent waiting for data, 0 to 1.
        tflops: 10^12 operations of the model per second and device; None if ``flops`` is None.
        mfu: model FLOPs utilization, 0 to 1; None if ``flops`` or ``peak`` is None.
        seconds: phase of `zerobook.health.position` -> its seconds since the last log point. On a GPU, a phase ends when the
            device has done its work. Writing the log counts as ``reduce``.
        clock: measures phases on a GPU; None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.flops: ModelFlops | None = None
        self.peak: float | None = None
        self.devices = 1
        self.tflops: float | None = None
        self.seconds: dict[str, float] = {}
        self._forward_waits = False
        self.clock = DeviceClock() if device.type == "cuda" else None
        self.tokens_per_second = self.all_tokens_per_second = 0.0
        self.data_wait = 0.0
        self.mfu: float | None = None
        self.start()

    def measure_model(self, strategy: Strategy) -> None:
        """Count the operations of the prepared model per token, and look up the peak of the devices."""
        self.flops = model_flops(strategy)
        self.peak = peak_flops(strategy)
        self.devices = strategy.world_size
        # In these cases a forward pass waits for other ranks, which send weights, tokens or parts of layers.
        self._forward_waits = strategy.shards_parameters or strategy.mesh.data_parallel_size < strategy.world_size

    def start(self) -> None:
        """Start a measurement."""
        self._start_time = time.monotonic()
        self._tokens = self._all_tokens = self._rows = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose time is not measured, such as that of an evaluation, a save or the writing of a profile."""
        start = time.monotonic()
        yield
        # Begin the measurement later by the time that was spent.
        self._start_time += time.monotonic() - start

    def count(self, tokens: int, all_tokens: int, rows: int) -> None:
        """Add a step, over all ranks: its supervised tokens, the tokens of its rows, and its rows."""
        self._tokens += tokens
        self._all_tokens += all_tokens
        self._rows += rows

    def measure(self, step: int) -> None:
        """Close the measurement at a log point, update the attributes, and start a new measurement.

        The device must have done the steps. ``step`` is the newest one.
        """
        # On a GPU, the clock of the host shows when work was given to the device, not how long it took.
        device_seconds = self.clock.read() if self.clock else None
        self.seconds = position.log_point(step, device_seconds, forward_waits=self._forward_waits)
        seconds = max(time.monotonic() - self._start_time, 1e-9)
        self.tokens_per_second = self._tokens / seconds
        self.all_tokens_per_second = self._all_tokens / seconds
        self.data_wait = self.seconds.get("data", 0.0) / seconds
        if self.flops and self._rows:
            mean_length = self._all_tokens / self._rows
            flops_per_second = self.flops.per_token(mean_length) * self.all_tokens_per_second
            self.tflops = flops_per_second / self.devices / 1e12
            self.mfu = flops_per_second / self.peak if self.peak else None
        self.start()


class DeviceClock:
    """Measures phases on a GPU, by an event at each change of phase. The host does not wait for the events."""

    def __init__(self) -> None:
        self._events: list[tuple[position.Position, torch.cuda.Event]] = []
        self._current = position.here()
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        position.on_enter(self._record)

    # The host calls this whenever it enters a phase.
    def _record(self, phase: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((position.here(), event))

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call. The device must have reached the newest event."""
        seconds: dict[str, float] = defaultdict(float)
        # A phase lasts from its event to the next one. torch returns milliseconds.
        for (position_at_start, start), (_, end) in pairwise(self._events):
            seconds[position_at_start.phase] += start.elapsed_time(end) / 1000
        # The newest event is kept, since its phase has not ended.
        del self._events[:-1]
        return dict(seconds)

    def locate(self) -> position.Position:
        """Return the position (phase and step) that the device has reached; the host's if the device has done all its work.

        If one GPU stops, the hosts of all ranks soon wait in the same phase, since a host runs ahead of its device. Only the
        devices' positions show which GPU stopped. ``since`` of the position is the time at which a call first saw the device
        there. Any thread may call this. If the device hangs, the call may not return, and may keep Python's lock.
        """
        host_position = position.here()
        # Use a copy, since the main thread adds and removes events.
        events = self._events.copy()
        count = len(events)
        # A failed device raises an error here. The main thread will report it.
        with suppress(RuntimeError):
            # A new thread uses the first GPU, and a query there would create a context of this process, which takes memory.
            if torch.cuda.is_initialized():
                torch.cuda.set_device(self._gpu)
            # Drop the newest events, which the device has not reached.
            while events and not events[-1][1].query():
                events.pop()
        # The device has reached every event, or it is not known which one it has reached.
        if not events or len(events) == count:
            return host_position
        reached, _ = events[-1]
        if reached.entered != self._current.entered:
            self._current = reached._replace(since=time.monotonic())
        return self._current
