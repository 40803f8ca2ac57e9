from dataclasses import replace

import pytest

from elastictrain.config.roster_address import RosterAddress
from elastictrain.errors import ConfigError
from elastictrain.launch.membership.records import Entry, Generation, HostState, Outcome
from elastictrain.launch.membership.serving import Site, serves, still_needed_by
from tests.unit.launch.membership.made import entry, generation

SITE = Site(("vm-1", "vm-1.lab"), frozenset({"10.0.0.1", "fd00::1"}), alone=False)
ALONE = replace(SITE, alone=True)
READY, BUSY, GONE, UNFIT = HostState.READY, HostState.BUSY, HostState.GONE, HostState.UNFIT


@pytest.mark.parametrize(
    ("host", "found", "site", "expected"),
    [
        ("10.0.0.1", ["10.0.0.1"], SITE, True),
        ("10.0.0.2", ["10.0.0.2"], SITE, False),
        ("head", ["10.0.0.2", "10.0.0.1"], SITE, True),
        ("head", ["::ffff:10.0.0.1"], SITE, True),
        ("fd00:0::1", ["fd00:0::1"], SITE, True),
        ("head", ["fd00::1%eth0"], SITE, True),
        ("head", [], SITE, False),
        ("vm-1", [], SITE, False),
        ("vm-1", ["127.0.1.1"], SITE, True),
        ("vm-1.lab", ["127.0.1.1", "::1"], SITE, True),
        ("vm-1", ["10.0.0.9", "127.0.1.1"], SITE, False),
        ("127.0.0.1", ["127.0.0.1"], ALONE, True),
        ("localhost", ["::1", "127.0.0.1"], ALONE, True),
        ("10.0.0.2", ["10.0.0.2"], ALONE, False),
    ],
)
def test_the_host_that_has_the_address_serves(host: str, found: list[str], site: Site, expected: bool) -> None:
    assert serves(RosterAddress(host, 29_400), found, site) is expected


@pytest.mark.parametrize(("host", "found"), [("127.0.0.1", ["127.0.0.1"]), ("::1", ["::1"]), ("head", ["127.0.1.1"])])
def test_an_address_that_every_host_has_is_refused(host: str, found: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"`launch.roster` is tcp://.* another host for each of them"):
        serves(RosterAddress(host, 29_400), found, SITE)


@pytest.mark.parametrize(
    ("others", "newest", "expected"),
    [
        ([], None, ""),
        ([entry("b")], None, "b"),
        ([entry("b", GONE), entry("c", UNFIT)], None, "c"),
        # The run is over, and b may not have read it.
        ([entry("b"), entry("c", GONE)], generation(2, "abc", outcome=Outcome.DONE), "b"),
        ([entry("b", GONE), entry("c", GONE)], generation(2, "abc", outcome=Outcome.DONE), ""),
        # This host leaves a generation, and the others are about to form the next.
        ([entry("b", BUSY), entry("c", BUSY)], generation(1, "abc"), "bc"),
        ([entry("b", BUSY), entry("c")], generation(2, "bc"), "bc"),
        ([entry("b", BUSY)], generation(2, "bc"), "b"),
        ([entry("b", BUSY), entry("c", BUSY)], generation(2, "bc"), ""),
        # A spare that waits for the next change cannot be waited for.
        ([entry("b", BUSY), entry("c", BUSY), entry("d")], generation(2, "bc"), ""),
        ([entry("b")], generation(2, ""), "b"),
    ],
)
def test_for_whom_the_server_stays(others: list[Entry], newest: Generation | None, expected: str) -> None:
    assert still_needed_by([entry("a", GONE), *others], newest, own="a") == tuple(expected)
    assert still_needed_by([entry("a"), *others], newest, own="a") == tuple(expected)
