from elastictrain.fault.reasons import elect_reporter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_first_worker_speaks_at_once() -> None:
    clock = Clock()
    assert elect_reporter(0, ending=lambda: True, clock=clock, sleep=clock.sleep)
    assert clock.now == 100.0


def test_the_others_wait_to_be_ended() -> None:
    clock = Clock()
    assert not elect_reporter(1, ending=lambda: clock.now > 103, limit_s=10, clock=clock, sleep=clock.sleep)
    assert clock.now < 104


def test_a_worker_that_is_alone_with_its_finding_speaks() -> None:
    clock = Clock()
    assert elect_reporter(1, ending=lambda: False, limit_s=10, clock=clock, sleep=clock.sleep)
    assert 110 <= clock.now < 111
