"""What asv has written is read as it lies: points over commits, and the steps among them."""

import json
from pathlib import Path

import pytest

from keyedopt.benchmarks.asv import history

ROOT = Path(__file__).parents[2]


def written(folder, values, unit="seconds", name="tables.X.track_x"):
    """Write results of some commits as asv does."""
    (folder / "box").mkdir(parents=True)
    about = {"version": 2, name: {"unit": unit, "param_names": ["optimizer"]}}
    (folder / "benchmarks.json").write_text(json.dumps(about))
    (folder / "box" / "machine.json").write_text("{}")
    columns = ["result", "params", "stats_ci_99_a", "stats_ci_99_b", "stats_repeat"]
    for place, value in enumerate(values):
        row = [
            [value, None],
            [["'sgd'", "'adam'"]],
            [value and value * 0.99, None],
            [value and value * 1.01, None],
            [9, None],
        ]
        data = {
            "version": 2,
            "commit_hash": f"{place:040x}",
            "date": 1_700_000_000_000 + place * 86_400_000,
            "params": {"machine": "box"},
            "result_columns": columns,
            "results": {name: row},
        }
        (folder / "box" / f"{place:08x}-env.json").write_text(json.dumps(data))
    return folder


def test_history_reads_what_asv_wrote(tmp_path):
    found = history.read(written(tmp_path, [1.0, None, 2.0]))
    assert [item.value for item in found] == [1.0, 2.0]
    first = found[0]
    assert first.params == (("optimizer", "sgd"),)
    assert (first.machine, first.unit, first.samples) == ("box", "seconds", 9)
    assert (first.low, first.high) == (0.99, 1.01)
    assert first.date < found[1].date


@pytest.mark.parametrize(
    ("values", "unit", "worse"),
    [
        ([1.0] * 5 + [1.5] * 5, history.RATIO, [5]),
        ([1.0] * 5 + [1.5] * 5, "seconds", []),
        ([1.0] * 5 + [1.5] * 5, "GB/s", []),
        ([1.5] * 5 + [1.0] * 5, history.RATIO, []),
        ([1.0] * 5 + [1.05] * 5, history.RATIO, []),
        ([1.0, 1.01, 0.99, 1.02, 0.98, 1.01, 0.99, 1.0], history.RATIO, []),
        ([1.0] * 4 + [2.0] * 4 + [4.0] * 4, "bytes", [4, 8]),
    ],
    ids=["slower", "times are for the eye", "throughput", "faster", "within the threshold", "noise", "twice"],
)
def test_regressions_are_steps_up_of_what_costs(tmp_path, values, unit, worse):
    found = history.regressions(history.steps(history.read(written(tmp_path, values, unit))))
    assert [int(step.at.commit, 16) for step in found] == worse


def test_the_command_names_what_got_worse(tmp_path, capsys):
    assert history.main([str(written(tmp_path / "a", [1.0] * 5 + [1.5] * 5, history.RATIO))]) == 1
    said = capsys.readouterr().out
    assert "tables.X.track_x(optimizer=sgd) on box at 0000000000: 1 to 1.5 of peer, 1.50 times" in said
    assert history.main([str(written(tmp_path / "b", [1.0] * 5))]) == 0
    assert "0 regressions in 1 series of 5 commits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("benchmarks.json", None, "cannot be read"),
        ("benchmarks.json", "{", "not a file of asv"),
        ("box/00000000-env.json", '{"version": 1}', "version 1"),
        ("box/00000000-env.json", '{"version": 2}', "not a result of asv"),
        ("box/00000000-env.json", "[]", "not a file of asv"),
    ],
)
def test_results_that_cannot_be_read_are_one_line(tmp_path, capsys, file, text, said):
    path = written(tmp_path, [1.0]) / file
    path.unlink() if text is None else path.write_text(text)
    assert history.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert file in error
    assert error.count("\n") == 1


def test_the_history_that_is_kept_can_be_read():
    found = history.read(ROOT / "benchmarks" / "results" / "asv")
    assert len({item.commit for item in found}) >= 12
    assert {item.unit for item in found} >= {"seconds", "of peer"}
    newest = max(item.date for item in found)
    shown = [dict(item.params) for item in found if item.date == newest]
    assert {params["implementation"] for params in shown} >= {"fused:native", "fbgemm", "torchrec"}
    assert len({(params["optimizer"], params["workload"]) for params in shown}) >= 3
    assert history.steps(found) is not None


# --- the machine and the page ---------------------------------------------------------------------
