# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks list | run NAME ... | report [NAME ...]``."""

import argparse
import os
import sys

from benchmarks.shared.benchmark import Benchmark, Settings, all_benchmarks
from benchmarks.shared.index import write_index
from benchmarks.shared.runner import forget_rows, read_rows, run_all, write_report


def main() -> int:
    """List the benchmarks, run some of them, or write their reports again."""
    found = all_benchmarks()
    options = _parser(list(found)).parse_args()
    if options.command == "list":
        for benchmark, module in found.values():
            print(
                f"{benchmark.name:<28}{benchmark.question}  [{module}, {len(read_rows(benchmark.name))} runs]"
            )
        return 0
    names = list(found) if "all" in options.names else options.names
    if options.command == "report":
        for name in names:
            print(f"{name}: {'written' if write_report(found[name][0]) else 'no runs yet'}")
        write_index([benchmark for benchmark, _ in found.values()])
        return 0
    os.environ["PYRO_DVI_DEVICE"] = options.device
    return max([_run(*found[name], options) for name in names])


def _run(benchmark: Benchmark, module: str, options: argparse.Namespace) -> int:
    """Run a benchmark, write its report and print what failed."""
    only = dict(pair.split("=", 1) for pair in options.only)

    def wanted(settings: Settings) -> bool:
        return all(str(settings.get(key)) == value for key, value in only.items())

    if options.again:
        forget_rows(benchmark.name, wanted)
    failures = run_all(benchmark, module, options.data_dir, options.budget, options.jobs, wanted)
    write_report(benchmark)
    for failure in failures:
        print(f"{benchmark.name}, failed: {failure}", file=sys.stderr)
    return int(bool(failures))


def _parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print names, questions and the number of existing runs")
    report = commands.add_parser("report", help="write tables and figures again from the existing runs")
    report.add_argument("names", nargs="*", choices=[*names, "all"], default="all", metavar="NAME")
    run = commands.add_parser("run", help="do the missing runs, then write the report")
    run.add_argument("names", nargs="+", choices=[*names, "all"], metavar="NAME")
    run.add_argument("--data-dir", help="folder with the data (default: PYRO_DVI_DATA, or a download)")
    run.add_argument(
        "--budget", choices=["small", "gpu"], default="small", help="gpu: the papers' full settings"
    )
    run.add_argument("--jobs", type=int, default=2, help="number of parallel processes, with one thread each")
    run.add_argument("--device", default="cpu", help="device of data and networks: cpu or cuda")
    run.add_argument(
        "--only", nargs="+", default=[], metavar="KEY=VALUE", help="do only the runs with these settings"
    )
    run.add_argument("--again", action="store_true", help="repeat runs that exist already")
    return parser


if __name__ == "__main__":
    sys.exit(main())
