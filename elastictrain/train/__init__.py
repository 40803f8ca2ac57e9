"""State, schedules, the step, the loop, and `build`, which puts the parts together."""
