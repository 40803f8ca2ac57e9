from hypothesis import given
from hypothesis import strategies as st

from elastictrain.config.composed import RunConfig
from elastictrain.train.step import StepActions, after_step
from tests.unit.train.test_loop import config

configs = st.builds(config, steps=st.integers(1, 60), save_every=st.integers(0, 20), eval_every=st.integers(0, 20))
steps = st.integers(1, 60)


@given(configs, steps, st.booleans(), st.booleans())
def test_leaves_if_it_is_the_end_or_a_stop_and_never_without_a_save(
    of_run: RunConfig, step: int, stop: bool, save: bool
) -> None:
    actions = after_step(step, of_run, stop_agreed=stop, save_agreed=save)
    end = step >= of_run.train.steps
    assert actions.leave == (end or stop)
    if actions.leave:
        assert actions.save == ("end" if end else "stop")


@given(configs, steps, st.booleans())
def test_saves_at_each_interval_and_when_a_save_was_agreed(of_run: RunConfig, step: int, save: bool) -> None:
    actions = after_step(step, of_run, stop_agreed=False, save_agreed=save)
    due = of_run.checkpoint.every_steps > 0 and step % of_run.checkpoint.every_steps == 0
    assert (actions.save is not None) == (due or save or step >= of_run.train.steps)


@given(configs, steps, st.booleans())
def test_evaluates_at_each_interval_and_at_the_end_but_not_while_it_is_stopping(
    of_run: RunConfig, step: int, stop: bool
) -> None:
    actions = after_step(step, of_run, stop_agreed=stop, save_agreed=False)
    end = step >= of_run.train.steps
    wanted = of_run.train.eval_every_steps > 0 and (end or (step % of_run.train.eval_every_steps == 0 and not stop))
    assert actions.evaluate == wanted


def test_an_ordinary_step_is_followed_by_nothing() -> None:
    assert after_step(3, config(steps=10, save_every=5, eval_every=5), stop_agreed=False, save_agreed=False) == StepActions(
        None, False, False
    )
