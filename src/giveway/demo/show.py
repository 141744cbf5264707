"""The whole demo: one undisturbed run, then one run a scenario, each told to a display as it happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from giveway.build import Model, load_model
from giveway.demo.display import Display
from giveway.demo.report import Row, as_json, closing_sentence, make_row
from giveway.demo.run import SCENARIOS, UNDISTURBED, Scenario, run_scenario, run_undisturbed
from giveway.demo.workload import Workload
from giveway.options import EngineOptions


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo gave."""

    rows: tuple[Row, ...]
    workload: Workload
    model_description: str

    @property
    def is_as_promised(self) -> bool:
        """Whether every run that should finish did, and no answer differs."""
        return all(row.is_as_promised for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        return as_json(self.rows, self.workload, self.model_description)


def run_demo(
    options: EngineOptions,
    make_workload: Callable[[Model], Workload],
    display: Display,
    *,
    scenarios: Sequence[Scenario] = SCENARIOS,
) -> DemoResult:
    """Run everything on one loaded model.

    options: model, device and the like; what makes the fight comes from the workload. Answers are compared, so the
    exact mode is on unless `options.exact` says otherwise.
    """
    if options.exact is None:
        options = replace(options, exact=True)
    model = load_model(options)
    try:
        workload = make_workload(model)
        description = f"{model.name} on {model.backend.description}"
        display.begin(workload, description)
        with display.watch(UNDISTURBED) as watch:
            reference = run_undisturbed(model, options, workload, watch)
        rows = []
        for scenario in scenarios:
            with display.watch(scenario) as watch:
                result = run_scenario(model, options, workload, scenario, watch)
            rows.append(make_row(result, reference))
            display.end_run(rows[-1])
        display.end(rows, closing_sentence(rows))
        return DemoResult(tuple(rows), workload, description)
    finally:
        model.backend.close()
