"""The simulated link."""

import math

import pytest

from pdlab.link import LINKS, Bookings, Link


def test_named_links_have_their_published_rates() -> None:
    gbit_s = {name: link.bandwidth_bytes_s * 8 / 1e9 for name, link in LINKS.items()}
    pcie = 16 * 16 * 128 / 130
    expected = {"1GbE": 1, "10GbE": 10, "100GbE": 100, "PCIe4x16": pcie}
    expected |= {"NVLink3": 12 * 200, "NVLink4": 18 * 200}
    assert gbit_s == pytest.approx(expected, rel=1e-4)
    assert all(Link.named(name) is link and link.name == name for name, link in LINKS.items())


def test_transfer_time_is_bytes_over_bandwidth_and_latency() -> None:
    assert Link(1000.0, 0.25).transfer_s(500) == 0.75
    assert Link(1000.0).transfer_s(0) == 0.0


@pytest.mark.parametrize("bandwidth", [0, -1.0, math.inf, math.nan])
def test_a_bandwidth_must_be_finite_and_above_zero(bandwidth: float) -> None:
    with pytest.raises(ValueError, match=f"bandwidth_bytes_s is {bandwidth}.*above 0"):
        Link(bandwidth)


@pytest.mark.parametrize("latency", [-1e-9, math.inf, math.nan])
def test_a_latency_must_be_finite_and_not_negative(latency: float) -> None:
    with pytest.raises(ValueError, match=f"latency_s is {latency}.*at least 0"):
        Link(1.0, latency)


def test_an_unknown_link_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'carrier pigeon'.*1GbE.*NVLink4"):
        Link.named("carrier pigeon")


def test_bookings_queue_and_forget_idle_time() -> None:
    bookings = Bookings(Link(100.0, 1.0))
    assert [bookings.book(100, now_s) for now_s in (0.0, 0.5, 10.0)] == [2.0, 3.0, 12.0]
    assert Bookings(None).book(100, 5.0) == 0.0
