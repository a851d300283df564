"""Inputs that Hypothesis draws: the same ones in every run of a case, wherever it runs."""

import hypothesis
from hypothesis.internal.conjecture import providers


def fix_draws() -> None:
    """Have cases draw the same examples in each run; to be called before the suite, whose draws read it.

    Hypothesis tries the constants in the source of every module that is not installed in site-packages. So
    the examples would depend on how keyedopt and the target are installed and on what earlier cases have
    imported, and each process would parse hundreds of files.
    """
    if hasattr(providers, "_get_local_constants"):  # older versions draw without these constants
        providers._get_local_constants = lambda: providers._local_constants
    hypothesis.settings.register_profile(
        "keyedopt",
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=25,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("keyedopt")
