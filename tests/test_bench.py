"""`tensorlease bench`: the commands run, their tables are right, and `--check` finds a missed goal.

How long anything takes is no test: figures are given, and what is made of them is looked at.
"""

from __future__ import annotations

import io
import re
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path

import msgspec
import pytest
import zmq
from rich.console import Console

from tensorlease import cli
from tensorlease.commands.bench import broker as of_broker
from tensorlease.commands.bench import ledger as of_ledger
from tensorlease.commands.bench.party import Party
from tensorlease.commands.bench.report import (
    Goal,
    Report,
    cell,
    finish,
    new_report,
    number,
    show,
)
from tensorlease.protocol import messages as m
from tensorlease.protocol.codec import encode
from tensorlease.protocol.errors import RefusedError

# ---------------------------------------------------------------- reports


def report(*goals: Goal) -> Report:
    made = new_report("tensorlease bench nothing")
    made.goals.extend(goals)
    return made


def shown(made: Report) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(made, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_missed_goal_is_named_and_makes_the_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = report(Goal("16 workers", "CPU", 2.01, 2.0), Goal("1 worker", "CPU", 2.0, 2.0))
    assert finish(made, as_json=True, check=True) == 1
    out, err = capsys.readouterr()
    assert err == "missed: 16 workers: CPU 2.01 (goal <= 2): MISSED\n"
    assert [goal.met for goal in msgspec.json.decode(out, type=Report).goals] == [False, True]
    assert finish(made, as_json=True, check=False) == 0


def test_goals_that_are_reached_make_the_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    made = report(Goal("a round", "times as fast", 2.0, 2.0, at_least=True))
    assert finish(made, as_json=True, check=True) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("value", "limit", "at_least", "met"),
    [
        (1.3, 1.3, False, True),
        (1.31, 1.3, False, False),
        (1.99, 2.0, True, False),
        (2.0, 2.0, True, True),
        (float("nan"), 2.0, False, False),
        (float("nan"), 2.0, True, False),
    ],
)
def test_a_goal_is_a_limit_from_one_side(
    value: float, limit: float, at_least: bool, met: bool
) -> None:
    assert Goal("row", "what", value, limit, at_least).met is met


def test_the_table_has_the_median_and_the_spread_of_each_cell() -> None:
    made = report(Goal("[a]", "ratio", 3.0, 2.0))
    assert made.add("[a]", "ms", [3.0, 1.0, 2.0]) == 2.0
    made.add("[a]", "MiB", [1234.5])
    made.add("b", "ms", [0.12345])
    made.add("alone", "bytes", [7.0])
    lines = [re.split(r"\s{2,}", line.strip()) for line in shown(made).splitlines()]
    assert ["ms", "MiB"] in lines
    assert ["[a]", "2 (1 to 3)", "1,234"] in lines
    assert ["b", "0.123"] in lines
    assert ["bytes"] in lines
    assert ["alone", "7"] in lines
    assert ["[a]: ratio 3.00 (goal <= 2): MISSED"] in lines


def test_a_figure_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="16 workers: no value of ms was measured"):
        report().add("16 workers", "ms", [])


def test_three_digits_count() -> None:
    assert [number(v) for v in (0.012345, 1.2345, 12.345, 123.45, 12345.6)] == [
        "0.0123",
        "1.23",
        "12.3",
        "123",
        "12,346",
    ]
    made = report()
    made.add("a", "ms", [1.0, 2.0])
    assert cell(made.figures[0]) == "1.5 (1 to 2)"


# ---------------------------------------------------------------- the broker


def turns(seconds: float, cpu_s: float) -> of_broker.Turns:
    return of_broker.Turns([seconds] * 4, [seconds] * 2, [cpu_s] * 2)


def test_the_broker_is_held_against_the_relay_by_the_clock_and_by_its_cpu() -> None:
    made = report()
    of_broker.add_rows(made, 16, turns(0.001, 0.0005), turns(0.0019, 0.0012))
    assert [(goal.row, round(goal.value, 3), goal.met) for goal in made.goals] == [
        ("16 workers", 1.9, True),
        ("16 workers", 2.4, False),
    ]
    figures = {(f.row, f.name): f.median for f in made.figures}
    assert figures["16 workers, broker", "p99 ms"] == pytest.approx(1.9)
    assert figures["16 workers, relay", "CPU ms a round"] == pytest.approx(0.5)


def test_a_quantile_is_a_value_that_was_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert of_broker.quantile(values, 0.5) == 50.0
    assert of_broker.quantile(values, 0.99) == 99.0
    assert of_broker.quantile([7.0], 0.99) == 7.0


@pytest.mark.process
def test_bench_broker_runs_rounds_through_both_and_joins_many_agents(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "bench broker --workers 3 --rounds 3 --turns 2 --body 4000 --agents 40 --json"
    assert cli.main(words.split()) == 0
    out, err = capsys.readouterr()
    made = msgspec.json.decode(out, type=Report)
    assert err == ""
    assert {figure.row for figure in made.figures} == {
        "3 workers, relay",
        "3 workers, broker",
        "3 workers, ratio",
        "40 agents and a trainer",
    }
    assert all(figure.least > 0 for figure in made.figures if figure.name != "KiB a peer")
    assert [goal.row for goal in made.goals] == ["3 workers"] * 2


def test_what_a_broker_refuses_ends_the_benchmark_by_name(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/b.sock"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(url)

        def refuse() -> None:
            for _ in range(2):
                route, _ = socket.recv_multipart()
                socket.send_multipart([route, encode(m.WhoAreYou("e" * 16))])

        refusing = threading.Thread(target=refuse)
        refusing.start()
        with Party(url, 1, b"") as party, pytest.raises(RefusedError, match="WhoAreYou"):
            party.join()
        refusing.join()


# ---------------------------------------------------------------- the ledger


def test_bench_ledger_prints_cpu_and_bytes_for_each_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "bench ledger --receivers 5 --receivers 10 --batches 1 --members 1 --rounds 3 --json"
    assert cli.main([*words.split(), "--crowding"]) == 0
    made = msgspec.json.decode(capsys.readouterr().out, type=Report)
    names = [(figure.row, figure.name) for figure in made.figures]
    assert ("1 batch, replicas of 1", "us at 10") in names
    assert ("1 batch, replicas of 1", "10 to 5") in names
    assert ("1 batch", "bytes at 5") in names
    assert ("void, drain and retry", "us at 5") in names
    assert [goal.limit for goal in made.goals] == [of_ledger.LIMIT]


def test_the_least_time_of_each_size_is_held_against_the_first() -> None:
    made = report()
    of_ledger.add_times(made, "row", [100, 1_000], [[2.0, 1.0], [1.5, 1.25]], goal=True)
    (goal,) = made.goals
    assert (goal.value, goal.met) == (1.25, False)
    assert "1,000" in goal.name


# ---------------------------------------------------------------- shared memory


@pytest.mark.program
def test_bench_shm_runs_a_round_through_a_broker_and_says_whom_it_is_not_compared_with(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "shm", "--mib", "4", "--tensors", "20", "--rounds", "3"]) == 0
    out, _ = capfd.readouterr()
    assert "a round through the broker: median to that of one memcpy" in out
    assert "0.00 GB of float32 in 20 tensors" in out
    assert "not installed, and not compared with: verl, sglang, checkpoint-engine" in out


def test_a_round_is_held_against_the_faster_memcpy_and_the_fastest_peer() -> None:
    from tensorlease.commands.bench.shm import add_rows

    took = {
        "copy_ of torch": [0.2, 0.2],
        "memcpy, one thread": [0.1, 0.1],
        "the worker's copy": [0.12, 0.12],
        "a round through the broker": [0.14, 0.14],
        "verl": [0.3, 0.3],
        "sglang": [0.25, 0.25],
    }
    made = report()
    add_rows(made, took, 10**9, ["verl", "sglang"])
    assert [(goal.row, round(goal.value, 2), goal.met) for goal in made.goals] == [
        ("the worker's copy", 1.2, True),
        ("a round through the broker", 1.4, False),
        ("a round through the broker", 1.79, False),
    ]
    assert made.goals[2].name == "times as fast as sglang"
    assert made.notes[-1] == "not installed, and not compared with: checkpoint-engine"


def test_tensors_are_put_into_buckets_in_order_and_a_large_one_is_alone() -> None:
    import torch

    from tensorlease.commands.bench.peers import buckets

    source = {str(n): torch.zeros(size) for n, size in enumerate((10, 60, 200, 1, 1))}
    groups = [[name for name, _ in group] for group in buckets(source, 512)]
    assert groups == [["0", "1"], ["2"], ["3", "4"]]


def test_bytes_that_did_not_arrive_are_found() -> None:
    import torch

    from tensorlease.commands.bench import peers

    here, there = Pipe()
    sent, has = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    there.send(peers.sums(sent))
    peers.compare("verl", sent, here, 1.0)
    there.send(peers.sums(has))
    with pytest.raises(peers.UnequalError, match="verl: the receiver has other bytes"):
        peers.compare("verl", sent, here, 1.0)
    here.close()
    there.close()


@pytest.mark.usefixtures("peers_forgotten")
def test_of_a_peer_that_is_installed_one_module_is_imported_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorlease.commands.bench import peers

    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert peers.path_of("verl") is None
    module = tmp_path / "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
    module.parent.mkdir(parents=True)
    (tmp_path / "verl/__init__.py").write_text("raise ImportError('its engine')")
    module.write_text("from verl.utils.device import get_device_name\nname = get_device_name()")
    assert peers.path_of("verl") == module
    assert peers.load("verl").name == "cpu"
