"""The document, the dashboard and the exposition speak of the same metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from giveway.core.plan import PreemptionMode
from giveway.server.metric_families import Rejection
from giveway.server.metrics import ServerMetrics
from giveway.server.preemption_causes import PreemptionCause
from tests.server.busy_engine import Samples, dry, samples_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAME = re.compile(r"\b(?:vllm|giveway):[a-z0-9_]+")
SELECTOR = re.compile(r"((?:vllm|giveway):[a-z0-9_]+)(?:\{([^}]*)\})?")
OF_A_HISTOGRAM = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def samples() -> Samples:
    return samples_of(ServerMetrics(dry().engine, model_name="dry"))


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DOCS / "grafana" / "giveway.json").read_text(encoding="utf-8"))
    return content


def expressions(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def check_selectors(expression: str, samples: Samples) -> None:
    """Check that every metric exists, that it has the labels asked for, and the values that are written out."""
    labels_of = {
        name: {label for known, labels in samples if known == name for label, _ in labels} for name, _ in samples
    }
    found = SELECTOR.findall(expression)
    assert found
    for name, matchers in found:
        assert name in labels_of, f"no metric {name}"
        for label, operator, wanted in re.findall(r'(\w+)\s*(=~|!=|=)\s*"([^"]*)"', matchers):
            assert label in labels_of[name] | {"model_name", "engine"}, f"{name} has no label {label}"
            if operator != "!=" and not wanted.startswith("$"):
                values = {
                    content for known, labels in samples if known == name for key, content in labels if key == label
                }
                assert set(wanted.split("|")) <= values, f"{name} has no {label} {wanted}"


def test_the_document_names_every_metric_and_no_other(samples: Samples) -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `((?:vllm|giveway):[a-z0-9_]+)` \|", text, re.MULTILINE))
    names = {name for name, _ in samples if name.startswith(("vllm:", "giveway:"))}
    told = set()
    for name in names:
        base = next((name.removesuffix(end) for end in OF_A_HISTOGRAM if name.endswith(end)), name)
        told.add(name if name in explained else base)
    assert explained == told


def test_the_document_explains_every_mode_cause_and_reason() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    for kind in (PreemptionMode, PreemptionCause, Rejection):
        for member in kind:
            assert f"| `{member.value}` |" in text, member


def test_the_document_asks_only_for_metrics_and_labels_that_exist(samples: Samples) -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:promql|yaml)\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        check_selectors(block, samples)


def test_every_panel_asks_only_for_metrics_and_labels_that_exist(dashboard: dict[str, Any], samples: Samples) -> None:
    asked = list(expressions(dashboard))
    assert len(asked) > 30
    for _, expression in asked:
        check_selectors(expression, samples)
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            names = NAME.findall(expression)
            known = {label for name, labels in samples if name in names for label, _ in labels}
            assert {each.strip() for each in grouped.split(",")} <= known, expression


def test_every_metric_of_ours_but_older_names_is_on_a_panel(dashboard: dict[str, Any], samples: Samples) -> None:
    # Goal: whoever adds a metric says where it is looked at.
    shown = " ".join(expression for _, expression in expressions(dashboard))
    ours = {name for name, _ in samples if name.startswith(("vllm:", "giveway:"))}
    bases = {next((name.removesuffix(end) for end in OF_A_HISTOGRAM if name.endswith(end)), name) for name in ours}
    missing = {base for base in bases if base not in shown}
    assert missing == {
        "vllm:gpu_cache_usage_perc",
        "vllm:time_per_output_token_seconds",
        "giveway:requests_accepted_total",
    }


def test_the_dashboard_can_be_imported_and_its_data_source_chosen(dashboard: dict[str, Any]) -> None:
    assert dashboard["id"] is None
    assert dashboard["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert {"model_name", "priority_class"} <= variables.keys()
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["description"]
            assert [each["refId"] for each in panel["targets"]] == sorted({each["refId"] for each in panel["targets"]})


def test_no_two_panels_lie_on_one_another(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(column, line) for column in columns for line in rows}
        assert not cells & taken, panel["title"]
        taken |= cells
