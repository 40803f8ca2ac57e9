from elastictrain.launch.heartbeat.mesh import Heard, hear, listen_to, look

LOST_S = 4.0


def listen(
    *, until_s: float, heard: Heard, host: str = "", every_s: float = 0.5, from_s: float = 0.0
) -> tuple[Heard, frozenset[str]]:
    """Looks twice a second, and hears `host` each time."""
    now_s, silent = from_s, frozenset[str]()
    while now_s < until_s:
        now_s += every_s
        heard = hear(heard, [host] if host else [], now_s=now_s)
        heard, silent = look(heard, now_s=now_s, lost_s=LOST_S)
    return heard, silent


def test_nobody_is_silent_who_is_not_listened_to() -> None:
    _, silent = listen(until_s=60.0, heard=listen_to((), now_s=0.0))
    assert silent == frozenset()


def test_silence_counts_from_when_one_begins_to_listen() -> None:
    heard = listen_to("ab", now_s=0.0)
    assert listen(until_s=4.0, heard=heard)[1] == frozenset()
    assert listen(until_s=4.5, heard=heard)[1] == {"a", "b"}


def test_who_is_heard_is_not_silent() -> None:
    heard, silent = listen(until_s=30.0, heard=listen_to("ab", now_s=0.0), host="a")
    assert silent == {"b"}
    heard, silent = listen(from_s=30.0, until_s=34.0, heard=heard)
    assert silent == {"b"}
    _, silent = listen(from_s=34.0, until_s=34.5, heard=heard)
    assert silent == {"a", "b"}


def test_a_link_that_flaps_for_less_than_the_window_costs_nothing() -> None:
    heard, _ = listen(until_s=10.0, heard=listen_to("a", now_s=0.0), host="a")
    heard, silent = listen(from_s=10.0, until_s=13.5, heard=heard)
    assert silent == frozenset()
    heard, silent = listen(from_s=13.5, until_s=17.0, heard=heard, host="a")
    assert silent == frozenset()


def test_who_comes_back_is_heard_again() -> None:
    heard, silent = listen(until_s=10.0, heard=listen_to("a", now_s=0.0))
    assert silent == {"a"}
    assert listen(from_s=10.0, until_s=10.5, heard=heard, host="a")[1] == frozenset()


def test_words_of_others_do_not_count() -> None:
    assert listen(until_s=5.0, heard=listen_to("a", now_s=0.0), host="z")[1] == {"a"}
    # Nor are they kept: anybody who has the token could fill the memory of this host.
    assert hear(listen_to("a", now_s=0.0), ["z"], now_s=1.0).last_s == {}


def test_who_was_frozen_itself_accuses_nobody() -> None:
    heard, _ = listen(until_s=10.0, heard=listen_to("ab", now_s=0.0), host="a")
    heard, silent = look(heard, now_s=100.0, lost_s=LOST_S)
    assert silent == frozenset()
    # One word that had waited in the socket meanwhile is no proof of life now: from here on all have the same time.
    heard, silent = listen(from_s=100.0, until_s=104.0, heard=heard)
    assert silent == frozenset()
    assert listen(from_s=104.0, until_s=104.5, heard=heard)[1] == {"a", "b"}


def test_what_waited_in_the_socket_while_frozen_is_not_the_last_word() -> None:
    heard, _ = listen(until_s=10.0, heard=listen_to("a", now_s=0.0), host="a")
    heard = hear(heard, ["a"], now_s=100.0)
    heard, silent = look(heard, now_s=100.0, lost_s=LOST_S)
    assert silent == frozenset()
    assert listen(from_s=100.0, until_s=104.5, heard=heard)[1] == {"a"}


def test_a_short_pause_of_its_own_is_none() -> None:
    heard = listen_to("a", now_s=0.0)
    for now_s in (2.0, 4.0):
        heard, silent = look(heard, now_s=now_s, lost_s=LOST_S)
        assert silent == frozenset()
    assert look(heard, now_s=4.1, lost_s=LOST_S)[1] == {"a"}
