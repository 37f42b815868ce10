"""Compare one algorithm between hosts with three, by the model that chooses them; nothing is sent.

    python -m benchmarks.algorithms

"pieces" is best most often. A ratio is its time to that of the fastest of doubling, halving and pieces, over sums of
4 KiB to 64 MiB. The library's own allreduce, which hvdkit measures and may choose too, is left out.
"""

from __future__ import annotations

import argparse
from statistics import mean

from hvdkit.transport.between.select import ALGORITHMS, Link, cheapest

_SIZES = [1 << bit for bit in range(12, 27)]
_HOSTS = ((2, 3, 4), (8, 12, 16), (32, 48, 64), (128, 192, 256))
#: Name -> latency, seconds of a byte, seconds that a message costs a rank.
_LINKS = {
    "1 Gbit/s, 50 us": Link(50e-6, 8e-9, 3e-6),
    "10 Gbit/s, 25 us": Link(25e-6, 8e-10, 3e-6),
    "100 Gbit/s, 2 us": Link(2e-6, 8e-11, 1e-6),
}


def ratio(link: Link, hosts: int, nbytes: int) -> float:
    """Return the time of "pieces" to that of the fastest algorithm."""
    fastest = ALGORITHMS[cheapest(link, hosts, nbytes)]
    return ALGORITHMS["pieces"](link, hosts, nbytes) / fastest(link, hosts, nbytes)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| link | hosts | mean | worst | worst from 1 MiB on |\n|---|---|---|---|---|")
    for name, link in _LINKS.items():
        for hosts in _HOSTS:
            ratios = {(count, size): ratio(link, count, size) for count in hosts for size in _SIZES}
            large = max(value for (_, size), value in ratios.items() if size >= 1 << 20)
            numbers = f"x{mean(ratios.values()):.2f} | x{max(ratios.values()):.2f} | x{large:.2f}"
            print(f"| {name} | {', '.join(map(str, hosts))} | {numbers} |")


if __name__ == "__main__":
    main()
