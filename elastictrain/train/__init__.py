"""State, schedules, the step, the loop, and the one place where parts are put together."""
