"""Plays outages of the network between four launchers that all see storage, with the default limits, each from a seed.

    python scripts/simulate_partitions.py --seeds 1000        (12 minutes)

The decisions are those of the launcher; time, storage, the watch and the workers are simulated. No run may be given up, no two
groups may commit at once, the largest set of hosts that hear each other goes on, and all come together in the end. Prints the
seeds for which that does not hold; exit code 1 if there is one.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.integration.simulated.partitions import play
from tests.integration.simulated.world import BrokenPromiseError


def main() -> int:
    """Play all seeds; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parsed = parser.parse_args()
    broken = 0
    for seed in range(parsed.first, parsed.first + parsed.seeds):
        try:
            play(seed)
        except BrokenPromiseError as error:
            broken += 1
            sys.stdout.write(f"seed {seed}: {error}\n")
    sys.stdout.write(f"{parsed.seeds} histories, {broken} of them broken\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
