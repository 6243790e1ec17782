"""What rules over ranks cost against a copy of the same gradient: each rank's share of the work, [n, N / n].

Arms take turns on several sets of buffers, as in codecs.py. Medians over all rounds and sets, as multiples
of the median copy of the N elements. One thread. "torch" is what one would write without the kernels.

    python benchmarks/rules.py --json benchmarks/results/DATE-rules.json
"""

import statistics
from collections.abc import Callable

import torch
from copies import parser_for, timed, write
from torch import Tensor

import gradlane as gl
from gradlane.kernels.native import kernels_in_use
from gradlane.kernels.rows import inner_products

SETS = 3
Arm = Callable[[Tensor], object]


def arms(ranks: int) -> dict[str, Arm]:
    gram = inner_products(torch.randn(ranks, 1000))
    f = (ranks - 1) // 3
    whole = {
        f"Krum({(ranks - 3) // 2})": gl.Krum((ranks - 3) // 2),
        f"MultiKrum({f})": gl.MultiKrum(f),
        "GeometricMedian()": gl.GeometricMedian(),
        "CenteredClipping()": gl.CenteredClipping(),
        "AdaSum()": gl.AdaSum(),
        f"NNM({f}, then=TrimmedMean({f}))": gl.NNM(f, then=gl.TrimmedMean(f)),
    }
    if ranks >= 7:
        whole["Bulyan(1)"] = gl.Bulyan(1)
    chosen: dict[str, Arm] = {
        "inner products": inner_products,
        "inner products, torch": lambda rows: rows.double() @ rows.double().t(),
        "Median()": gl.Median(),
        "torch.median": lambda rows: rows.median(0).values,
        f"TrimmedMean({f})": gl.TrimmedMean(f),
        "torch.sort, mean": lambda rows: rows.sort(0).values[f : ranks - f].mean(0),
        "mean": gl.mean,
    }
    return chosen | {name: applied(rule, gram) for name, rule in whole.items()}


def applied(rule: gl.GramRule, gram: Tensor) -> Arm:
    def work(rows: Tensor) -> Tensor:
        """From the inner products, which are there, to the answer."""
        return rule.mixture(gram).applied(rows)

    return work


def measure(ranks: int, numel: int, rounds: int) -> dict[str, float]:
    sets = [torch.randn(ranks, numel // ranks) for _ in range(SETS)]
    into = torch.zeros(ranks, numel // ranks)
    chosen: dict[str, Arm] = {"copy": into.copy_, **arms(ranks)}
    taken: dict[str, list[float]] = {name: [] for name in chosen}
    for turn in range(rounds + 1):
        for name, arm in chosen.items():
            for rows in sets[:1] if "torch." in name else sets:  # those take a second each
                seconds = timed(arm, rows)
                if turn:  # the first round touches new pages
                    taken[name].append(seconds)
    copy = statistics.median(taken.pop("copy"))
    return {"copy_s": copy, **{name: statistics.median(seconds) / copy for name, seconds in taken.items()}}


def main() -> None:
    parser = parser_for(__doc__, rounds=5)
    parser.add_argument("--elements", type=int, default=9_400_000)
    parser.add_argument("--ranks", type=int, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    print(f"{kernels_in_use()}; {options.elements:,} elements, 1 thread; times a copy of them")
    for ranks in options.ranks or (4, 8):
        found = measure(ranks, options.elements, options.rounds)
        print(f"\nn = {ranks}: a copy takes {found['copy_s'] * 1e3:.1f} ms")
        for name, times in found.items():
            if name != "copy_s":
                print(f"{name:32s} {times:8.2f}")
        rows.append({"ranks": ranks, **found})
    write(options, rows, kernels_used=kernels_in_use())


if __name__ == "__main__":
    main()
