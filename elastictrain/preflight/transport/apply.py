"""Sets what a plan has decided, in the environment that the process groups will read."""

import json
from collections.abc import MutableMapping

from elastictrain.preflight.transport.plan import TransportPlan
from elastictrain.preflight.transport.settings import OWN_VARIABLES, own_variables


def apply(plan: TransportPlan, environment: MutableMapping[str, str]) -> dict[str, str]:
    """Set the plan's variables, and take back those of an earlier plan; what anybody else has set stays. What was set.

    To be done before the first process group: NCCL and gloo read each variable once.
    """
    for name, value in own_variables(environment).items():
        if environment.get(name) == value:
            del environment[name]
    done: dict[str, str] = {}
    for variable in plan.variables:
        # Empty counts as not set, as it does for NCCL and gloo.
        if not environment.get(variable.name):
            environment[variable.name] = done[variable.name] = variable.value
    environment[OWN_VARIABLES] = json.dumps(done)
    return done
