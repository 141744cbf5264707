"""The whole check: one undisturbed run, then every mode, on one loaded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from giveway.build import Model, load_model
from giveway.options import EngineOptions
from giveway.verify.modes import CheckedRequest, choose_modes, make_requests, undisturbed
from giveway.verify.run import ModeResult, answer_undisturbed, run_mode

DEFAULT_REQUESTS = 16
DEFAULT_TOKENS = 16

Load = Callable[[EngineOptions], Model]
Tell = Callable[[str, int, int], None]
"""Called before each run: its name, its number from 1, and how many there are."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check gave."""

    model_description: str
    block_size: int  # tokens
    requests: tuple[CheckedRequest, ...]
    results: tuple[ModeResult, ...]

    @property
    def is_as_promised(self) -> bool:
        """Whether every mode showed what it is there for, and no answer differs."""
        return all(result.is_as_promised for result in self.results)


def verify(
    options: EngineOptions,
    *,
    num_requests: int = DEFAULT_REQUESTS,
    num_tokens: int = DEFAULT_TOKENS,
    load: Load = load_model,
    tell: Tell = lambda name, number, count: None,  # noqa: ARG005  # nobody listens
) -> Verdict:
    """Run everything. options: model, device and the like; what makes the fight is chosen here.

    The exact mode is on unless `options.exact` says otherwise. num_requests, num_tokens: see make_requests. load: makes
    a model; it is called again for another number of threads, after the one before was closed.
    Raises ConfigError or what loading raises; what goes wrong in a mode is told in its result.
    """
    if options.exact is None:
        options = replace(options, exact=True)
    model = load(options)
    try:
        requests = make_requests(model, num_requests=num_requests, num_tokens=num_tokens, block_size=options.block_size)
        description = f"{model.name} on {model.backend.description}"
        modes = choose_modes(num_requests, has_threads=model.backend.device == "cpu")
        calm = undisturbed(num_requests)
        tell(calm.name, 1, len(modes) + 1)
        answers = answer_undisturbed(model, options, requests, calm)
        results = []
        for number, mode in enumerate(modes, start=2):
            tell(mode.name, number, len(modes) + 1)
            if mode.num_threads is not None:
                model.backend.close()  # first: there may be no room for two
                model = load(replace(options, num_threads=mode.num_threads))
            results.append(run_mode(model, options, requests, answers, mode))
        return Verdict(description, options.block_size, requests, tuple(results))
    finally:
        model.backend.close()
