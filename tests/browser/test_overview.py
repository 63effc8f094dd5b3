"""The page begins with what was compiled, for which machine, and which view answers what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.browser.reader import Reader, watch
from tests.browser.subject import TP, Truth
from tpcompile.exploring import Exploration, explore
from tpcompile.inspect.plan import plan_report


def facts(reader: Reader) -> dict[str, str]:
    return dict(reader.rows("table.overview-facts"))


def test_the_page_begins_with_it(browser: Any, report: Path) -> None:
    page = browser.new_page()
    reader = watch(page)
    reader.open(report.as_uri())
    assert reader.text('#tabs [aria-selected="true"]') == "Overview"
    assert "Model" in facts(reader)
    reader.check_quiet()
    page.close()


def test_facts(reader: Reader, truth: Truth, exploration: Exploration) -> None:
    reader.go(view="overview")
    shown = facts(reader)
    about = exploration.about
    assert shown["Model"] == f"{about['model']} ({about['class']}, {about['dtype']})"
    assert shown["Ranks (tp)"] == str(TP)
    assert shown["Target"].startswith("cpu: 3 workers per rank, 60 GB/s.")
    assert shown["Batch and context"] == "1 sequence of 1,024 tokens"
    ranks = plan_report(truth.graph).ranks
    most = max(rank.weight_bytes for rank in ranks)
    assert shown["Weights"].endswith(f"at most {most / 1e3:.2f} KB on one")
    token = sum(rank.kv_bytes_per_token for rank in ranks)
    assert shown["KV cache"].startswith(f"{token / 1e3:.2f}".rstrip("0").rstrip("."))
    assert exploration.schedule is not None
    predicted = exploration.schedule[0]["makespan_us"] / 1000
    assert shown["Decode step"].startswith(f"{predicted:.2f}".rstrip("0").rstrip("."))
    assert shown["Made with"].startswith("tpcompile ")


def test_every_other_view_is_listed(reader: Reader) -> None:
    tabs = reader.texts("#tabs button")
    reader.go(view="overview")
    assert reader.texts("table.overview-views a") == tabs[1:]
    reader.click("table.overview-views a", "Ranks")
    assert reader.place["view"] == "ranks"


def test_a_view_without_data_says_how_to_get_it(reader: Reader) -> None:
    reader.remove("data => { data.comparisons = []; }")
    reader.go(view="overview")
    assert "Compare" not in reader.texts("table.overview-views a")
    assert reader.rows("table.overview-views")[-1][1].endswith("Not in this page: add --compare")
    reader.remove("data => { delete data.schedule; }")
    reader.go(view="overview")
    assert "Target" not in facts(reader)


def test_a_step_without_a_program_says_why(reader: Reader) -> None:
    reader.remove("data => { data.about['decode step'] = 'There is no program'; }")
    reader.go(view="overview")
    rows = reader.rows("table.overview-facts")
    assert ["Decode step", "There is no program"] in rows


def test_the_default_target_is_this_machine(session_captures: None) -> None:
    from tpcompile.backends.devices import machine_of, this_device

    explored = explore("preset:tiny-qwen3", 2)
    assert explored.schedule is not None
    target = explored.schedule[0]["target"]
    machine = machine_of(this_device(), 2)
    assert (target["name"], target["workers"]) == (machine.name, machine.workers)
