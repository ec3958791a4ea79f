"""CUDA streams that wait for the host."""

from __future__ import annotations

import torch

from minisgl.engine.host_signal import HostSignal


def test_work_behind_a_wait_begins_when_its_number_is_reached() -> None:
    signal = HostSignal()
    assert signal.is_supported
    signal.newest = (1 << 32) - 2
    signal.reach(signal.newest)
    stream = torch.cuda.Stream()
    total = torch.zeros(1, device="cuda")
    events = []
    # The first use of a kernel waits for the device, which waits for the host below.
    total.add_(torch.ones(1, device="cuda").item() - 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(4):
            signal.wait()
            total.add_(1)
            events.append(torch.cuda.Event())
            events[-1].record()
    other = torch.ones(1, device="cuda").item()
    assert other == 1 and not events[0].query(), "other streams go on"
    # The numbers wrap around: the last of these is 1.
    for count, number in enumerate(((1 << 32) - 1, 0), 1):
        signal.reach(number)
        events[count - 1].synchronize()
        assert not events[count].query()
    signal.reach(signal.newest)
    events[-1].synchronize()
    assert signal.newest == 2 and total.item() == 4
