"""`python -m elastictrain.simulate`: what months on a fleet would cost a run, decided as its launchers would decide."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TypeVar

from elastictrain.bounded_json import MalformedJsonError, encode_record, parse_json
from elastictrain.config.composed import LaunchGroup
from elastictrain.config.validate import check_dataclass
from elastictrain.entry_point import run_command
from elastictrain.errors import EXIT_BUG, EXIT_OK, ConfigError, UsageError
from elastictrain.simulate.costs import RunCosts, read_costs
from elastictrain.simulate.faults import FleetFault, Rates, read_history, read_trace, replay, seeded
from elastictrain.simulate.run import Result, Simulation
from elastictrain.simulate.scenario import Scenario
from elastictrain.simulate.sweep import parse_sweep, plot, table, with_setting

_DAY_S = 86_400
_LEAST = {
    "hosts": 1,
    "days": 0,
    "every_s": 0,
    "replicas": 0,
    "standbys": 0,
    "processes": 1,
    "keep_last": 1,
    "notice_s": 0,
    "breaks": 0,
}
_POSITIVE = ("days", "every_s", "step_s", "snapshot_every_s")
T = TypeVar("T", RunCosts, Rates)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), arguments, _simulate)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m elastictrain.simulate",
        description=__doc__,
        epilog="Exit code 70 if the run is given up, or does not go on where it could.",
    )
    add = parser.add_argument
    defaults = Scenario()
    add(
        "launch", nargs="*", metavar="launch.KEY=VALUE", help="settings of the launchers; launch.wait_s is 0 unless it is given"
    )
    for name in _LEAST:
        value = getattr(defaults, name)
        add(f"--{name.replace('_', '-')}", type=type(value), default=value, metavar="N", help=f"({value:g})")
    add("--seed", type=int, default=defaults.seed, metavar="N", help="of the faults (1)")
    add("--price", default="0", metavar="USD", help="of a host and hour; or a file with lines `seconds,USD`")
    add("--trace", type=Path, metavar="FILE", help="hosts that are there over time, instead of lost ones at a rate")
    add("--history", type=Path, metavar="FILE", help="the hosts, the time and the faults of a run that chaos has disturbed")
    add("--noticed", type=float, default=0.0, metavar="SHARE", help="of the hosts that a trace takes away: told before (0)")
    add("--run", metavar="URL", help="folder of a run whose events tell what things take")
    for title, cls in (("hours of one host between two faults of a kind; 0: none", Rates), ("what things take", RunCosts)):
        group = parser.add_argument_group(title)
        for field in fields(cls):
            group.add_argument(f"--{field.name.replace('_', '-')}", type=float, metavar="X", help=f"({field.default:g})")
    add("--sweep", action="append", metavar="NAME=V,V", help="compare values of an option under the same faults; repeatable")
    add("--plot", type=Path, metavar="FILE", help="write the goodput of a sweep to an SVG file")
    add("--json", action="store_true", help="print one JSON object for each simulated run")
    return parser


def _simulate(parsed: argparse.Namespace) -> int:
    scenario = _scenario(parsed)
    if parsed.plot is not None and not parsed.sweep:
        raise UsageError("--plot must go with --sweep")
    if not 0 <= parsed.noticed <= 1:
        raise UsageError(f"--noticed must be from 0 to 1, but is {parsed.noticed:g}")
    rates, settings = _given(parsed, Rates()), parse_sweep(parsed.sweep or ())
    scenarios = [_checked(with_setting(scenario, setting), rates) for setting in settings]
    results = []
    for setting, one in zip(settings, scenarios, strict=True):
        results.append(Simulation(one, _faults(parsed, one, rates)).run())
        if parsed.json:
            _print(encode_record({"setting": setting, **asdict(results[-1])}).decode())
    if not parsed.json:
        _print("\n".join(table(settings, results) if parsed.sweep else summary(scenario, results[0])))
        for setting, result in zip(settings, results, strict=True):
            for problem in result.broken:
                _print(f"{' '.join(f'{name}={value:g}' for name, value in setting.items())} after {problem}".lstrip())
    if parsed.plot is not None:
        try:
            parsed.plot.write_text(plot(settings, results), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--plot must be a file that can be written, but {parsed.plot} is not: {error}") from None
    return EXIT_BUG if any(result.broken for result in results) else EXIT_OK


def _scenario(parsed: argparse.Namespace) -> Scenario:
    costs = RunCosts() if parsed.run is None else read_costs(parsed.run, RunCosts())
    options = {name: getattr(parsed, name) for name in _LEAST}
    if parsed.history is not None:
        history = read_history(parsed.history)
        options |= {"hosts": history.hosts, "days": history.seconds / _DAY_S}
    return Scenario(
        **options, launch=_launch(parsed.launch), costs=_given(parsed, costs), prices=_prices(parsed.price), seed=parsed.seed
    )


def _checked(scenario: Scenario, rates: Rates) -> Scenario:
    """Raises: UsageError."""
    given = {**{name: getattr(scenario, name) for name in _LEAST}, **asdict(scenario.costs), **asdict(rates)}
    for name, value in given.items():
        least, strict = _LEAST.get(name, 0), name in _POSITIVE
        if not value >= least or (strict and value == 0):
            option = name.replace("_", "-")
            raise UsageError(f"--{option} must be {'>' if strict else '>='} {least}, but is {value:g}")
    if scenario.launch.min_hosts > scenario.hosts:
        raise UsageError(f"launch.min_hosts must be at most --hosts ({scenario.hosts}), but is {scenario.launch.min_hosts}")
    return scenario


def _given(parsed: argparse.Namespace, defaults: T) -> T:
    """`defaults` with what the command line says."""
    names = [field.name for field in fields(defaults)]
    return replace(defaults, **{name: value for name in names if (value := getattr(parsed, name)) is not None})


def _launch(arguments: Sequence[str]) -> LaunchGroup:
    values: dict[str, object] = {"wait_s": 0.0}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key.startswith("launch."):
            raise UsageError(f"arguments must be launch.KEY=VALUE, but one is {argument!r}")
        try:
            values[key.removeprefix("launch.")] = parse_json(text)
        except MalformedJsonError:
            values[key.removeprefix("launch.")] = text
    launch, problems = check_dataclass(LaunchGroup, values=values, path="launch")
    if launch is None or problems:
        raise ConfigError(problems)
    return launch


def _prices(text: str) -> list[tuple[float, float]]:
    try:
        return [(0.0, float(text))]
    except ValueError:
        pass
    try:
        pairs = (line.split(",") for line in Path(text).read_text(encoding="utf-8").splitlines() if line.strip())
        return sorted((float(second), float(price)) for second, price in pairs)
    except (OSError, ValueError) as error:
        raise UsageError(f"--price must be a number or a file with lines `seconds,USD`, but {text} is not: {error}") from None


def _faults(parsed: argparse.Namespace, scenario: Scenario, rates: Rates) -> Iterator[FleetFault]:
    until_s = scenario.days * _DAY_S
    if parsed.history is not None:
        return iter(read_history(parsed.history).faults)
    if parsed.trace is None:
        return seeded(rates, machines=scenario.hosts, until_s=until_s, seed=scenario.seed)
    counts = read_trace(parsed.trace)
    return replay(counts, machines=scenario.hosts, until_s=until_s, seed=scenario.seed, noticed=parsed.noticed)


def summary(scenario: Scenario, result: Result) -> list[str]:
    """What a person wants to know of one simulated run, in 80 columns."""
    faults = ", ".join(f"{number} {kind}" for kind, number in result.faults.items()) or "none"
    requests, totals = ", ".join(f"{number:.3g} {kind}" for kind, number in result.requests.items()), result.totals
    return [
        f"{scenario.hosts} hosts, {result.hours / 24:g} days, seed {scenario.seed}",
        f"  goodput      {result.goodput:.2%} of the time (all hosts, no faults: 100 %)",
        f"  per host     {result.efficiency:.2%} of the {result.host_hours:,.0f} host-hours that were there",
        f"  steps        {totals.steps:,.0f}, and {totals.lost_steps:,.0f} repeated in {totals.repeated_s / 3600:.2f} h",
        f"  no progress  {result.idle_hours:.2f} h",
        f"  faults       {faults}",
        f"  generations  {result.generations}; {totals.from_memory} from memory, {totals.from_storage} from storage",
        f"  storage      {totals.saves} checkpoints; {requests}",
        f"  cost         {result.cost:,.2f} USD",
    ]


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
