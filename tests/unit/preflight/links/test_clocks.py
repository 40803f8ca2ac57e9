from elastictrain.preflight.links.clocks import exchange_offset, offsets_from_group


def test_an_exchange_does_not_count_the_way() -> None:
    assert exchange_offset(asked=100.0, received=120.5, answered=120.6, heard=101.1) == 20.0


def test_offsets_add_up_along_a_ring_and_the_median_is_the_time() -> None:
    true = {0: 20.0, 1: 0.0, 2: 0.1, 3: -0.1}
    ring = {(a, (a + 1) % 4): true[(a + 1) % 4] - true[a] for a in range(3)}
    found = offsets_from_group(ring, num_hosts=4)
    assert {host: round(offset, 6) for host, offset in found.items()} == {0: 20.0, 1: 0.0, 2: 0.1, 3: -0.1}


def test_of_two_hosts_the_first_has_the_time() -> None:
    assert offsets_from_group({(1, 0): 5.0}, num_hosts=2) == {0: 0.0, 1: -5.0}


def test_nobody_asked_nothing_known() -> None:
    assert offsets_from_group({}, num_hosts=3) == {}


def test_who_was_not_reached_is_left_out() -> None:
    assert offsets_from_group({(0, 1): 0.0}, num_hosts=3).keys() == {0, 1}
