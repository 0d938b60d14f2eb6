"""The transport that meddles does what it says, the same for the same seed."""

from __future__ import annotations

import pytest

from pdlab.disagg.transport.in_process import InProcess, Switchboard
from pdlab.disagg.transport.interface import Parcel, checksum_of
from tests.disagg.bodies import parcels_of
from tests.disagg.faults import Faults, FaultyTransport


def received(faults: Faults, *, calls: int = 20) -> tuple[list[int], FaultyTransport, list[Parcel]]:
    """Layers in the order in which they come, of ten that were sent."""
    board = Switchboard()
    a, b = InProcess(board, "a"), FaultyTransport(InProcess(board, "b"), faults)
    for parcel in parcels_of("t", [100] * 10):
        a.send(b.address, parcel)
    parcels = [parcel for _ in range(calls) for parcel in b.receive()]
    a.close()
    b.close()
    return [parcel.layers[0] for parcel in parcels], b, parcels


def test_without_faults_nothing_changes() -> None:
    layers, faulty, parcels = received(Faults(1))
    assert layers == list(range(10))
    assert faulty.done == []
    assert all(parcel.checksum == checksum_of(parcel.payload) for parcel in parcels)


@pytest.mark.parametrize(
    ("faults", "layers"),
    [
        (Faults(1, drop=1.0), []),
        (Faults(1, stall=1.0), []),
        (Faults(1, duplicate=1.0), [layer for layer in range(10) for _ in range(2)]),
        (Faults(1, corrupt=1.0), list(range(10))),
        (Faults(1, reorder=1.0), list(range(10))),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_fault_alone(faults: Faults, layers: list[int]) -> None:
    found, faulty, parcels = received(faults)
    assert found == layers
    assert len(faulty.done) == (1 if faults.stall else 10)
    damaged = [parcel.checksum != checksum_of(parcel.payload) for parcel in parcels]
    assert all(damaged) if faults.corrupt else not any(damaged)


def test_a_delay_lets_later_parcels_overtake_but_loses_none() -> None:
    layers, _, _ = received(Faults(3, delay=0.5))
    assert sorted(layers) == list(range(10))
    assert layers != list(range(10))


def test_reordered_parcels_change_places() -> None:
    layers, _, _ = received(Faults(2, reorder=0.3))
    assert sorted(layers) == list(range(10))
    assert layers != list(range(10))


def test_the_same_seed_gives_the_same_faults() -> None:
    faults = Faults(5, drop=0.2, delay=0.2, duplicate=0.2, reorder=0.2)
    one, again = received(faults), received(faults)
    assert one[0] == again[0]
    assert one[1].done == again[1].done != []
    assert received(Faults(6, drop=0.2, delay=0.2, duplicate=0.2, reorder=0.2))[0] != one[0]


def test_what_is_withdrawn_does_not_come_late() -> None:
    board = Switchboard()
    a, b = InProcess(board, "a"), FaultyTransport(InProcess(board, "b"), Faults(1, delay=1.0))
    for parcel in parcels_of("t", [100] * 3):
        a.send(b.address, parcel)
    assert b.receive() == []
    b.withdraw("t")
    assert [parcel for _ in range(20) for parcel in b.receive()] == []
    a.close()
    b.close()
